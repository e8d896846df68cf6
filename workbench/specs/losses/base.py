"""Base classes of the settings of a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic._internal._model_construction import ModelMetaclass

from workbench.specs.descriptions import describe_fields
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


_created: list[type[BaseModel]] = []
_NUMBERS = (int, float, int | None, float | None)
_MOST_BYTES, _MOST_BYTES_OF_A_NAME = 4095, 255  # PATH_MAX without its final NUL, NAME_MAX: linux/limits.h
_MOST_BYTES_OF_A_LETTER = 4  # of UTF-8: RFC 3629


class Settings(BaseModel, metaclass=_Constructed):
    """Frozen settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @classmethod
    def model_json_schema(cls, *args: Any, **named: Any) -> dict[str, Any]:
        """As pydantic's, with docstrings as descriptions."""
        describe_fields(_created)
        return super().model_json_schema(*args, **named)

    @classmethod
    def __pydantic_init_subclass__(cls, **named: Any) -> None:
        _created.append(cls)

    @model_validator(mode="before")  # of the model: a discriminator field takes no such validator
    @classmethod
    def _check_sizes(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping):
            fields = cls.model_fields
            for name, value in settings.items():  # the given ones: most settings are defaults
                if name in fields and (problem := _misfit(value, fields[name].annotation)):
                    raise ValueError(f"{name} = {str(settings[name])[:40]!r}: {problem}")
        return settings


def _misfit(value: Any, annotation: Any) -> str:
    """Problem of a value that no setting can have; "" if there is none."""
    if isinstance(value, bool):
        return "a number is needed, not a truth value" if annotation in _NUMBERS else ""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of 64 bits is needed"
    if isinstance(value, float) and math.isnan(value):
        return "NaN is no setting"
    return _unusable_text(value) if isinstance(value, str) else ""


def _unusable_text(text: str) -> str:
    """Problem of a text that no file system takes as a path; every text in settings is a name or a path."""
    if len(text) <= _MOST_BYTES_OF_A_NAME // _MOST_BYTES_OF_A_LETTER and text.isprintable():
        return ""  # almost all: neither NUL nor half of a pair is printable, and no encoding of it is too long
    if "\0" in text:
        return "a NUL character stands in it"
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair stands in it, which is no character"
    if len(encoded) > _MOST_BYTES or any(len(name) > _MOST_BYTES_OF_A_NAME for name in encoded.split(b"/")):
        return f"{len(encoded):,} bytes; a path has at most {_MOST_BYTES:,}, a name in it {_MOST_BYTES_OF_A_NAME}"
    return ""


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
