"""The page of all causes: ``python -m workbench.diagnose.causes > docs/reference/causes.md``."""

from __future__ import annotations

import re
import sys

from workbench.diagnose import causes

TITLES = {
    "OBSERVED": "Observed by the recorder",
    "WHOLE": "The whole record",
    "FACTORS": "Factors and counts",
    "TOKENS": "Tokens: masks, inputs, predictions",
    "TERMS": "Terms of the loss",
    "PREDICTION": "Multi-token prediction",
    "MIXTURES": "Mixtures of experts",
    "SLICES": "Slices of ranks",
    "GRADIENTS": "Gradients and updates",
}
PARTS = "cp|dp|tp|micro_batches|accumulation"
PRODUCT = re.compile(rf"(times|over)_({PARTS})_(over_)?({PARTS}).*")
"""Factors of several parts of a run at once: the page says how they are named."""
HEAD = """# Causes that diagnose names

Names of `diagnosis.causes`, in `--json` and on the page, with the sentence that each stands for. What evidence a cause
needs is in the [guide](../guides/diagnose.md#record-your-training-loop).

A wrong value of a loss that has no name of its own is told by the part that it changes: a coefficient, a penalty's
estimator, an entropy bonus, a critic's or a z-loss as `one_term`; rewards, returns, baselines and whitening as
`advantages`; the objective of a preference or a divergence as `other_loss`; a log-softmax or a forward pass in fewer
bits as `lower_precision`; micro-batches whose gradient is cleared or left out as `ranks_lost`.
"""
OF_PRODUCTS = """
Products and ratios of the factors of ranks and parts are causes of their own, named like `times_dp_tp`,
`over_cp_dp_accumulation` and `times_dp_over_cp`.
"""


def page() -> str:
    """Render the page as Markdown."""
    sections = []
    for family, title in TITLES.items():
        rows = [
            f"| `{cause.name}` | {cause.description} |\n"
            for cause in getattr(causes, family)
            if not PRODUCT.fullmatch(cause.name)
        ]
        more = OF_PRODUCTS if family == "FACTORS" else ""
        sections.append(f"\n## {title}\n\n| name | meaning |\n| --- | --- |\n{''.join(rows)}{more}")
    return HEAD + "".join(sections)


if __name__ == "__main__":
    sys.stdout.write(page())
