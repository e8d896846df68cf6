"""Settings of supervised fine-tuning. Formula: `workbench.losses.supervised`."""

from __future__ import annotations

from typing import ClassVar, Literal

from workbench.specs.losses.base import Surrogate


class SFT(Surrogate):
    """Negative log-likelihood."""

    reads_advantages: ClassVar[bool] = False

    kind: Literal["sft"] = "sft"
