"""PrimeIntellect-ai/prime-rl: three components of a loss, each on tokens and with a count of its own.

The component `rl` is what is configured; `ce` imitates tokens, and `ref_kl` distils a reference. Each runs where its
stream of weights is not 0, is weighted by it and divided by its number of tokens in the whole batch.

Letters: T packed tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import LOSS_WEIGHTS
from workbench.specs.losses import LossSpec
from workbench.systems.back import checked_back
from workbench.systems.case import Case, silent
from workbench.systems.contracts import CONTRACTS
from workbench.systems.metrics import prime_rl as named
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, evaluate_as

OF_THE_TYPE = {"default": ("dppo_mask_low", "dppo_mask_high"), "ipo": ("ipo_threshold",), "custom": ()}
"""Type -> options that only it has."""


class PrimeSettings(Settings):
    """`DefaultLossConfig` and `IPOLossConfig` (prime_rl/configs/trainer.py, 559b4477), and the scales of a step."""

    type: Literal["default", "ipo", "custom"] = "default"
    """Which loss the component rl is."""
    dppo_mask_low: float = Field(0.2, ge=0)
    """default: how far the probability of a token without a positive advantage may have fallen."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """default: how far that of a token with a positive advantage may have risen."""
    ipo_threshold: float = Field(0.1, ge=0)
    """ipo: how far the probability may have moved either way."""
    adv_tau: float = Field(1.0, ge=0)
    """Multiplies advantages."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio."""
    rl_scale: float | None = Field(None, gt=0)
    """Given: tokens of the component in the whole batch."""
    ce_scale: float | None = Field(None, gt=0)
    """Given: tokens of the component ce in the whole batch."""
    ref_kl_scale: float | None = Field(None, gt=0)
    """Given: tokens of the component ref_kl in the whole batch."""

    @model_validator(mode="after")
    def _options_of_the_type(self) -> PrimeSettings:
        for kind, names in OF_THE_TYPE.items():
            strange = [name for name in names if kind != self.type and name in self.model_fields_set]
            if strange:
                raise ValueError(f"{', '.join(strange)} is an option of type {kind!r}, not of {self.type!r}")
        return self


GIVEN = ("rl_scale", "ce_scale", "ref_kl_scale")


def translate(settings: PrimeSettings) -> Translation:
    """The component rl: an importance-weighted policy gradient that drops what has moved too far."""
    if settings.type == "custom":
        raise SpecError(
            "prime-rl: type = 'custom'",
            found="a function of the user's own",
            rule="only losses that prime-rl has itself can be translated",
            fix="hand the function to runs.step.run_step as a loss",
        )
    surrogate: dict[str, Any] = {"kind": "ipo", "threshold": settings.ipo_threshold}
    if settings.type == "default":
        surrogate = {
            "kind": "dppo_tv",
            "threshold_low": settings.dppo_mask_low,
            "threshold_high": settings.dppo_mask_high,
        }
    spec = LossSpec(
        name="ipo" if settings.type == "ipo" else "prime_rl",
        surrogate={**surrogate, "coefficient": settings.adv_tau},
        kl={"coefficient": settings.kl_tau},
        scaling=CONTRACTS["prime_rl"]["fsdp"],
    )
    notes = [
        "the ratio is against the sampler, and is never clipped",
        "the squared log ratio has no half, and acts on dropped tokens, too",
    ]
    if settings.type == "default":
        notes.append("an advantage of 0 counts as a negative one")
    return Translation(spec, tuple(notes), GIVEN)


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of the component rl."""
    surrogate = spec.surrogate
    settings: dict[str, Any] = {"adv_tau": surrogate.coefficient, "kl_tau": spec.kl.coefficient}
    if surrogate.kind == "dppo_tv":
        settings |= {"dppo_mask_low": surrogate.threshold_low, "dppo_mask_high": surrogate.threshold_high}
    elif surrogate.kind == "ipo":
        settings |= {"type": "ipo", "ipo_threshold": surrogate.threshold}
    else:
        raise SpecError(
            f"options of prime-rl for the surrogate {surrogate.kind!r}",
            rule="its losses are dppo_tv (default) and ipo",
            fix="take one of them, or another system",
        )
    return checked_back("prime-rl", spec, PrimeSettings, translate, settings)


def counts(settings: PrimeSettings) -> GivenCounts:
    """The component's tokens."""
    return GivenCounts(tokens=settings.rl_scale)


def components(case: Case, settings: PrimeSettings) -> Iterator[tuple[LossSpec, GivenCounts, Case, Tensor | None]]:
    """(loss, tokens of the batch, the case with the component's own mask, its weights) of each component."""
    everywhere = {"rl": case["mask"].bool(), "ce": torch.ones_like(case["mask"], dtype=torch.bool)}
    everywhere["ref_kl"] = everywhere["ce"]
    found = (
        ("rl", translate(settings).spec, settings.rl_scale),
        ("ce", LossSpec(name="sft", scaling=CONTRACTS["prime_rl"]["fsdp"]), settings.ce_scale),
        ("ref_kl", LossSpec(name="ref_kl", scaling=CONTRACTS["prime_rl"]["fsdp"]), settings.ref_kl_scale),
    )
    for name, spec, scale in found:
        weights_T = case.get(f"{name}_weights")
        if weights_T is None and name != "rl":
            continue
        mask_T = everywhere[name] if weights_T is None else torch.logical_and(everywhere[name], weights_T.bool())
        own = replace(case, inputs={**case.inputs, "mask": mask_T})
        yield spec, GivenCounts(tokens=scale), own, weights_T


def policy_loss(case: Case) -> dict[str, Any]:
    """`compute_loss`: all components that the batch has weights for."""
    settings = parse_settings(PrimeSettings, case.config, where=case.system)
    leaf = case["logprobs"].clone().requires_grad_()
    size, totals, documents = int(case.document_ids_T.max()) + 1, [], {}
    for spec, given, own, weights_T in components(case, settings):
        extensions = {} if weights_T is None else {LOSS_WEIGHTS: weights_T}
        found = evaluate_as(own, silent(leaf), settings, Translation(spec), given, extensions=extensions)
        totals.append(found.evaluated.scalars["total"])
        documents |= _documents(found, size, empty=weights_T is None)
    total = functools.reduce(Scalar.__add__, totals).value
    total.backward()
    return {"loss": total.detach(), "grad_logprobs": leaf.grad, **documents, "metrics": {}}


def _documents(found: Replayed, size: int, *, empty: bool) -> dict[str, Tensor]:
    """What a component says of each document."""
    made = named.of_documents(
        replace(found.inputs, policy_logprobs_T=found.inputs.policy_logprobs_T.detach()),
        found.evaluated.terms["policy"],
        found.translation.spec.surrogate.kind,
        size,
        empty=empty,
    )
    return {f"doc_{name.replace('/', '.')}": value_N for name, value_N in made.items()}


SYSTEM = System(
    name="prime_rl",
    title="prime-rl",
    version="559b4477 (2026-08-21)",
    settings=PrimeSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["prime_rl"],
    replays={"policy_loss_packed": policy_loss},
)
