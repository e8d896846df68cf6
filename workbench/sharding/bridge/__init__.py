"""Bridge between two modules on the same ranks with different layouts, such as an encoder and a language model.

`Grid` maps ranks to coordinates in a module's layout, `GridGroups` holds the process groups, `connect` builds the
`Bridge` that sends activations forward and gradients back. It is built on `Crossing`, which moves rows by token number
from their source ranks to their destination ranks, for any layout and packing.
"""

from __future__ import annotations

from workbench.sharding.bridge.connect import Bridge as Bridge
from workbench.sharding.bridge.connect import connect as connect
from workbench.sharding.bridge.crossing import Crossing as Crossing
from workbench.sharding.bridge.delivery import SequencePartition as SequencePartition
from workbench.sharding.bridge.grid import Grid as Grid
from workbench.sharding.bridge.grid import GridPair as GridPair
from workbench.sharding.bridge.groups import GridGroups as GridGroups
from workbench.sharding.bridge.sides import Share as Share
from workbench.sharding.bridge.sides import Side as Side
from workbench.sharding.bridge.sides import declare as declare
