"""Base classes of the settings of a loss."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from workbench.specs.mistakes import WHERE_SETTINGS_ARE, unusable

LOCAL_STATISTICS = ("micro_batch", "packing", "dp", "cp")
"""Invariants that break if a statistic is taken over the local tokens of one rank."""

ClipLow = Annotated[float, Field(ge=0, description="Distance from 1 down to the lower clip bound of the ratio.")]
ClipHigh = Annotated[float, Field(ge=0, description="Distance from 1 up to the upper clip bound of the ratio.")]


class _Constructed(ModelMetaclass):
    """Constructors that raise `SpecError`, a ValueError, with every mistake and the nearest keys.

    Only a call of the class comes here: validation of nested settings, copies and pickles do not, so that pydantic
    still collects the mistakes of all groups.
    """

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*args, **settings)
        except ValidationError as error:
            model: Any = cls
            raise unusable(cls.__name__, error, model, fix=f"correct the settings; {WHERE_SETTINGS_ARE}") from None


class Settings(BaseModel, metaclass=_Constructed):
    """Frozen settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


def above(low: float | None, high: float | None) -> bool:
    """True if both bounds are given and in the wrong order."""
    return low is not None and high is not None and low > high


class Surrogate(Settings):
    """The policy term: one subclass per kind, with the parameters of the function of that kind in `workbench.losses`.

    Attributes:
        breaks: invariants that it breaks by definition.
        needs_pairs: it compares the two documents of a group, which must then be in one row.
        reads_advantages: its value depends on the advantages.
        has_sequence_weight: a correction may enter as a factor of its document weight.
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
    def ratio_level(self) -> Literal["token", "document", "segment"]:
        """The unit of tokens whose geometric mean is the ratio: "token", "document" or "segment"."""
        return self.get("level") or ("document" if self.documents_by_definition else "token")

    @property
    def ratio_anchor(self) -> Literal["old", "sampler"]:
        """The policy in the denominator of the ratio."""
        return self.get("anchor") or "old"

    def get(self, name: str) -> Any:
        """Return a parameter, or None if this kind has none of that name."""
        return self.parameters.get(name)


class Anchored(Surrogate):
    """A surrogate with a ratio."""

    anchor: Literal["old", "sampler"] = "old"
    """The policy in the denominator of the ratio."""
