"""The same bits in every layout: loss, log-probabilities, gradients and updated weights.

Every computation is on a canonical piece (a block of tokens, a chunk of a weight) whose shape no layout changes, is
elementwise, or is an exact sum. See README.md in this folder.
"""

from __future__ import annotations

from workbench.reproducible.exact import Exact as Exact
from workbench.reproducible.exact_sums import OutOfRange as OutOfRange
from workbench.reproducible.exact_sums import Resolution as Resolution
from workbench.reproducible.exact_sums import exact_sum as exact_sum
from workbench.reproducible.install import install as install
from workbench.reproducible.install import reproducibly as reproducibly
from workbench.reproducible.rows import whole_row as whole_row
