"""One rank of one run: read the spec, train its steps, write the record.

Started once per rank by a launcher (``python -m workbench.train.worker RUN_DIR [RUN_DIR ...]``: several runs one after
another), or called in this process, which simulates several ranks (`run_here`). The first rank writes the record; every
rank writes its exit record.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import RecordError, SpecError, WorkbenchError
from workbench.faults import planted
from workbench.metrics.evidence import Evidence
from workbench.metrics.step import MOST_MOVED, SAMPLER_MOVED, StepClock, forget_peak, peak_bytes
from workbench.metrics.trainable import Trainable
from workbench.policy.gemm_formats import emulated_formats
from workbench.policy.model import DTYPES, Policy
from workbench.records.certificate import Certificate, write_certificate
from workbench.records.directory import RunDirectory
from workbench.records.progress import CONTINUES
from workbench.records.provenance import provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load, save
from workbench.sharding import flight
from workbench.sharding.divisibility import check_documents_per_step
from workbench.sharding.gradients import weight_norms
from workbench.sharding.mesh import Mesh, job_store, join, leave, make_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy, continue_run, continued_from, save_checkpoint
from workbench.train.exact import kernels_of, reproducible_mode
from workbench.train.old_pass import with_advantages
from workbench.train.online import MIXED_PROMPTS, Online
from workbench.train.optimizer import LossScale, build_optimizer
from workbench.train.own import loss_file
from workbench.train.preemption import Preemption
from workbench.train.routes import ROUTES, balance_biases
from workbench.train.rows import StepData, in_order
from workbench.train.trace import Tracer, certify, fingerprint_gradients, write_trace
from workbench.train.watched import enable_diagnostics
from workbench.train.weight_sync import DIFFERING, SYNC, WeightSync


def run_here(run: RunDirectory, project: Path) -> None:
    """Run in this process, even if it is itself a rank of another job; several ranks are simulated.

    Raises:
        WorkbenchError: any failure of the run; it is recorded in the run directory too.
    """
    spec, layout = run.spec, run.spec.layout
    if layout.world_size == 1:
        _rank(run, project, rank=0, join_job=False)
        return

    def rank(mesh: Mesh) -> None:
        number = (mesh["pp"].rank * mesh["dp_cp"].size + mesh["dp_cp"].rank) * layout.tp + mesh["tp"].rank
        _rank(run, project, rank=number, join_job=False, mesh=mesh)

    try:
        with planted(spec.faults):
            simulate(rank, **spec.layout.mesh_sizes, device=_device_type(spec), timeout_s=spec.timeout_s)
    except BaseException as error:
        if 0 not in run.exits():
            run.write_exit(0, {}, error)
        run.set_state("failed")
        raise


def _device_type(spec: RunSpec) -> str:
    return os.environ.get("WORKBENCH_DEVICE", "cpu" if spec.device == "auto" else spec.device)


def _rank(
    run: RunDirectory,
    project: Path,
    *,
    rank: int,
    join_job: bool,
    mesh: Mesh | None = None,
    preemption: Preemption | None = None,
) -> None:
    """Execute one rank of a run and write its exit record. If the mesh is given, faults are planted already."""
    coordinates: dict[str, int] = {}
    try:
        if join_job and not _begins(run, rank):
            flight.stop()
            return
        if rank == 0 and not join_job:
            run.set_state("running")
        spec = run.spec
        faults = spec.faults if mesh is None else ()
        if mesh is None:
            device_type = _device_type(spec)
            device = torch.device(device_type)
            if join_job:
                device = join(device_type, timeout_s=spec.timeout_s, name=run.path.name)
            mesh = make_mesh(**spec.layout.mesh_sizes, device=device, alone=not join_job)
        coordinates = mesh.coordinates
        with planted(faults):
            _train(run, spec, mesh, project, preemption)
    except BaseException as error:
        if isinstance(error, WorkbenchError) and coordinates:
            error.add_note(f"rank {rank} ({', '.join(f'{a}={c}' for a, c in coordinates.items())})")
        run.write_exit(rank, coordinates, error, waited_in=flight.waiting_in())
        if rank == 0:
            run.set_state("failed")
        raise
    run.write_exit(rank, coordinates, None)
    if rank == 0:
        run.set_state("succeeded")
    if join_job:
        flight.stop()
        leave()


def _train(run: RunDirectory, spec: RunSpec, mesh: Mesh, project: Path, preemption: Preemption | None) -> None:
    torch.manual_seed(spec.seed)
    batch = None if spec.online.on else load(project / spec.data.path)
    sampled_at = spec.online.temperature if batch is None else batch.temperature
    policy = build_policy(spec, mesh, project, temperature=sampled_at)
    online = None
    with contextlib.ExitStack() as swapped:
        if batch is None:
            online = Online(spec, policy, project)
            steps, spec = online.steps, with_advantages(spec)
            if online.reference is not None:
                swapped.enter_context(reproducible_mode(online.reference, spec))
        else:
            _check_batch(batch, spec, policy.vocabulary_size)
            steps = functools.partial(_recorded, batch, spec)
        swapped.enter_context(reproducible_mode(policy, spec))
        if mesh.is_first:
            special = kernels_of(policy) | loss_file(spec.loss, project) | _emulated(policy)
            run.write_json("provenance.json", provenance(project, seed=spec.seed) | special)
        _take_steps(run, spec, mesh, policy, steps, project, preemption, None if online is None else online.sync)


def _emulated(policy: Policy) -> dict[str, list[str]]:
    """Formats of GEMMs whose values are computed without such arithmetic, for a record; {} if there are none."""
    formats = emulated_formats(policy.model, DTYPES[policy.dtypes.compute])
    return {"emulated_gemms": formats} if formats else {}


def _recorded(batch: RolloutBatch, spec: RunSpec, first: int) -> Iterator[StepData]:
    return (StepData(documents, batch) for documents in in_order(batch, spec.data.documents_per_step, first))


def _take_steps(
    run: RunDirectory,
    spec: RunSpec,
    mesh: Mesh,
    policy: Policy,
    steps: Callable[[int], Iterator[StepData]],
    project: Path,
    preemption: Preemption | None,
    sync: WeightSync | None = None,
) -> None:
    loss, optimizer = flow.build_loss(spec.loss, project), build_optimizer(policy, spec)
    scale = LossScale.of(spec.dtypes)
    first = continue_run(run, policy, optimizer, scale, None if sync is None else sync.restore)
    if first == spec.steps:  # interrupted after the last step
        save_checkpoint(run, first, policy, optimizer, scale, {} if sync is None else sync.state())
    # The reproducible mode has fingerprints of weights instead, whose bits do not depend on the layout as sums do.
    noted = first == 0 and spec.record.gradients != "none" and not spec.reproducible.on
    weights = weight_norms(policy.model, policy.shards, mesh) if noted else {}
    for number, data in zip(range(first, spec.steps), steps(first), strict=False):
        if preemption is not None:
            preemption.begin_step(number)
        with StepClock(mesh.device) as clock:
            rows, totals = flow.prepare_rows(data.documents, spec, mesh)
            tracer = Tracer(policy, rows, spec.record.trace_tokens) if spec.record.trace_tokens else None
            tokens = spec.record.tokens or spec.certified or tracer is not None or spec.routing.record
            policy.loss_scale = scale.value
            with tracer or contextlib.nullcontext():
                result = flow.run_step(
                    policy,
                    loss,
                    rows,
                    totals,
                    num_source=data.source.num_tokens if tokens else 0,
                    frozen_clip_S=_frozen_clip(run, number),
                    keep_gradients=spec.record.gradients == "full",
                    level=spec.record.metrics,
                    loss_spec=spec.loss,
                    fused=spec.policy.fused_loss,
                    routing=spec.routing,
                    prediction=spec.prediction,
                )
            marks = fingerprint_gradients(policy) if spec.certified else None
            norm = flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
            if accepted := scale.accepts(norm):
                optimizer.step()
                if result.loads is not None and spec.routing.bias_step:
                    balance_biases(policy, result.loads, spec.routing.bias_step)
            certificate = None if marks is None else certify(policy, result, marks)
        for reason in result.fallbacks:
            sys.stdout.write(f"step {number}: fused_loss: {reason}\n")
        trace = None if tracer is None else tracer.finish(result.tokens["policy_logprobs"])
        if mesh.is_first:
            if trace is not None:
                write_trace(run, number, trace)
            if spec.online.on and spec.record.tokens and data.fresh:
                save(data.source, run.path / "rollouts" / _name(number), provenance={"made_by": "workbench run"})
            if data.sync:
                run.write_json(f"{SYNC}/{_name(number)}.json", data.sync)
            numbers: dict[str, Any] = dict(data.numbers) | (
                {CONTINUES: continued_from(run)} if number == first > 0 else {}
            )
            numbers |= {"weight_norms": weights} if weights and number == 0 else {}
            if scale.interval is not None:
                numbers |= {"precision/loss_scale": policy.loss_scale, "precision/skipped": float(not accepted)}
            _record(run, number, result, norm, clock.step_ms, mesh, certificate, numbers)
        every, last = spec.record.checkpoint_every, number + 1 == spec.steps
        stops = preemption is not None and not last and preemption.stops_after(number)
        if every and ((number + 1) % every == 0 or last or stops) and (math.isfinite(norm) or not accepted):
            save_checkpoint(run, number + 1, policy, optimizer, scale, {} if sync is None else sync.state())
        if preemption is not None and stops:
            preemption.leave(number + 1)


def _check_batch(batch: RolloutBatch, spec: RunSpec, vocabulary: int) -> None:
    """Raise an error for rollouts that this policy cannot have sampled, and for too few documents for a step."""
    if int(batch.tokens_T.max()) >= vocabulary:
        raise SpecError(
            f"train {spec.model.source} on {spec.data.path}",
            found=f"token id {int(batch.tokens_T.max())}, and a vocabulary of {vocabulary}",
            rule="every token id is below the size of the vocabulary",
            fix="use the model that these rollouts were sampled from",
        )
    check_documents_per_step(spec.data.documents_per_step, batch.num_documents, spec.data.path)
    recorded = spec.data.advantages.name == "recorded" and spec.loss.surrogate.reads_advantages
    if recorded and not batch.advantages_T[batch.loss_mask_T].any() and Trainable.of(batch).mixed_groups:
        raise SpecError(
            f"train on {spec.data.path}",
            found="no recorded advantages (all are zero), and groups with different rewards",
            rule="a loss with nothing but advantages of zero trains nothing",
            fix="set data.advantages to an estimator, such as {name: grpo}, which computes them from the rewards",
        )


def _frozen_clip(run: RunDirectory, number: int) -> Tensor | None:
    """Clip decisions of another configuration of the same experiment, at this step.

    The launcher writes the run of that configuration into the state; without a launcher there must be only one.
    """
    name = run.spec.frozen_clip
    if name is None:
        return None
    chosen = run.state.get("frozen_clip_run")  # not the newest run, whose settings may differ (DECISIONS.md, row 21)
    runs = [other for other in RunDirectory.find(run.path.parent, name) if chosen in (None, other.path.name)]
    if len(runs) != 1 or runs[0].status != "succeeded":
        raise RecordError(
            f"frozen_clip = {name!r}",
            found=", ".join(f"{other.path.name} ({other.status})" for other in runs) or "no such run",
            rule="one finished run of that configuration, with record.tokens, in the same experiment",
            fix="run the whole ablation, or leave frozen_clip out",
        )
    return runs[0].read_tensors(_name(number, ".tokens"))["clipped"]


def _record(
    run: RunDirectory,
    number: int,
    result: flow.StepResult,
    norm: float,
    step_ms: float,
    mesh: Mesh,
    certificate: Certificate | None,
    numbers: Mapping[str, Any],
) -> None:
    record: dict[str, Any] = {"step": number}
    record |= {f"loss/{name}/sum": float(scalar) for name, scalar in result.loss.items()}
    record |= {
        "gradient/norm/global": norm,
        "gradient/clip/coefficient": flow.clip_coefficient(norm, run.spec.optimizer.max_grad_norm),
        "documents/trained/sum": result.totals.documents,
    }
    record |= {**result.metrics, **result.evidence, **numbers}
    record |= {"time/step_ms": step_ms, "time/ended_ns": time.time_ns(), "memory/peak_bytes": peak_bytes(mesh.device)}
    record |= {f"reproducible/{name}": value for name, value in result.range.items()}
    if result.fallbacks:
        record["fused_loss/fallbacks"] = list(result.fallbacks)
    if run.spec.record.gradients != "none":
        record["gradient_norms"] = dict(result.norms)
    if result.gradients:
        run.write_tensors(_name(number, ".gradients"), result.gradients)
    if run.spec.record.tokens:
        run.write_tensors(_name(number, ".tokens"), result.tokens)
    if result.routes is not None:
        run.write_tensors(_name(number, ".routes"), {ROUTES: result.routes})
    if certificate is not None:
        write_certificate(run, number, certificate)
        record["certificate"] = certificate.hash
    run.append_step(record)
    messages = (_nothing_trained(record), _not_sampled(run.spec, record), _not_synced(number, record))
    for text in filter(None, messages):
        sys.stderr.write(f"step {number}: {text}\n")  # standard output may be a verb's JSON, where ranks are simulated


def _nothing_trained(record: Mapping[str, Any]) -> str:
    """Return a log line for a step without any gradient, which trains nothing and is no evidence; "" otherwise.

    Online this is no failure: all completions of each prompt may have earned the same reward.
    """
    evidence = Evidence.of_steps([record])
    if evidence is None or not evidence.nothing:
        return ""
    same = "; the completions of each prompt earned the same reward" if record.get(MIXED_PROMPTS) == 0 else ""
    return f"nothing is trained: {evidence.nothing}{same}"


def _not_sampled(spec: RunSpec, record: Mapping[str, Any]) -> str:
    """Return a log line for a sampler most of whose weights are still those of the source; "" otherwise."""
    moved = record.get(SAMPLER_MOVED, 1.0)
    if moved >= MOST_MOVED:
        return ""
    dtype = spec.online.sampler_precision or spec.dtypes.compute
    return (
        f"{100 * moved:.2g} % of the sampler's weights differ from those of the start: changes below half a unit in "
        f"the last place of {dtype} do not reach it; see online.sampler_precision and docs/guides/precision.md"
    )


def _not_synced(number: int, record: Mapping[str, Any]) -> str:
    """Return a log line for a sampler that has not the weights which the settings mean; "" otherwise."""
    share = record.get(DIFFERING, 0.0)
    if not share:
        return ""
    return (
        f"{share:.0%} of the sampler's tensors are not those of the trainer: {SYNC}/{_name(number)}.json has "
        "their layers, and what the sampler has in their place"
    )


def _name(number: int, suffix: str = "") -> str:
    return f"step{number:04d}{suffix}"


def main() -> None:
    """Entry point of a rank: output goes to its log in each run, the exit code is 0 on success."""
    parser = argparse.ArgumentParser(description="One rank of runs of the workbench, one after another.")
    parser.add_argument("run_dirs", type=Path, nargs="+")
    parser.add_argument("--project", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    code, rank = 0, int(os.environ.get("RANK", "0"))
    try:
        for path in arguments.run_dirs:
            _take_turn(RunDirectory.open(path), arguments.project, rank)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing left to save; interpreter teardown costs a second a rank


def _take_turn(run: RunDirectory, project: Path, rank: int) -> None:
    """Execute a run in this process as if it were the first, unless it was cancelled before its turn."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(run.log_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    preemption = Preemption(run, rank) if run.spec.record.checkpoint_every else None
    enable_diagnostics(run, rank, on_sigterm=signal.SIG_DFL if preemption is None else preemption.on_sigterm)
    gc.collect()
    forget_peak(torch.device(_device_type(run.spec)))
    _rank(run, project, rank=rank, join_job=True, preemption=preemption)


def _begins(run: RunDirectory, rank: int) -> bool:
    """Mark the run as running, on every rank the same; False if its end was requested while it waited for its turn."""
    ranks, key = range(run.spec.layout.world_size), f"begins/{run.path.name}"
    with flight.entering("begin", "world", ranks, "world"):
        store = job_store(timeout_s=run.spec.timeout_s)
        begins = rank == 0 and run.set_state("running") == "running"
        if store is not None and rank == 0:
            store.set(key, str(begins))
        return begins if store is None else store.get(key) == b"True"


if __name__ == "__main__":
    main()
