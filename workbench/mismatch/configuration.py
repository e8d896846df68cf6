"""One way to compute the log-probabilities of a record: everything that a factor may switch.

Letters: N documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from workbench.mismatch.settings import Side
from workbench.rollouts.sampling import Order, Sampling

CURRENT, RECORDED = "current", "recorded"


@dataclass(frozen=True)
class Configuration:
    """Settings of one computation; those of `workbench.mismatch.settings.Side`, and where a side may have gone wrong.

    Attributes:
        weights: "current", or the name of an older checkpoint.
        prefix: "recorded", or another reading of the prompt; see `workbench.mismatch.prefixes`.
        tokens: "recorded", or another reading of the completion, such as "sampler_ids".
        offset: "none"; "values +1" or "values -1": the value of the next or the last token is recorded; "logits +1" or
            "logits -1": those of the next or the last position are read.
    """

    weights: str = CURRENT
    precision: str = "float32"
    head: str | None = None
    attention: str = "sdpa"
    gemms: str = "dense"
    routes: str = "own"
    router: str = "own"
    lora: str = "unmerged"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    order: Order = "vllm"
    logprobs: str = "processed"
    prefix: str = RECORDED
    tokens: str = RECORDED
    offset: str = "none"

    @classmethod
    def stated(cls, side: Side) -> Configuration:
        """Return the configuration that a side states."""
        return cls(**{name: getattr(side, name) for name in Side.model_fields})

    def with_changes(self, changes: Any) -> Configuration:
        """Return a copy with other values of some fields."""
        return replace(self, **dict(changes))

    @property
    def sampling(self) -> Sampling:
        """Truncation of the sampler."""
        return Sampling(self.top_k or None, self.top_p, self.min_p, order=self.order)

    @property
    def model_key(self) -> tuple[Any, ...]:
        """All that determines the modules of the trunk."""
        return (self.weights, self.precision, self.attention, self.gemms, self.router, self.lora)

    @property
    def trunk_key(self) -> tuple[Any, ...]:
        """All that determines the hidden states."""
        return (*self.model_key, self.routes, self.prefix, self.tokens)

    @property
    def head_dtype(self) -> str:
        """Of the output head: stated, or that of the trunk."""
        return self.head or self.precision
