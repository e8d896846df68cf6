"""Effect of merged, unmerged and bfloat16-merged adapters on a sampler's log-probabilities, as training goes on.

``python -m experiments.lora_sampler`` writes ``lora_sampler.json`` next to this file. The policy of `data/arithmetic`,
rounded to bfloat16 as released checkpoints are, gets adapters on every linear layer and the head, trained on its
rollout dataset in float32. After some steps, the log-probabilities of the trained tokens in a bfloat16 sampler with
each kind of weights are compared with those of the same policy in float64; and those of these weights in float64,
without the rounding of the sampler's own arithmetic.

Units: nats per token. Letters: T tokens of a document.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.atomic import to_json, write_whole
from workbench.policy.adapters import read_values
from workbench.policy.decoder import load_decoder
from workbench.policy.lora import Lora, merged, merged_weights, sampler_weights
from workbench.policy.lora_targets import find_adapted
from workbench.policy.sampling import Sampler
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.specs.lora import read_settings
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

RECORD = Path(__file__).with_suffix(".json")
SOURCE, ROLLOUTS = "data/arithmetic/policy", "data/arithmetic/rollouts"
KINDS = ("merged", "unmerged", "merged_bfloat16")
STEPS, RATES = (1, 4, 16, 64), (1e-5, 1e-4)
"""Optimizer steps, and learning rates: one of full fine-tuning, and one that LoRA is trained with."""
TARGETS = ".*(_proj|lm_head)"


def measure(
    steps: Iterable[int] = STEPS, rates: Iterable[float] = RATES, documents: int | None = None
) -> dict[str, Any]:
    """Return the record: for each rate and number of steps, the distance of each sampler, and of the base without."""
    batch, results = load(project_root() / ROLLOUTS), {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "base"
        load_decoder(SOURCE, project=project_root()).bfloat16().save_pretrained(source)
        rows = list(_documents(batch))[:documents]
        floor = _distance(_logprobs(_sampler(source, "bfloat16"), rows), _logprobs(_sampler(source, "float64"), rows))
        for rate in rates:
            for count in steps:
                run = _trained(source, Path(folder), count, rate)
                results[f"{count} steps at {rate:g}"] = _compared(source, run, rows)
    return {
        "command": "python -m experiments.lora_sampler",
        "base": floor,
        "adapters": results,
        "tokens": sum(len(tokens) - first for tokens, first in rows),
        "provenance": provenance(project_root(), seed=0),
    }


def _trained(source: Path, folder: Path, steps: int, rate: float) -> RunDirectory:
    spec = RunSpec.model_validate(
        {
            "model": {"source": str(source)},
            "data": {"path": ROLLOUTS},
            "loss": {"name": "grpo"},
            "lora": {"r": 8, "lora_alpha": 16, "target_modules": TARGETS},
            "optimizer": {"learning_rate": rate},
            "record": {"checkpoint_every": steps, "gradients": "none", "tokens": False, "metrics": "none"},
            "steps": steps,
            "device": "cpu",
        }
    )
    run = RunDirectory.create(folder, f"{steps}-{rate:g}", spec)
    run_here(run, project_root())
    return run


def _compared(source: Path, run: RunDirectory, rows: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
    """Distances from the policy in float64, the size of what was learned, and how much of it is in the weights."""
    folder = next(iter(run.checkpoints().values()))
    settings = read_settings(folder, run.spec.lora)
    base = {name: value.detach() for name, value in load_decoder(str(source)).named_parameters()}
    model = load_decoder(str(source))
    adapted = find_adapted(model, settings, {name: value.shape for name, value in base.items()})
    values = read_values(folder, adapted, (), requested="the adapter")
    weights, lora = base | values, Lora(settings, adapted, ())
    wide = {name: value.double() for name, value in weights.items()}
    exact = _sampler(source, "float64", lora, merged_weights(lora, wide))
    truth = _logprobs(exact, rows)
    samplers = {}
    for kind in KINDS:
        chosen = Lora(settings.model_copy(update={"sampler": kind}), adapted, ())
        given = sampler_weights(chosen, weights)
        sampler = _sampler(source, "bfloat16", chosen, given)
        alone = _sampler(source, "float64", chosen, {name: value.bfloat16() for name, value in given.items()})
        samplers[kind] = _distance(_logprobs(sampler, rows), truth)
        samplers[kind]["weights_alone"] = _distance(_logprobs(alone, rows), truth)
        if kind != "unmerged":
            samplers[kind]["learned_in_weights"] = _kept(chosen, weights, wide, kind)
    return {"learned": _distance(truth, _logprobs(_sampler(source, "float64"), rows)), "samplers": samplers}


def _kept(lora: Lora, weights: Mapping[str, Tensor], wide: Mapping[str, Tensor], kind: str) -> float:
    """Projection of the change of all adapted weights, in bfloat16, on scale B A: 1 if nothing is lost."""
    along = squares = 0.0
    for each in lora.adapted:
        delta = each.product(*(wide[name] for name in each.factors), lora.spec.scale)
        a, b = (weights[name] for name in each.factors)
        rounded = merged(each, weights[each.base], a, b, lora.spec.scale, kind).bfloat16().double()
        along += float(((rounded - wide[each.base]) * delta).sum())
        squares += float(delta.square().sum())
    return along / squares


def _sampler(
    source: Path, precision: str, lora: Lora | None = None, weights: Mapping[str, Tensor] | None = None
) -> Sampler:
    sampler = Sampler(str(source), precision=precision, lora=lora)
    if weights is not None:
        sampler.load_weights(weights)
    return sampler


def _documents(batch: RolloutBatch) -> Iterable[tuple[list[int], int]]:
    """Tokens of each document, and the place of its first trained one; those that have one."""
    for number in range(batch.num_documents):
        inside = batch.document_ids_T == number
        trained = batch.loss_mask_T[inside].nonzero()
        if len(trained):
            yield batch.tokens_T[inside].tolist(), int(trained[0])


@torch.no_grad()
def _logprobs(sampler: Sampler, rows: Sequence[tuple[list[int], int]]) -> Tensor:
    """Log-probabilities of the tokens from the first trained one on, of all documents, in float64."""
    parts = []
    for tokens, first in rows:
        ids_T = torch.tensor(tokens)
        logits_TV = sampler.model(input_ids=ids_T[None], use_cache=False).logits[0]
        logprobs_TV = torch.log_softmax(logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)), dim=-1)
        parts.append(logprobs_TV[first - 1 : -1].gather(1, ids_T[first:, None])[:, 0].double())
    return torch.cat(parts)


def _distance(values: Tensor, truth: Tensor) -> dict[str, Any]:
    gaps = values - truth
    return {"mean": float(gaps.abs().mean()), "max": float(gaps.abs().max()), "k3": float((gaps.expm1() - gaps).mean())}


if __name__ == "__main__":
    write_whole(RECORD, to_json(measure()))
