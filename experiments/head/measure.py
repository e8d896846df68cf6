"""Cost of the output head: log-probabilities and gradients from hidden states, ours and others', in one run.

Everything is measured against the lower bound: three GEMMs forward and backward (one for log-probabilities alone), by
cuBLAS, in the same run. A round runs every contender once, in a new random order; a sample is the mean of passes for a
tenth of a second, after as many that are not counted: a GPU that has just been idle is above its power limit for a
while, and faster than in training. Errors are against float64 of the same operands. Without a GPU one tiny size is run,
without bars.

Units: milliseconds between device events; GiB beyond the operands and both gradients.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.head.contenders import BOTH, FORWARD, Contender, Pass, part_of
from experiments.head.page import write_head_report
from experiments.head.workloads import SIZES, SIZES_WITHOUT_GPU, Size, Truth, Workload, relative_error
from workbench.records.provenance import project_root, provenance

ROUNDS = 5
SAMPLE_MS = 100.0
"""Least duration of a sample, and of what runs before it and is not counted."""

GIB = float(1 << 30)
HOPELESS = 40.0
"""A contender that needs more than this many times the floor is measured only once."""


def measure(
    *,
    pairs: int = ROUNDS,
    later: int = 0,
    report_progress: Callable[[str], None] = lambda line: None,
    sizes: Sequence[Size] | None = None,
) -> dict[str, Any]:
    """Measure everything and return a record.

    Args:
        pairs: rounds.
        later: not used; every benchmark takes it.
        report_progress: called with progress messages.
        sizes: of the workloads; None for those of the device.
    """
    large = torch.cuda.is_available()
    device = torch.device("cuda" if large else "cpu")
    workloads = {}
    for size in sizes or (SIZES if large else SIZES_WITHOUT_GPU):
        report_progress(str(size))
        workloads[size.name] = _workload(size, device, pairs, report_progress)
    rows = longest_rows(report_progress) if large else {}
    record = {
        "benchmark": "head",
        "device": torch.cuda.get_device_name() if large else "cpu",
        "rounds": pairs,
        "workloads": workloads,
        "longest_rows": rows,
        "provenance": provenance(project_root()),
    }
    return record | {"bars": bars(record) if large else {}}


def _workload(size: Size, device: torch.device, rounds: int, log: Callable[[str], None]) -> dict[str, Any]:
    work = Workload.make(size, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    errors = _errors(work, log)
    both = interleaved(work, BOTH, rounds, log)
    forward = interleaved(work, FORWARD, rounds, log)
    for name, entry in errors.items():
        both["contenders"][name] |= entry
    return {
        "tokens": size.tokens,
        "dimension": size.dimension,
        "vocabulary": size.vocabulary,
        "forward_backward": both,
        "forward": forward,
    }


# -- time and memory -------------------------------------------------------------------------------------------


def interleaved(
    work: Workload, contenders: Iterable[Contender], rounds: int, log: Callable[[str], None]
) -> dict[str, Any]:
    """Measure samples and memory of every contender that runs here, the floor included."""
    passes: dict[str, Pass] = {}
    listed: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        entry: dict[str, Any] = {
            "kind": contender.kind,
            "what": contender.what,
            "memory": contender.memory,
            "loss": contender.loss,
            "package": contender.package,
            "version": contender.version,
        }
        if contender.only and work.size.name not in contender.only:
            continue
        listed[contender.name] = entry
        if contender.version is None:
            entry["left_out"] = f"{contender.package} is not installed"
            continue
        log(f"  {contender.name}")
        try:
            one = contender.make(work)
            _clear(work)
            one()  # compiles
            entry["extra_gib"] = _extra_memory(work, one)
            passes[contender.name] = one
        except Exception as error:  # a peer may fail in any way; that is a finding
            entry["left_out"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        _clear(work)
    order = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in passes}
    floor = next(name for name, entry in listed.items() if entry["kind"] == "floor")
    for number in range(rounds):
        log(f"  round {number + 1} of {rounds}")
        names = list(passes)
        order.shuffle(names)
        for name in names:
            hopeless = samples[name] and samples[floor] and samples[name][0] > HOPELESS * samples[floor][0]
            if not hopeless:
                samples[name].append(_sample_ms(work, passes[name]))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, values in samples.items():
        listed[name] |= {"samples_ms": values, "median_ms": medians[name], "ratio": medians[name] / medians[floor]}
    return {"floor_ms": medians[floor], "contenders": listed}


def _sample_ms(work: Workload, one: Pass) -> float:
    _clear(work)
    one()  # allocates
    passes = math.ceil(SAMPLE_MS / _passes_ms(work, one, 1))
    _passes_ms(work, one, passes)
    return _passes_ms(work, one, passes) / passes


def _passes_ms(work: Workload, one: Pass, passes: int) -> float:
    """Milliseconds that some passes take, one after another."""
    if work.hidden_TD.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(passes):
            _forget(work)
            one()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(passes):
        _forget(work)
        one()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _extra_memory(work: Workload, one: Pass) -> float | None:
    """GiB at the peak beyond the memory allocated before and both gradients; None without a GPU."""
    if work.hidden_TD.device.type != "cuda":
        return None
    _clear(work)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one()
    torch.cuda.synchronize()
    gradients = sum(t.numel() * t.element_size() for t in (work.hidden_TD.grad, work.weight_VD.grad) if t is not None)
    return (torch.cuda.max_memory_allocated() - before - gradients) / GIB


def _forget(work: Workload) -> None:
    work.hidden_TD.grad = work.weight_VD.grad = None


def _clear(work: Workload) -> None:
    _forget(work)
    if work.hidden_TD.device.type == "cuda":  # elsewhere no memory is measured
        gc.collect()
        torch.cuda.empty_cache()


# -- errors ----------------------------------------------------------------------------------------------------


def _errors(work: Workload, log: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Mean error of log-probabilities in nats, relative error of both gradients, by contender."""
    results: dict[str, dict[str, float]] = {}
    for loss in ("token", "gspo", "gspo long"):
        log(f"  float64 of {loss}")
        truth = Truth.of(work, part_of(work, loss))
        for contender in BOTH:
            left = contender.only and work.size.name not in contender.only
            if contender.loss != loss or contender.version is None or left:
                continue
            try:
                logprobs_T = contender.make(work)()
                assert work.hidden_TD.grad is not None
                assert work.weight_VD.grad is not None
                results[contender.name] = {
                    "hidden_error": relative_error(work.hidden_TD.grad, truth.hidden_TD),
                    "weight_error": relative_error(work.weight_VD.grad, truth.weight_VD),
                }
                if logprobs_T is not None:
                    results[contender.name]["logprob_error"] = float(
                        (logprobs_T.detach().double() - truth.logprobs_T).abs().mean()
                    )
            except Exception as error:  # listed with its message when it is timed
                log(f"  {contender.name}: {type(error).__name__}")
            _clear(work)
        del truth
        _clear(work)
    return results


