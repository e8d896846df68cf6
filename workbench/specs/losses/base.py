"""What all settings of a loss share."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

LOCAL_STATISTICS = ("micro_batch", "packing", "dp", "cp")
"""What no longer leaves the loss unchanged once a number is taken over the tokens that one rank happens to hold."""


class Settings(BaseModel):
    """Frozen settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


def above(low: float | None, high: float | None) -> bool:
    """True if both bounds are given and in the wrong order."""
    return low is not None and high is not None and low > high


class Surrogate(Settings):
    """The policy term: one subclass a kind, with the parameters of its function of the same kind in `workbench.losses`.

    Attributes:
        breaks: invariance laws that it breaks by definition.
        needs_pairs: it compares the two documents of a group, which must then lie in one row.
        reads_advantages: its value moves with the advantages.
        has_sequence_weight: a correction may enter as part of its weight of a document.
    """

    breaks: ClassVar[tuple[str, ...]] = ()
    needs_pairs: ClassVar[bool] = False
    reads_advantages: ClassVar[bool] = True
    has_sequence_weight: ClassVar[bool] = False
    documents_by_definition: ClassVar[bool] = False

    coefficient: float = 1.0
    """Multiplies the policy term."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments of its function."""
        return {name: value for name, value in self if name not in ("kind", "coefficient")}

    @property
    def ratio_level(self) -> str:
        """Over what the ratio is a geometric mean: "token", "document" or "segment"."""
        return self.get("level") or ("document" if self.documents_by_definition else "token")

    @property
    def ratio_anchor(self) -> str:
        """Whose log-probabilities stand in the denominator of the ratio."""
        return self.get("anchor") or "old"

    def get(self, name: str) -> Any:
        """A parameter, or None if this kind has none of that name."""
        return self.parameters.get(name)


class Anchored(Surrogate):
    """A surrogate with a ratio."""

    anchor: Literal["old", "sampler"] = "old"
    """Whose log-probabilities stand in the denominator of the ratio."""
