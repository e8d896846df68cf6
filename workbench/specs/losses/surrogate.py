"""The union of all surrogates, discriminated by their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, TypeAdapter

from workbench.errors import did_you_mean
from workbench.specs.losses.base import Surrogate
from workbench.specs.losses.clipped import PPO
from workbench.specs.losses.covariance import ClipCov, KLCov
from workbench.specs.losses.direct import CISPO, GPG, SFT, ImportanceSampling, OnPolicy, Reinforce
from workbench.specs.losses.own import OwnLoss
from workbench.specs.losses.preference import DPO
from workbench.specs.losses.sequence import GMPO, GSPO, LUSPO, VESPO, GSPOToken
from workbench.specs.losses.trust_region import DPPOKL, DPPOTV, DRO, IPO, SAPO, RefKL

KINDS = (
    PPO
    | ImportanceSampling
    | Reinforce
    | OnPolicy
    | CISPO
    | GSPO
    | GSPOToken
    | LUSPO
    | GMPO
    | SAPO
    | VESPO
    | GPG
    | DPPOTV
    | DPPOKL
    | IPO
    | RefKL
    | DRO
    | ClipCov
    | KLCov
    | SFT
    | DPO
    | OwnLoss
)
SURROGATES: Mapping[str, type[Surrogate]] = {kind.model_fields["kind"].default: kind for kind in get_args(KINDS)}
"""Kind -> its settings."""

PARAMETERS = tuple(dict.fromkeys(name for kind in SURROGATES.values() for name in kind().parameters))
"""Every parameter of any kind."""


def _check_kind(value: Any) -> Any:
    """Check that the kind exists and that every given key is one of its parameters; drop None of other kinds."""
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind", "ppo")
    if not isinstance(kind, str) or kind not in SURROGATES:
        hint = did_you_mean(str(kind), SURROGATES, otherwise=f"known: {', '.join(SURROGATES)}")
        raise ValueError(f"no surrogate {kind!r} ({hint})")
    defaults = SURROGATES[kind]().parameters
    given = {"kind": kind}
    for name, setting in value.items():
        own = name in defaults or name in ("kind", "coefficient")
        users = [] if own else [other for other, spec in SURROGATES.items() if name in spec.model_fields]
        if not users:
            given[name] = setting
        elif setting is not None:
            raise ValueError(f"{name} is not used by the surrogate {kind!r}; it belongs to {', '.join(users)}")
    if given.get("level") == "token" and "token" not in get_args(SURROGATES[kind].model_fields["level"].annotation):
        raise ValueError(
            f"level 'token' is not used by the surrogate {kind!r}, whose ratio is that of a document; "
            "'ppo' is its counterpart for tokens"
        )
    if unset := [name for name, default in defaults.items() if default is not None and given.get(name, 0) is None]:
        raise ValueError(
            f"{', '.join(unset)} of the surrogate {kind!r} cannot be None; leave it out for the "
            f"default ({', '.join(str(defaults[name]) for name in unset)})"
        )
    return given


AnySurrogate = Annotated[KINDS, Field(discriminator="kind"), BeforeValidator(_check_kind)]
"""Settings of one surrogate."""


def parse_surrogate(**settings: Any) -> Surrogate:
    """Return the settings of a surrogate, from its kind and the differences from the kind's defaults.

    Example:
        >>> parse_surrogate(kind="gspo", clip_high=5e-4).clip_low
        0.0003
    """
    return TypeAdapter(AnySurrogate).validate_python(settings)
