"""`workbench rollouts import | check | record | score`: import, check, record and score rollouts.

Heavy imports are deferred until a verb runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from workbench.cli.terminal import answered, print_lines, width
from workbench.columns import columns

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.rollouts.batch import RolloutBatch
    from workbench.rollouts.files import FieldEntry


def rollouts(arguments: Sequence[str]) -> int:
    """Run `workbench rollouts`, which has verbs of its own."""
    code = tyro.extras.subcommand_cli_from_dict(
        {"import": import_, "check": check, "record": record, "score": score},
        prog="workbench rollouts",
        args=list(arguments),
        description="Import, check, record or score rollouts.",
        config=(tyro.conf.PositionalRequiredArgs,),
    )
    return code or 0


def import_(
    source: Path,
    output: Path,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    sampler_mode: str = "scaled",
    trainer_mode: str = "scaled",
    ignore: tuple[str, ...] = (),
    overwrite: bool = False,
) -> None:
    """Convert external rollouts to a rollout dataset.

    Args:
        source: .jsonl or .parquet (one document a record), or .npz (padded arrays); docs/guides/rollouts.md lists
            the keys.
        output: folder of the new rollout dataset.
        temperature: divisor of the logits when the tokens were sampled.
        top_k: of the sampler, if it had one.
        top_p: of the sampler; 1 keeps all.
        min_p: of the sampler; 0 keeps all.
        sampler_mode: what sampler_logprobs are: raw (before the temperature), scaled (after it), truncated (within the
            top-k and top-p set), or the engine's name for it: raw_logprobs, processed_logprobs, sglang,
            sglang_original.
        trainer_mode: what old_logprobs and ref_logprobs are, likewise.
        ignore: further keys of the file to leave out.
        overwrite: replace an existing rollout dataset.
    """
    from workbench.rollouts.kinds import check_importable

    check_importable(source)
    from workbench.rollouts.importers import load_rollouts  # torch; mistakes above are told without it
    from workbench.rollouts.sampling import Sampling, quantity_of

    sampling = Sampling(top_k, top_p, min_p, quantity_of(sampler_mode), quantity_of(trainer_mode))
    batch = load_rollouts(source, temperature=temperature, ignore=ignore, sampling=sampling)
    batch.save(output, overwrite=overwrite, provenance={"made_by": "workbench rollouts import", "source": source.name})
    print(f"{output}: written")
    check(output)


def score(
    folder: Path,
    output: Path,
    url: str,
    *,
    kind: Literal["vllm", "sglang", "llama_cpp"] = "vllm",
    model: str | None = None,
    mode: str = "raw",
    overwrite: bool = False,
) -> None:
    """Score a rollout dataset's own tokens with an inference engine, as the sampler's log-probabilities of a new one.

    Args:
        folder: a rollout dataset.
        output: folder of the new rollout dataset.
        url: address of the engine, such as http://localhost:8000. A key is read from OPENAI_API_KEY.
        kind: of the engine.
        model: its name in requests, for vllm.
        mode: what the engine reports of a prompt: raw, as vLLM and SGLang do, unless it was started otherwise.
        overwrite: replace an existing rollout dataset.
    """
    from workbench.rollouts import files
    from workbench.rollouts.engine_client import EngineClient
    from workbench.rollouts.engine_client import score as scored

    engine = EngineClient(url, kind, model, os.environ.get("OPENAI_API_KEY"))
    batch = scored(files.load(folder), engine, mode=mode)
    batch.save(output, overwrite=overwrite, provenance={"made_by": "workbench rollouts score", "engine": kind})
    print(f"{output}: written")
    check(output)


def check(folder: Path, *, loss: str = "grpo") -> int:
    """Verify a rollout dataset and print its content, and what a run on it could show.

    Exit code 1 if the loss could train on nothing in it (no trained token; no advantage that is not zero, unless it
    uses none, as sft, dpo and ref_kl; for dpo, groups that are not pairs): runs on it are equal whatever is wrong,
    or raise an error. 2 if it is damaged.

    Args:
        folder: holds manifest.json and rollouts.safetensors.
        loss: preset of the run, such as grpo, sft or dpo.
    """
    from workbench.metrics.trainable import Trainable
    from workbench.rollouts import files
    from workbench.specs.losses import LossSpec
    from workbench.specs.reading import parse_spec

    spec = parse_spec(LossSpec, {"name": loss}, where=f"--loss {loss}")
    batch = files.load(folder)
    manifest = files.read_manifest(folder)
    print(f"{folder}: whole ({manifest.tensors.bytes} bytes, sha256 {manifest.tensors.sha256[:16]}...)")
    print(batch)
    print(f"  temperature: {batch.temperature}")
    print(f"  sampling: {batch.sampling}")
    print_lines(["", *_field_table(batch, manifest.fields), *_reward_lines(batch)])
    trainable = Trainable.of(batch)
    print_lines([f"\nwhat a run with the loss {loss} could show:", *(f"  {line}" for line in trainable.lines())])
    needs_advantages = spec.surrogate.reads_advantages
    for warning in trainable.warnings if needs_advantages else ():
        print(f"  warning: {warning}")
    nothing = trainable.nothing_for(spec)
    answered(
        lambda: {
            "folder": str(folder),
            "loss": loss,
            "trains": not nothing,
            "nothing": nothing,
            "trainable": asdict(trainable),
            "manifest": manifest.model_dump(mode="json"),
        }
    )
    if nothing and (needs_advantages or not trainable.trained_tokens):
        print(
            f"  vacuous: {nothing}. The loss has no gradient here, and runs that train nothing agree whatever is "
            "wrong." + (" (For a loss without advantages use --loss sft.)" if needs_advantages else "")
        )
    elif nothing:
        print(f"  refused: {nothing}.")
    return 1 if nothing else 0


def record(
    folder: Path = Path("data/arithmetic"),
    *,
    prompts: int = 12,  # sizes of data/arithmetic, on which the experiments run
    answers: int = 6,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Warm up a tiny policy on arithmetic, sample completions, and record them with the policy (about 2 minutes).

    Args:
        folder: gets rollouts/ (the rollout dataset) and policy/ (the model, as transformers saves it).
        prompts: number of problems.
        answers: completions sampled for each problem.
        temperature: divides logits when sampling.
        top_k: sample from this many most probable tokens; the truncated support of each token is recorded.
        top_p: sample from the smallest set of most probable tokens with this probability.
        min_p: sample from tokens with this share of the largest probability at least.
        seed: of the weights, the problems and the sampling.
        overwrite: replace an existing rollout dataset.
    """
    from workbench.train.sampling import RolloutSettings, record_rollouts

    settings = RolloutSettings(
        prompts=prompts, answers=answers, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    numbers = record_rollouts(folder, settings, overwrite=overwrite, on_event=lambda line: print(line, flush=True))
    for name, value in numbers.items():
        print(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")
    check(folder / "rollouts")


def _field_table(batch: RolloutBatch, entries: Mapping[str, FieldEntry]) -> list[str]:
    """Return a line per field: unit, population of the numbers, minimum, mean and maximum."""
    trained, real = batch.loss_mask_T, batch.document_ids_T >= 0
    rows = []
    for name, values in (batch.token_fields() | batch.document_fields()).items():
        entry = entries[name]
        if entry.level == "document":
            over, chosen = "documents", values
        elif values.is_floating_point():
            over, chosen = "trained tokens", values[trained]
        else:
            over, chosen = "tokens", values[real]
        rows.append((name, entry.unit, over, *_three_numbers(chosen)))
    return columns(rows, ("field", "unit", "over", "min", "mean", "max"), width=width(), numbers_from=3)


def _three_numbers(values: Tensor) -> tuple[str, str, str]:
    if values.numel() == 0:
        return ("-", "-", "-")
    numbers = values.double()
    return (f"{numbers.min():.5g}", f"{numbers.mean():.5g}", f"{numbers.max():.5g}")


def _reward_lines(batch: RolloutBatch) -> list[str]:
    if batch.group_ids_N is None:
        return ["", "no group ids"]
    sizes = batch.group_ids_N.unique(return_counts=True)[1]
    lines = ["", f"{len(sizes)} groups of {int(sizes.min())} to {int(sizes.max())} documents"]
    if batch.rewards_N is not None:
        groups = [batch.rewards_N[batch.group_ids_N == group] for group in batch.group_ids_N.unique()]
        mixed = sum(bool(rewards.min() < rewards.max()) for rewards in groups)
        values, counts = batch.rewards_N.unique(return_counts=True)
        shown = ", ".join(
            f"{count} of {value:.4g}" for value, count in zip(values.tolist(), counts.tolist(), strict=True)
        )
        lines.append(f"rewards: {shown}" if len(values) <= 8 else f"rewards: {len(values)} different values")
        lines.append(f"{mixed} groups have different rewards; the others give no advantage")
    return lines
