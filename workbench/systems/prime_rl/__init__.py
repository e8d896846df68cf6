"""PrimeIntellect-ai/prime-rl: three components of a loss, each on tokens and with a count of its own.

The component `rl` is the configured loss; `ce` imitates tokens, and `ref_kl` distils a reference. Each acts on tokens
with a weight other than 0, is weighted by it and divided by its number of tokens in the whole batch.

Letters: T packed tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.reduction.denominators import GivenCounts
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import LOSS_WEIGHTS
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case, logprobs_only
from workbench.systems.prime_rl import metrics as named
from workbench.systems.prime_rl.dump import read_dump
from workbench.systems.prime_rl.settings import PrimeSettings
from workbench.systems.prime_rl.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import System, Translation
from workbench.systems.replays import back_propagate, evaluate_as


def components(case: Case, settings: PrimeSettings) -> Iterator[tuple[LossSpec, GivenCounts, Case, Tensor | None]]:
    """Yield (loss, tokens of the batch, the case with the component's own mask, its weights) of each component."""
    counted_T, compat = case["mask"].bool(), {"scaling": CONTRACTS["fsdp"]}
    everywhere_T = torch.ones_like(counted_T)
    losses = (
        ("rl", translate(settings).spec, settings.rl_scale, counted_T),
        ("ce", LossSpec(name="sft", compat=compat), settings.ce_scale, everywhere_T),
        ("ref_kl", LossSpec(name="ref_kl", compat=compat), settings.ref_kl_scale, everywhere_T),
    )
    for name, spec, scale, mask_T in losses:
        weights_T = case.get(f"{name}_weights")
        if weights_T is None and name != "rl":
            continue
        if weights_T is not None:
            mask_T = torch.logical_and(mask_T, weights_T.bool())
        masked_case = replace(case, inputs={**case.inputs, "mask": mask_T})
        yield spec, GivenCounts(tokens=scale), masked_case, weights_T


def policy_loss(case: Case) -> dict[str, Any]:
    """Replay `compute_loss`: all components that the batch has weights for."""
    settings, leaf = case.options(PrimeSettings), case.leaf("logprobs")
    size, totals = int(case.document_ids_T.max()) + 1, []
    metrics: dict[str, Tensor] = {}
    for spec, given, masked_case, weights_T in components(case, settings):
        row = {"extensions": {} if weights_T is None else {LOSS_WEIGHTS: weights_T}}
        replayed = evaluate_as(masked_case, logprobs_only(leaf), settings, Translation(spec), given, **row)
        totals.append(replayed.evaluated.scalars["total"])
        inputs, term = replayed.detached_inputs, replayed.evaluated.terms["policy"]
        metrics |= named.of_documents(inputs, term, spec.surrogate.kind, size, empty=weights_T is None)
    outputs = back_propagate(functools.reduce(Scalar.__add__, totals).value, {"grad_logprobs": leaf})
    return outputs | {f"doc_{name.replace('/', '.')}": value_N for name, value_N in metrics.items()}


SYSTEM = System(
    name="prime_rl",
    title="prime-rl",
    version="559b4477 (2026-08-21)",
    settings=PrimeSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    replays={"policy_loss_packed": policy_loss},
    arrays=("rollout_logprobs", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"),
    unsupported_arrays={"old_logprobs": "prime-rl takes its ratio against the sampler; give rollout_logprobs"},
    aliases=named.names,
    read_dump=read_dump,
)