# -- the longest row -------------------------------------------------------------------------------------------

HEADS = {"Qwen3-0.6B": (1024, 151936), "Qwen3-8B": (4096, 151936)}
ROW_SECONDS = 8.0
"""No longer row is tried once one has taken this long."""


def longest_rows(report_progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure peak memory of one row, doubled until it does not fit (or takes too long): ours and all logits."""
    contenders = {c.name: c for c in BOTH}
    results: dict[str, Any] = {}
    for head, (dimension, vocabulary) in HEADS.items():
        for name in ("fused_loss", "plain torch", "Liger triton_grpo_loss"):
            tokens, lines, end = 8192, [], "out of memory"
            while contenders[name].version is not None:
                report_progress(f"longest row: {head}, {name}, {tokens} tokens")
                start = time.perf_counter()
                try:
                    peak = _peak_of_row(contenders[name], Size(head, tokens, dimension, vocabulary))
                except torch.cuda.OutOfMemoryError:
                    break
                except Exception as error:
                    end = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
                    break
                lines.append({"tokens": tokens, "peak_gib": peak})
                if time.perf_counter() - start > ROW_SECONDS:
                    end = "time"
                    break
                tokens *= 2
            results.setdefault(head, {})[name] = {"rows": lines, "end": end}
            gc.collect()
            torch.cuda.empty_cache()
    return results


def _peak_of_row(contender: Contender, size: Size) -> float:
    """GiB at the peak of one pass, operands and gradients included. Values are random: only memory is measured."""
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.device("cuda")
    work = Workload(
        size,
        torch.randn(size.tokens, size.dimension, device=device, dtype=torch.bfloat16, requires_grad=True),
        (torch.randn(size.vocabulary, size.dimension, device=device, dtype=torch.bfloat16) * 0.02).requires_grad_(),
        torch.randint(size.vocabulary, (size.tokens,), device=device),
        torch.full((size.tokens,), -12.0, device=device),
        torch.ones(size.tokens, device=device),
    )
    torch.cuda.reset_peak_memory_stats()
    contender.make(work)()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


# -- bars ------------------------------------------------------------------------------------------------------


def bars(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Check the bars of a record; a bar without its numbers does not hold."""
    results: dict[str, dict[str, Any]] = {}

    def at_most(name: str, bar: float, value: float | None) -> None:
        results[name] = {"bar": bar, "median": value, "holds": value is not None and value <= bar}

    def at_least(name: str, bar: float, value: float | None) -> None:
        results[name] = {"bar": bar, "median": value, "holds": value is not None and value >= bar, "least": True}

    for letter, work in record["workloads"].items():
        both, alone = work["forward_backward"]["contenders"], work["forward"]["contenders"]
        narrow = work["dimension"] < 2048
        accumulator = work["vocabulary"] * work["dimension"] * 4 / GIB
        at_most(f"{letter}: fused_loss", 1.10 if narrow else 1.06, both["fused_loss"].get("ratio"))
        at_most(f"{letter}: fused_loss GSPO", 1.12, both["fused_loss GSPO"].get("ratio"))
        at_most(f"{letter}: fused_loss GSPO long", 1.15, both["fused_loss GSPO long"].get("ratio"))
        at_most(f"{letter}: token_logprobs, room", 1.10, both["token_logprobs, room"].get("ratio"))
        at_most(f"{letter}: token_logprobs", 1.45, both["token_logprobs"].get("ratio"))
        at_most(f"{letter}: forward, entropy", 1.05, alone["token_logprobs, entropy"].get("ratio"))
        at_most(f"{letter}: forward, extra GiB", 64 / 1024, alone["token_logprobs, entropy"].get("extra_gib"))
        at_most(f"{letter}: fused_loss, extra GiB", 1.3, both["fused_loss"].get("extra_gib"))
        at_most(
            f"{letter}: fused_loss float32, extra GiB", 1.3 + accumulator, both["fused_loss float32"].get("extra_gib")
        )
        at_most(f"{letter}: log-probability error", 1e-4, both["fused_loss"].get("logprob_error"))
        at_most(
            f"{letter}: gradient error",
            3.5e-3,
            max(
                both["fused_loss float32"].get("hidden_error", 9.0), both["fused_loss float32"].get("weight_error", 9.0)
            ),
        )
        fused_ms = both["fused_loss"].get("median_ms")
        for memory, bar in (("chunk", 1.3), ("all tokens", 0.97)):
            peers = [
                peer["median_ms"]
                for peer in both.values()
                if peer["kind"] == "peer" and peer["memory"] == memory and "median_ms" in peer
            ]
            at_least(
                f"{letter}: best peer with memory of {'one chunk' if memory == 'chunk' else 'all tokens'}, times ours",
                bar,
                min(peers) / fused_ms if peers and fused_ms else None,
            )
    return results


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = [f"output heads on {record['device']}, medians of {record['rounds']} rounds"]
    for letter, work in record["workloads"].items():
        for part, unit in (("forward_backward", "three GEMMs"), ("forward", "one GEMM")):
            lines.append(f"{letter}, {part.replace('_', ' + ')}: {unit} {work[part]['floor_ms']:.2f} ms")
            timed = {n: e for n, e in work[part]["contenders"].items() if "ratio" in e}
            lines += [
                f"  {name}: {entry['ratio']:.3f}x"
                for name, entry in sorted(timed.items(), key=lambda pair: pair[1]["ratio"])
            ]
    lines += [
        f"{name}: {'none' if bar['median'] is None else format(bar['median'], '.4g')}, "
        f"{'at least' if bar.get('least') else 'at most'} {bar['bar']:.4g}: "
        f"{'holds' if bar['holds'] else 'MISSED'}"
        for name, bar in record["bars"].items()
    ]
    return "\n".join(lines)


def write_page(record: dict[str, Any], folder: Path) -> Path:
    """Write the folder's records, this one included, as one page with figures."""
    return write_head_report(folder)
