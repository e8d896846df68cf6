"""docs/benchmarks.md: every measured table, from the saved records in this folder.

``python -m experiments.summary`` writes it; ``tests/docs/test_benchmarks.py`` checks that the file is current.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.attribution import page as attribution_page
from experiments.attribution_gpu import page as attribution_gpu_page
from experiments.chaos import page as chaos_page
from experiments.diagnosis.page import first, scored
from experiments.engine_matrix import page as engine_page
from experiments.first_minutes import TARGETS
from experiments.fused_ab import page as fused_ab
from experiments.growth import page as growth_page
from experiments.head import drawn
from experiments.mismatch_lab import page as lab_page
from experiments.precision import page as precision_page
from experiments.ratio_at_step_zero import page as ratio_at_step_zero
from experiments.sensitivity import page as sensitivity_page
from workbench.atomic import from_json, write_whole
from workbench.compare.comparison import Comparison
from workbench.report.numbers import significant
from workbench.report.online import online_answer

EXPERIMENTS = Path(__file__).parent
PAGE = EXPERIMENTS.parent / "docs/benchmarks.md"

HEAD_ROWS = (
    ("`fused_loss`, token-level", "fused_loss"),
    ("`fused_loss`, GSPO", "fused_loss GSPO"),
    ("the same, documents of two chunks", "fused_loss GSPO long"),
    ("`token_logprobs`, all kept", "token_logprobs, room"),
    ("`token_logprobs`, nothing kept", "token_logprobs"),
)
"""Label -> contender of `head.json`."""

LAYOUTS = (
    "one_rank",
    "dp4",
    "dp4_sharded",
    "dp2_cp2",
    "cp4_zigzag",
    "cp4_ulysses",
    "cp4_ring",
    "cp4_checkpointing",
    "tp4_sequence_parallel",
    "cp2_tp2_sequence_parallel",
)
"""Layouts of the table; the report of `gpu_layouts` has all."""

BRIDGE_WAYS = ("fast path, all-reduce over cp", "fast path, all-gather over cp", "general path, into shards")

HEADER = """\
# Benchmarks

Measured results, from the records in `experiments/`. `python -m experiments.summary` writes this page and
`tests/docs/test_benchmarks.py` checks that it is current. Each section names its record, its page and the command that
measures it again. A *bar* is a bound that a measurement must hold; a missed one is named.
"""


def page() -> str:
    """Return the page as Markdown."""
    sections = (
        head(),
        drawn_heads(),
        step(),
        precision(),
        online_precisions(),
        adapters_in_samplers(),
        layouts(),
        two_gpus(),
        four_gpus(),
        four_gpus_8b(),
        four_gpus_131k(),
        four_gpus_mixture(),
        generated_layouts(),
        rounding(),
        reproducible(),
        bridge(),
        encoder_bridge(),
        verify(),
        online(),
        fused(),
        first_ratio(),
        diagnosis(),
        sensitivity(),
        attribution(),
        attribution_gpu(),
        mismatch_lab(),
        drift(),
        engine_matrix(),
        first_minutes(),
        launch_overhead(),
        metrics_cost(),
        recorder_cost(),
        cpu_step(),
        growth(),
        chaos(),
        saved_reports(),
    )
    return "\n\n".join([HEADER.rstrip(), *sections]) + "\n"


SLOW_BASE = 1.1
"""Time on one GPU, of that in another record, above which the page says so: GPUs of a kind and ways to sample differ by
up to 6 % (heads A and B)."""


def head() -> str:
    """Cost of log-probabilities and their gradients."""
    record, parallel = _record("head/head.json"), _record("head/head_parallel.json")
    work = record["workloads"]
    rows = [
        [label, *(_ratio(w["forward_backward"]["contenders"][name]) for w in work.values())]
        for label, name in HEAD_ROWS
    ]
    for label, memory in (("best of the others, memory of a chunk", "chunk"), ("best of the others, all logits", None)):
        rows.append([label, *(_ratio(_best_peer(w, memory or "all tokens")) for w in work.values())])
    forward = [w["forward"]["contenders"]["token_logprobs, entropy"]["ratio"] for w in work.values()]
    rows.append(["forward with entropy, times one GEMM", *(f"{ratio:.2f}" for ratio in forward)])
    sizes = [f"{name}: {w['tokens'] // 1024}k x {w['dimension']}" for name, w in work.items()]
    missed = [f"{name} ({bar['median']:.5g}, bar {bar['bar']})" for name, bar in _missed(record["bars"])]
    bars = record["bars"]
    longest = record["longest_rows"]["Qwen3-0.6B"]
    most = longest["fused_loss"]["rows"][-1]
    logits = max(
        entry["rows"][-1]["tokens"] for entry in longest.values() if entry["end"] == "out of memory" and entry["rows"]
    )
    speed = {
        name: " and ".join(f"{entry[ranks]['efficiency']:.2f}" for ranks in ("2", "4"))
        for name, entry in parallel["heads"].items()
    }
    slower = {
        name: entry["1"]["median_ms"] / work[name]["forward_backward"]["contenders"]["fused_loss"]["median_ms"]
        for name, entry in parallel["heads"].items()
    }
    slow_base = [
        f" One GPU took {times:.2f} times as long at {name} there as in the table above: its shares are too large."
        for name, times in slower.items()
        if times > SLOW_BASE
    ]
    return _section(
        "Log-probabilities without the logits",
        f"One {record['device']}, {_versions(record)}, bfloat16. Time against three plain GEMMs (memory "
        "beyond theirs, GiB), "
        f"medians of {record['rounds']} interleaved rounds, for tokens x model dimension; vocabularies of "
        f"{_sentence(sorted({_spaced(w['vocabulary']) for w in work.values()}))}.",
        _table(["times three GEMMs (GiB extra)", *sizes], rows),
        f"{sum(bar['holds'] for bar in bars.values())} of {len(bars)} bars hold. Missed: "
        f"{'; '.join(missed)}. The tile of "
        "the forward pass was chosen by forward and backward together.",
        f"A row of {most['tokens'] / 1e6:.1f} million tokens went through a Qwen3-0.6B head in "
        f"{most['peak_gib']:.0f} GiB; "
        f"with all logits the longest that fits, doubling, has {logits // 1024}k tokens.",
        "Over 2 and 4 GPUs a vocabulary-parallel head keeps "
        + "; ".join(f"{both} ({name})" for name, both in speed.items())
        + " of its speed (`python -m workbench bench head_parallel`)."
        + "".join(slow_base),
        _source("head/head.json", "head/report.html", "python -m workbench bench head", "head/head_parallel.json"),
    )


def drawn_heads() -> str:
    """Our head against its GEMMs at the four known sizes and at drawn ones."""
    record = _record("head/drawn.json")
    passes = {
        "fused_loss": "forward_backward",
        "fused_loss, counted": "forward_backward",
        "token_logprobs": "forward",
        "token_logprobs, counted": "forward",
        "token_logprobs, entropy": "forward",
    }
    rows = [
        [
            name,
            f"{work['tokens'] // 1024}k",
            _spaced(work["dimension"]),
            _spaced(work["vocabulary"]),
            *(f"{work[part][contender]:.2f}" for contender, part in passes.items()),
        ]
        for name, work in record["workloads"].items()
    ]
    count = sum(bar["holds"] for bar in record["bars"].values())
    missed = "; ".join(f"{name} {bar['median']:.3f}" for name, bar in record["bars"].items() if not bar["holds"])
    seen = {
        "before": "They were no longer unseen: kernels had been compared by hand at these sizes, too.",
        "after": "Nothing was measured at these before; kernels have been compared there by hand since.",
        None: "Nothing was measured at these before.",
    }[drawn.SEEN.get(record["seed"])]
    return _section(
        "The head at drawn sizes",
        f"One {record['device']}, {_versions(record)}, bfloat16, medians of {record['rounds']} rounds, in another run "
        "than the table above: our passes against cuBLAS's GEMMs, at the four sizes above and at three drawn from the "
        f"seed {record['seed']}. {seen} A sample takes a tenth of a second, after as long a time that is not counted, "
        "so that the GPU is at its power limit, as in training.",
        _table(
            [
                "size",
                "tokens",
                "model",
                "vocabulary",
                "fused loss, three GEMMs",
                "counted",
                "forward, one GEMM",
                "counted",
                "with entropy",
            ],
            rows,
            right=range(1, 9),
        ),
        f"{count} of {len(record['bars'])} bars hold (1.03, and 1.05 for D and drawn sizes; 1.02; 1.05). "
        + (f"Missed: {missed}. " if missed else "")
        + "The caller tells how many tokens are computed (`expected_rows`), as a trainer can; "
        "*counted*: the host counts them in a copy, and the device has nothing to do until that and the first chunk "
        "are queued. The launches of a loss take as long for a small head as for a large one.",
        _source("head/drawn.json", None, f"python -m experiments.head.drawn --seed {record['seed']}"),
    )


def step() -> str:
    """Time, memory and parity of one rank's step under every choice of kernels."""
    record = _record("step/step.json")
    work, entries, peers = record["plan"]["workloads"]["step"], record["choices"], record["peers"]
    slow, fastest = entries["one_rank"]["step_ms"], min(peers, key=lambda name: peers[name]["step_ms"])
    rows = [
        [
            "torch, flash" if name == "one_rank" else name,
            f"{entry['step_ms']:.0f}",
            f"{entry['step_ms'] / slow:.2f}",
            f"{entry['peak_gib']:.1f}",
            f"{100 * record['model_tflop'] / entry['step_ms'] * 1e3 / PEAK_TFLOPS:.0f} %",
            *(f"{sum(entry['by_class_ms'].get(kind, 0) for kind in kinds):.0f}" for kinds in STEP_CLASSES.values()),
            f"{entry['gaps']['total_ms']:.0f}",
            f"{entry['parity']['distance_in_one_ranks']:.2f}" if "parity" in entry else "-",
        ]
        for name, entry in (entries | peers).items()
    ]
    bars = [(name, entries[name]["step_ms"] / slow, bar) for name, bar in STEP_BARS.items()]
    ours = min(entries, key=lambda name: entries[name]["step_ms"])
    chosen = record["provenance"]["argv"][2:]  # choices and peers by name; none: all
    bars.append((f"{ours} against {fastest}", entries[ours]["step_ms"] / peers[fastest]["step_ms"], PEER_BAR))
    return _section(
        "A training step by its kernels",
        f"One {record['device']}, {_versions(record)}, {record['plan']['model']}, {work['rows']} packed rows of "
        f"{work['row_tokens'] // 1024}k tokens, documents of {work['document_tokens'][0]} to "
        f"{work['document_tokens'][1]} tokens, {work['precision']}; medians. Kernels of norms, rotary embeddings and "
        "MLPs (`kernels`: *mixed* is `{norm: compiled, rope: liger, mlp: liger}`), and of attention "
        "(`layout.kernel`). Below them what a user would run instead: a model of transformers in a plain loop with the "
        "same weights, rows and optimizer, and Liger's fused cross-entropy instead of a policy loss. *MFU*: operations "
        f"of the model without recomputation, of {PEAK_TFLOPS} TFLOP/s. *Distance* is that of the whole gradient from "
        f"a {work['truth']['precision']} truth, in that of the first row. Milliseconds of GPU time by class, and "
        "between kernels (*idle*), are those of one profiled step.",
        _table(
            ["kernels", "ms", "of the first", "GiB", "MFU", *STEP_CLASSES, "idle", "distance"],
            rows,
            right=range(1, 7 + len(STEP_CLASSES)),
        ),
        "Shares, and their bars: " + "; ".join(f"{name} {share:.2f} ({bar:.2f})" for name, share, bar in bars) + ". "
        f"Missed: {', '.join(name for name, share, bar in bars if share > bar) or 'none'}.",
        _step_since(),
        _source("step/step.json", None, shlex.join(["python", "-m", "experiments.step.measure", "step.json", *chosen])),
    )


def _step_since() -> str:
    """The same step, measured again without fa4, since no call of a step waits for the GPU."""
    record = _record("step/step_since.json")
    entries = {name: entry for name, entry in (record["choices"] | record["peers"]).items() if "step_ms" in entry}
    slow, fastest = (
        entries["one_rank"]["step_ms"],
        min(record["peers"].keys() & entries, key=lambda n: entries[n]["step_ms"]),
    )
    shares = [
        f"{name} {entries[name]['step_ms'] / slow:.2f} ({bar:.2f})"
        for name, bar in STEP_BARS.items()
        if name in entries
    ]
    ours = entries["mixed, flash"]
    return (
        f"Measured again since no call of a step waits for the GPU, on one {record['device']} without fa4, in one run: "
        f"{'; '.join(shares)}; with flash {ours['step_ms']:.0f} ms and {ours['peak_gib']:.1f} GiB, "
        f"{ours['step_ms'] / entries[fastest]['step_ms']:.2f} of {fastest} "
        f"([record](../experiments/step/step_since.json))."
    )


STEP_CLASSES = {
    "GEMMs": ("gemm",),
    "attention": ("attention",),
    "other": ("element-wise", "copy", "compiled or Triton", "optimizer"),
}
"""Column -> classes of kernels."""
STEP_BARS = {"mixed, flash": 0.62, "mixed, cudnn": 0.52, "mixed, fa4": 0.52}
"""Choice of kernels -> largest share of the first row's time."""
PEER_BAR = 1.05
"""Largest share of the fastest peer's time."""
PEAK_TFLOPS = 989
"""Dense bfloat16, NVIDIA H200 SXM; source: its data sheet."""


def precision() -> str:
    """Errors, lost updates, memory and time of every choice of precision, on a CPU and on a GPU."""
    tables = []
    for name, page_name in precision_page.PAGES.items():
        record = _record(f"precision/{name}.json")
        columns = precision_page.COLUMNS
        tables += [
            f"{record['what']} ({record['device']}, {_versions(record)}), {record['steps']} steps at a rate of "
            f"{record['base']['optimizer']['learning_rate']:g}:",
            _table(["choice", *columns], precision_page.rows(record), right=range(1, 1 + len(columns))),
            _source(f"precision/{name}.json", f"precision/{page_name}.html", record["command"]),
        ]
    return _section(
        "What each choice of precision costs",
        "Relative errors from float64, in units of bf16_mixed: of a gradient from the same weights with the same clip "
        "decisions, and of the change of the weights after some steps; medians over batches. *Unmoved* weights lost "
        "all updates; *unseen* ones look unchanged to a bfloat16 sampler. Bytes of weights, copies, gradients and "
        "moments per parameter; GiB at the peak of a step. Emulated formats are marked (*): their time says nothing.",
        *tables,
    )


def online_precisions() -> str:
    """Reward of every preset in online runs, of the tiny policy and on a GPU."""
    tables = []
    for name, policy in (("online", "The tiny policy"), ("online_gpu", "Qwen3-0.6B with random weights")):
        record = _record(f"precision/{name}.json")
        rows = [
            [
                preset,
                *(f"{reward:.2f}" for reward in (run["reward"][0], run["reward"][-1])),
                significant(run["sampler_kl_nats"][-1], 2),
                f"{100 * run['sampler_moved'][-1]:.0f} %" if "sampler_moved" in run else "-",
            ]
            for preset, run in record["runs"].items()
        ]
        settings = record["settings"]
        tables += [
            f"{policy}, {settings['steps']} steps of {settings['online']['prompts']} prompts with "
            f"{settings['online']['answers']} completions each ({record['device']}, {_versions(record)}):",
            _table(["preset", "reward, first", "last", "KL", "moved"], rows, right=range(1, 5)),
            _source(f"precision/{name}.json", None, record["command"]),
        ]
    return _section(
        "Presets of precision in online runs",
        "Reward of the first and the last step; divergence of the policy from its sampler in the last (nats); weights "
        "of a half-precision sampler that all updates have changed.",
        *tables,
    )


def adapters_in_samplers() -> str:
    """Log-probabilities of a sampler with merged and unmerged adapters."""
    record, rows, kinds = _record("lora_sampler.json"), [], ("merged", "merged_bfloat16", "unmerged")
    for name, result in record["adapters"].items():
        samplers = [result["samplers"][kind] for kind in kinds]
        alone = [f"{each['weights_alone']['mean']:.1e}" for each in samplers]
        kept = f"{100 * samplers[0]['learned_in_weights']:.0f} %"
        own = [f"{each['mean']:.1e}" for each in samplers]
        rows.append([name, f"{result['learned']['mean']:.1e}", kept, *alone, *own])
    return _section(
        "Adapters in a bfloat16 sampler",
        f"Mean distance, in nats, of the log-probabilities of {record['tokens']} tokens from those of the policy in "
        "float64, for the weights of `lora.sampler`; *learned* is the policy's distance from its base, and *in "
        "weights* the part of scale B A that merged bfloat16 weights have. First the rounding of the weights alone, "
        f"then with the sampler's arithmetic in bfloat16 too, which alone costs {record['base']['mean']:.1e}. A tiny "
        "model whose base is on the bfloat16 grid: nothing here transfers to another size.",
        _table(
            ["adapter", "learned", "in weights", *kinds, *(f"{kind}, in the sampler" for kind in kinds)],
            rows,
            right=range(1, 9),
        ),
        _source("lora_sampler.json", None, record["command"]),
    )


def layouts() -> str:
    """Cost and parity of layouts on several GPUs."""
    record = _record("gpu_layouts/layouts.json")
    rows = _layout_rows(record, LAYOUTS)
    entries = [entry for workload in record["workloads"].values() for entry in workload.values()]
    judged = [entry["parity"]["within"] for entry in entries if "parity" in entry]
    out = sum("left_out" in entry for entry in entries)
    return _section(
        "Layouts on GPUs",
        f"{record['gpus']} {record['device']}, NCCL, {_versions(record)}. Qwen3-0.6B with seeded weights, "
        "bfloat16, one GRPO "
        "step of 4 packed rows of 32k tokens; the old policy is a perturbed copy of the model. *Error* is the whole "
        "gradient's distance to a float32 ground truth, in units of one rank's own.",
        _table(LAYOUT_HEADS, rows, right=range(1, 6)),
        f"All {sum(judged)} layouts measured in bfloat16 and (4k rows) float32 are within their budget; "
        f"{out} of float32 "
        "were not reached in the time of one measurement."
        if all(judged)
        else f"{sum(judged)} of {len(judged)} layouts are within their budget; {out} of float32 were not reached.",
        "Striped and balanced orders use flex instead of flash attention, and a ring waits more than it "
        "saves at these sizes.",
        _source("gpu_layouts/layouts.json", "gpu_layouts/report.html", "python -m workbench bench layouts"),
    )


LAYOUT_HEADS = ["layout", "ms", "tokens / s", "efficiency", "GiB", "error"]


def _layout_rows(record: Mapping[str, Any], names: Iterable[str], workload: str = "bfloat16_32k") -> list[list[str]]:
    measured = record["workloads"][workload]
    return [
        [
            f"`{name}`",
            f"{entry['step_ms']:.0f}",
            f"{entry['tokens_per_second'] / 1e3:.0f}k",
            f"{entry['efficiency']:.2f}",
            f"{entry['peak_gib']:.1f}",
            f"{entry['parity']['distance_in_one_ranks']:.2f}",
        ]
        for name, entry in ((name, measured[name]) for name in names)
    ]


def two_gpus() -> str:
    """Layouts of two GPUs with fast kernels."""
    record = _record("gpu_layouts/two_gpus.json")
    dealt = (
        f"*two_rows*: the documents are dealt to two rows of each dp rank (`data.micro_batches: 2`"
        f"{_balance(record['plan'])}); the others fill rows of 32k tokens in order.{_units(record['plan'])}"
    )
    notes = [dealt] if record["plan"].get("micro_batches") else []
    title = "Layouts on two GPUs with fast kernels"
    return _fast_layouts(record, "two_gpus", title, "the step above", *notes, pipeline="pp2")


def _balance(plan: Mapping[str, Any]) -> str:
    """How dealt rows are balanced, if not by their tokens alone; plans before that setting have none."""
    return ", `data.balance: work`" if plan.get("balance") == "work" else ""


def _units(plan: Mapping[str, Any]) -> str:
    """What layouts with FSDP2 units of several layers are; a plan without one has no sentence."""
    layers = next((of for each in plan["layouts"].values() if (of := each.get("unit_layers", 1)) > 1), None)
    if layers is None:
        return ""
    return f" *units*: {layers} layers are one unit of FSDP2 (`unit_layers`), whole until backward."


def four_gpus() -> str:
    """Layouts of four GPUs with fast kernels."""
    record = _record("gpu_layouts/four_gpus.json")
    plan = record["plan"]
    stages = "+".join(map(str, plan["layouts"]["pp4_by_cost"]["stage_layers"]))
    return _fast_layouts(
        record,
        "four_gpus",
        "Layouts on four GPUs with fast kernels",
        "the same step",
        f"*one_row*: the documents are dealt to one row of each dp rank (`data.micro_batches: 1`{_balance(plan)}), so "
        f"that a rank has as many tokens at a time as one rank has; the others fill rows of 32k tokens in order, of "
        f"which each cp or tp rank has a quarter. *by_cost*: stages of {stages} layers, the last with the head."
        f"{_units(plan)}",
        pipeline="pp4_by_cost",
    )


def four_gpus_8b() -> str:
    """Layouts of four GPUs at the shapes of a larger model, on packed rows."""
    record = _record("gpu_layouts/four_gpus_8b.json")
    return _fast_layouts(
        record,
        "four_gpus_8b",
        "Shapes of 8 billion parameters on four GPUs",
        f"Qwen3-8B with {record['plan']['decoder_layers']} of its 36 layers, 4 x 32k tokens, every layer recomputed in "
        "backward,",
        "With ulysses a rank has a quarter of the row as it is, with gathered keys and a ring documents are whole; "
        "*zigzag*: each document is in zigzag, where the ranks with the most trained tokens have 1.33 times the mean. "
        "*sharded*: parameters are sharded over the cp ranks too, whose gradients are then summed during backward.",
        "Measured before an untied head was a unit of FSDP2 of its own: it was gathered with the embedding, before the "
        "first layer, and its gradient summed after the last.",
    )


def four_gpus_131k() -> str:
    """Context-parallel layouts of four GPUs on one long document."""
    record = _record("gpu_layouts/four_gpus_131k.json")
    plan = record["plan"]
    return _fast_layouts(
        record,
        "four_gpus_131k",
        "One document of 131k tokens on four GPUs",
        f"Qwen3-8B with {plan['decoder_layers']} of its 36 layers, one document of 131,056 tokens, every layer "
        "recomputed in backward,",
        f"Tokens are striped (ulysses), or blocks of {plan['layouts']['cp4_ring']['block_tokens']} dealt to and fro "
        "(gathered, ring); *zigzag*: a chunk of the first half and one of the second.",
        "Measured while context-parallel layouts, too, started the sums of gradients in backward, on a second group "
        "of ranks; that gained nothing and was removed. Heads have been packed by fewer and faster copies since.",
    )


def four_gpus_mixture() -> str:
    """Layouts of a mixture of experts on four GPUs."""
    record = _record("gpu_layouts/four_gpus_mixture.json")
    plan, workload = record["plan"], record["plan"]["workloads"]["bfloat16_16k"]
    return _fast_layouts(
        record,
        "four_gpus_mixture",
        "Experts on four GPUs",
        f"Qwen3-30B-A3B with {plan['decoder_layers']} of its 48 layers (128 experts, 8 a token), "
        f"{workload['rows']} rows of {workload['row_tokens'] // 1024}k tokens",
    )


def _fast_layouts(record: Mapping[str, Any], name: str, title: str, step: str, *notes: str, pipeline: str = "") -> str:
    plan = record["plan"]
    [workload] = plan["workloads"]
    kernels = ", ".join(f"`{part}: {kernel}`" for part, kernel in plan["kernels"].items())
    paragraphs = list(notes)
    if pipeline:
        measured, rows = record["workloads"][workload], plan["workloads"][workload]["rows"]
        stages = plan["layouts"][pipeline]["pp"]
        ideal_ms = measured["one_rank"]["step_ms"] * (rows + stages - 1) / (stages * rows)
        paragraphs.append(
            f"{stages} equal stages of {rows} micro-batches wait {stages - 1} of {rows + stages - 1} parts of a step, "
            f"so 1F1B would take {ideal_ms:.0f} ms; `{pipeline}` takes "
            f"{measured[pipeline]['step_ms'] / ideal_ms:.2f} of that."
        )
    return _section(
        title,
        f"{record['gpus']} {record['device']}, NCCL, {_versions(record)}: {step} with flash attention and the kernels "
        f"{kernels} in every layout, one rank included.",
        _table(LAYOUT_HEADS, _layout_rows(record, plan["layouts"], workload), right=range(1, 6)),
        *paragraphs,
        _source(f"gpu_layouts/{name}.json", None, f"python -m experiments.gpu_layouts.plans {name}"),
    )


def generated_layouts() -> str:
    """Drawn combinations of layout, packing and head against the oracle."""
    record = _record("generated_layouts.json")
    ranks = sorted(map(int, record["ranks"]))
    rows = [[name, significant(value, 2)] for name, value in record["worst"].items()]
    together = [[name, count] for name, count in record["axes_met_together"].items()]
    return _section(
        "Drawn combinations of layouts",
        f"{record['met']} of {record['combinations']} combinations of five axes, model, packing and head, drawn from a "
        f"seed, meet {record['bar']:g} of the oracle's values in float64 on {ranks[0]} to {ranks[-1]} gloo ranks; the "
        f"other {record['refused']} are invalid and rejected. {record['mixtures_met']} are of a mixture, and "
        f"{record['met_with_an_idle_rank']} have a rank without trained tokens. torch {record['torch']}, "
        f"{record['cpu_minutes']:g} minutes of a core.",
        _table(["worst distance of", "relative"], rows, right=[1]),
        _table(["axes with several ranks each", "combinations met"], together, right=[1]),
        _source("generated_layouts.json", None, record["command"]),
    )


def rounding() -> str:
    """Rounding of float32 gradients in correct layouts."""
    record = _record("float32_rounding.json")
    rows = [
        [label, entry["comparisons"], f"{entry['median']:.2f}", f"{entry['largest']:.2f}", budget]
        for label, entry, budget in (
            ("whole gradient", record["whole_gradient"], "2.5"),
            ("each parameter", record["parameter"], "3.5"),
        )
    ]
    return _section(
        "Float32 rounding of correct layouts",
        f"Distance to the float64 ground truth in units of one rank's own, over {record['seeds']} sets of weights, "
        f"{record['steps']} steps and {len(record['layouts'])} layouts. The budgets are the smallest "
        "multiples of 0.5 that "
        "correct layouts meet in 99 of 100 reports, by this spread.",
        _table(["distance of", "comparisons", "median", "largest", "budget"], rows, right=range(1, 5)),
        _source("float32_rounding.json", None, record["command"]),
    )


def reproducible() -> str:
    """Cost of the reproducible mode, and its bits."""
    record = _record("reproducible/reproducible.json")
    entries = [
        (workload, layout, entry)
        for machine in record["machines"]
        for workload, results in machine["workloads"].items()
        for layout, entry in results.items()
    ]
    rows = []
    for workload, layout, entry in entries:
        if "timed" in entry:
            fast, exact = (entry["timed"][mode] for mode in ("fast", "reproducible"))
            time, memory = (exact[key] / fast[key] for key in ("step_ms", "peak_gib"))
            times = [f"{fast['step_ms']:.0f}", f"{exact['step_ms']:.0f}", f"{time:.2f}", f"{memory:.2f}"]
            rows.append([workload, layout, *times])
    same = [entry["same"]["reproducible"] for *_, entry in entries if "same" in entry]
    equal = sum(result["equal"] == result["tensors"] for result in same)
    missed = [f"{name} {bar['median']:.2f} (bar {bar['bar']})" for name, bar in _missed(record["bars"])]
    machine = record["machines"][0]
    return _section(
        "The same bits in every layout",
        f"{machine['gpus']} {machine['device']}, NCCL, {_versions(machine)}. {equal} of {len(same)} runs of "
        "five AdamW steps "
        "on 1, 2 and 4 ranks have one rank's bits in every tensor.",
        "Cost of the mode, against the ordinary one in the same layout (bfloat16, layers of Qwen3's shapes, "
        "4 rows of 16k "
        "tokens):",
        _table(["layers of", "layout", "ms", "reproducible", "time", "memory"], rows, right=range(2, 6)),
        "The bars are 1.8 (hidden 1024) and 1.35 (4096) in time and 1.1 in memory. Missed: "
        f"{'; '.join(missed)}. In this record "
        "every cp rank has the integers of all weights, 8 bytes per parameter: more than the activations of a quarter "
        "of a row. Since then it keeps a part of them "
        "([memory](../workbench/reproducible/README.md#memory)).",
        _source("reproducible/reproducible.json", "reproducible/report.html", "python -m workbench bench reproducible"),
        *_ranks_alone("reproducible/reproducible"),
    )


def _ranks_alone(plan_name: str) -> list[str]:
    """Time and memory of ranks that ran alone on one GPU, if they were measured."""
    if not (EXPERIMENTS / f"{plan_name}.alone.json").exists():
        return []
    record, rows = _record(f"{plan_name}.alone.json"), []
    for entry, result in record["entries"].items():
        measured = {rank: one for rank, one in result["alone"].items() if "left_out" not in one}
        for variant, slowest in result["slowest"].items():
            peak = max(one[variant]["peak_gib"] for one in measured.values())
            bound = slowest.get("efficiency_bound")
            cells = [", ".join(measured), variant, f"{slowest['step_ms']:.0f}", f"{peak:.2f}"]
            cells.append("" if bound is None else f"{bound:.3f}")
            compared = "memory" in result and variant == "reproducible"
            cells += [f"{result[key]:.2f}" for key in ("time", "memory")] if compared else ["", ""]
            rows.append([entry, *cells])
    header = ["entry", "ranks", "mode", "ms", "GiB", "efficiency at most", "time", "memory"]
    return [
        f"Ranks alone on one {record['device']}, {_versions(record)}. {record['values']} Milliseconds and GiB are "
        "those of the slowest and the largest rank measured.",
        _table(header, rows, right=range(3, 8)),
        _source(
            f"{plan_name}.alone.json",
            None,
            shlex.join(["python", "-m", "experiments.alone", *record["provenance"]["argv"][1:]]),
        ),
    ]


def bridge() -> str:
    """Bytes and time of a bridge between two layouts."""
    record = _record("encoder_bridge/h200/bridge.json")
    rows = [
        [
            name,
            way,
            f"{entry['forward_ms']:.2f}",
            f"{entry['forward_bytes'] / 2**20:.0f}",
            f"{entry['backward_ms']:.2f}",
            f"{entry['backward_bytes'] / 2**20:.0f}",
        ]
        for name, bridge in record["bridges"].items()
        for way, entry in ((way, bridge["ways"][way]) for way in BRIDGE_WAYS)
    ]
    return _section(
        "A bridge between two layouts",
        f"{record['ranks']} {record['device']}, NCCL, {_versions(record)}; {record['activation']}. Every way "
        "transfers the "
        "same bits in both directions.",
        _table(["", "way", "forward ms", "MiB", "backward ms", "MiB"], rows, right=range(2, 6)),
        _source(
            "encoder_bridge/h200/bridge.json", "encoder_bridge/h200/bridge.html", "python -m workbench bench bridge"
        ),
    )


def encoder_bridge() -> str:
    """Known bugs of bridges, and the checks that reveal them."""
    record = _record("encoder_bridge/encoder_bridge.json")
    rows = [
        [f"`{name}`", *(f"{entry[key]:.3g}" for key in ("loss", "encoder", "policy"))]
        for name, entry in record["faults"].items()
    ]
    adam = record["adam"]
    return _section(
        "Bugs of bridges",
        f"An encoder and a policy in {len(record['layouts'])} pairs of layouts ({record['device']}, float64), and "
        f"{len(record['faults'])} known bugs: the factor of the loss and of the gradient norms of encoder "
        "and policy. "
        f"Gradients reveal all; weights after one step of Adam at {adam['learning_rate']:g} with a tolerance of "
        f"{adam['tolerance']:g} pass all, because two such steps are at most {2 * adam['learning_rate']:g} apart.",
        _table(["fault", "loss", "encoder", "policy"], rows, right=range(1, 4)),
        _source(
            "encoder_bridge/encoder_bridge.json",
            "encoder_bridge/report.html",
            "python -m workbench bench encoder_bridge",
        ),
    )


def verify() -> str:
    """Training on several GPUs against one GPU."""
    record = _record("benchmarks/verify.json")
    runs = {name: run for name, run in record["runs"].items() if name.startswith(("torch", "ours"))}
    attention = {"torch": "torch's context parallelism", "ours": "the workbench's attention"}
    rows = []
    for name, run in runs.items():
        kind, engine = name.split("_")
        growth = max(entry["growth"] for entry in run["bytes"].values())
        rows.append([attention[kind], engine, f"{run['over_one_rank']:.2f}", growth, f"{run['step_ms']:.0f}"])
    most = max(run["over_one_rank"] for run in runs.values())
    return _section(
        "Training on two GPUs as on one",
        f"{record['ranks']} {record['device']}, {_versions(record)}: {record['task']['steps']} steps of "
        f"{record['task']['model']} in float32. Distance of the weights to the float64 run, in units of one "
        "GPU's own; at "
        f"most {most:.2f} times as far. Growth: bytes allocated or reserved after step 5.",
        _table(["attention", "engine's reduction", "distance", "growth", "ms per step"], rows, right=range(2, 5)),
        _source("benchmarks/verify.json", None, "workbench verify --gpus 2"),
    )


def online() -> str:
    """Small online runs."""
    small = Comparison.load(EXPERIMENTS / "online/comparison.json")
    layouts = Comparison.load(EXPERIMENTS / "online_layouts/comparison.json")
    rows = [[f"`{c.name}`", c.verdict] for c in layouts.configurations]
    return _section(
        "Online RL",
        f"A tiny policy, two seeds, two CPU cores. {online_answer(small)}",
        _source(
            "online/comparison.json",
            "online/report.html",
            "python -m workbench run experiments/online/ablation.yaml",
        ),
        "The same online run in eleven layouts on two H200s (NCCL, float64; every gradient of four steps "
        "within 1e-12 of "
        "one rank's is *equal*):",
        _table(["configuration", "verdict"], rows),
        _source(
            "online_layouts/comparison.json",
            "online_layouts/report.html",
            "python -m workbench run experiments/online_layouts/ablation.yaml --where processes",
        ),
    )


def fused() -> str:
    """Online training with the fused head and with the plain one."""
    records = fused_ab.Records.load(EXPERIMENTS / "fused_ab")
    curves, step = fused_ab.training_table(records), fused_ab.step_table(records.step_one)
    rows = []
    for key, title in fused_ab.METRICS.items():
        cells = [significant(curves.loc[key, name]) for name in ("first", "last", "fused_last")]
        cells += [significant(curves.loc[key, name], 2) for name in ("fused_plain", "rounding", "seeds")]
        rows.append([title, *cells])
    names = ("loss_off", "norm_off", "loss_budget", "norm_budget")
    text = "in {0} loss and gradient norm are {1} and {2} away (allowed {3} and {4})"
    first_step = [
        text.format(precision, *(significant(step.loc[f"fused-{precision}"][name], 2) for name in names))
        for precision in ("float64", "float32")
    ]
    times = curves["fused_plain"] / curves["rounding"]
    policy = records.policy
    return _section(
        "Training with the fused head",
        f"One H200: a Qwen3 of {policy['parameters_beside_embedding'] / 1e6:.1f} million parameters beside "
        "its embedding, "
        f"warmed up until {policy['success_rate']:.0%} of its answers are right, trains online (temperature "
        "1.5) with the "
        "plain head and with the fused one, two seeds of 50 steps each.",
        f"The first step, on the same completions, has budgets: {'; '.join(first_step)}. Later steps have "
        "none: after one "
        "different token, two runs of one seed diverge. The table has root mean square distances between "
        "curves, next to "
        "those of two plain heads that differ only in the order of their sums:",
        _table(
            ["by step", "first 10", "last 10, plain", "last 10, fused", "fused − plain", "rounding alone", "two seeds"],
            rows,
        ),
        f"Fused and plain lie {significant(times.min(), 2)} to {significant(times.max(), 2)} times as far "
        "apart as rounding "
        "alone puts two plain heads.",
        _source(
            "fused_ab/fifty_steps/comparison.json",
            "fused_ab/report.html",
            "python experiments/fused_ab/warm_up.py`, then `python experiments/fused_ab/report.py",
            "fused_ab/step_one/comparison.json",
        ),
    )


def first_ratio() -> str:
    """The policy ratio before any step, by sampler and trainer."""
    table = ratio_at_step_zero.ratios(ratio_at_step_zero.Records.load(EXPERIMENTS / "ratio_at_step_zero"))
    rows = [
        [
            row["sampler"],
            row["trainer"],
            row["head"],
            f"{row['temperature']:g}",
            significant(row["mean_distance"], 2),
            significant(row["most"], 2),
            f"{significant(100 * row['outside'], 2)} %",
        ]
        for _, row in table.iterrows()
    ]
    return _section(
        "The ratio before any step",
        "The policy of the section above, before any step: trainer and sampler have the same weights, and "
        "the ratio should "
        "be 1. Sampled at temperature 0.7:",
        _table(
            [
                "sampler",
                "trainer",
                "its head",
                "its temperature",
                "log ratio from 0, mean, nats",
                "largest",
                "outside the clip",
            ],
            rows,
        ),
        "A trainer that ignores the temperature clips tokens before its first update. A float32 head in the "
        "trainer alone "
        "moves it *away* from a bfloat16 sampler, whose rounding it no longer shares; against a float32 "
        "sampler it helps. "
        "The same arithmetic on both sides, trunk and head, helps most.",
        _source(
            "ratio_at_step_zero/bfloat16/log_ratios.json",
            "ratio_at_step_zero/report.html",
            "python experiments/ratio_at_step_zero/report.py",
        ),
    )


def diagnosis() -> str:
    """Causes that `diagnose` names, of planted faults."""
    results, unseen = _record("diagnosis/results.json"), _record("diagnosis/unseen.json")
    blind = len({row["fault"] for row in unseen["shown"]})
    rows = []
    for label, table in (("all, known since", results), (f"{blind} when they were unseen", unseen)):
        for precision in ("float64", "float32", "bfloat16"):
            judged = scored([row for row in table["shown"] if row["precision"] == precision])
            rows.append([label, precision, len(judged), first(judged), first(judged, 3)])
    pairs = results["pairs"]
    accused = sum(not row["equal"] for row in pairs)
    return _section(
        "Causes that diagnose names",
        "Faults in one step of a tiny decoder on simulated ranks. The true cause is named first, or among "
        "the first three:",
        _table(["faults", "precision", "scored", "first", "in the first three"], rows, right=range(2, 5)),
        f"{accused} of {len(pairs)} pairs of right runs (float32 and bfloat16) are accused.",
        _source(
            "diagnosis/results.json",
            "diagnosis/report.md",
            "python experiments/diagnosis/score.py",
            "diagnosis/unseen.json",
        ),
    )


def sensitivity() -> str:
    """Kill rates of the comparison and of other projects' gates on the same planted faults."""
    record = _record("sensitivity/sensitivity.json")
    rows = [[row[0], *row[3:]] for row in sensitivity_page.gate_rows(record)]
    return _section(
        "What a comparison sees",
        sensitivity_page.answer(record),
        f"Both precisions took {record['bars']['cpu_seconds']['measured']:.0f} s of CPU time. Each gate is applied to "
        "the same faulty runs, against the run of the same configuration without the fault; its tolerances are those "
        "of the file and commit that the page names.",
        _table(("check", *sensitivity_page.HEADS[3:]), rows, right=range(1, 5)),
        _source("sensitivity/sensitivity.json", "sensitivity/report.html", "python -m workbench bench sensitivity"),
    )


def attribution() -> str:
    """Causes of a gap between trainer and sampler that are named, and the floor by two methods."""
    record = _record("attribution/attribution.json")
    return _section(
        "Causes between trainer and sampler, and the floor",
        attribution_page.answer(record),
        "The floor: mean distance of a token from the float64 truth with the same weights, seeded ones. It does not "
        "transfer to a trained model.",
        _table(attribution_page.FLOOR_HEAD, attribution_page.floor_rows(record), right=range(3, 6)),
        _source("attribution/attribution.json", "attribution/report.html", "python -m workbench bench attribution"),
    )


def attribution_gpu() -> str:
    """Causes of the gap of a sampler on a GPU, in bfloat16 and FP8, and the floor there."""
    record = _record("attribution_gpu/attribution_gpu.json")
    rows = [
        [row["case"], ", ".join(row["descriptions"]) or "nothing", *(significant(row[key], 3) for key in KEYS_OF_GAPS)]
        for row in record["cases"]
    ]
    return _section(
        "Trainer and sampler on a GPU",
        attribution_gpu_page.answer(record),
        _table(("case", "named", "gap, nats", "rest, nats", "floor, nats"), rows, right=range(2, 5)),
        "The floor by two methods, as above; float32 GEMMs with few rows are split over the inner dimension there, so "
        "that their error is smaller than the drawn one.",
        _table(attribution_gpu_page.FLOOR_HEAD, attribution_gpu_page.floor_rows(record), right=range(1, 5)),
        _source(
            "attribution_gpu/attribution_gpu.json",
            "attribution_gpu/report.html",
            "python -m workbench bench attribution_gpu",
        ),
    )


KEYS_OF_GAPS = ("gap", "rest", "floor")


def mismatch_lab() -> str:
    """Corrections on one recorded gap, and in online runs over seeds."""
    record = _record("mismatch_lab/mismatch_lab.json")
    return _section(
        "Corrections of the gap between trainer and sampler",
        lab_page.answer(record),
        lab_page.GAP_CAPTION,
        _table(lab_page.GAP_HEAD, lab_page.gap_rows(record), right=range(1, 8)),
        lab_page.ONLINE_CAPTION,
        _table(lab_page.ONLINE_HEAD, lab_page.online_rows(record), right=(2, 3, 5, 6, 8, 9)),
        _source("mismatch_lab/mismatch_lab.json", "mismatch_lab/report.html", "python -m workbench bench mismatch_lab"),
    )


def drift() -> str:
    """Installed releases of other systems against their adapters."""
    record = _record("drift/drift.json")
    rows = [
        [
            name,
            row["release"],
            f"{row['agree']} of {row['cases'] - row['known']}",
            f"{row['distance']:.0e}",
            f"{row['own_precision']:.0e}",
            row["nan_losses"],
        ]
        for name, row in record["systems"].items()
    ]
    known = [
        f"{name}: {row['known']}, {row['known_reason']}" for name, row in record["systems"].items() if row["known"]
    ]
    return _section(
        "Drift of other systems",
        f"The newest releases, installed, and {record['cases']} drawn calls of the policy losses of each: options, "
        "masks, near and far policies, micro-batches without a token; replayed from the adapter's translation.",
        f"*Agree*: loss, gradient and metrics within {record['bar']:g}, NaN for NaN, of the release with its float32 "
        "constants and casts lifted to float64; *distance*: the largest relative one of these. *Own precision*: the "
        "largest relative distance of the release as it is from itself lifted, on float64 inputs.",
        _table(
            ("system", "release", "agree", "distance", "own precision", "losses that are NaN"), rows, right=range(2, 6)
        ),
        *([f"Not counted, as they are known to differ: {'; '.join(known)}."] if known else []),
        _source("drift/drift.json", None, "make drift"),
    )


def engine_matrix() -> str:
    """Verdicts of invariants for engines of other projects and of torch."""
    record = _record("engine_matrix/matrix.json")
    return _section(
        "Engines under proof",
        engine_page.answer(record),
        _table(engine_page.HEADS, engine_page.rows(record)),
        _source("engine_matrix/matrix.json", "engine_matrix/report.html", "make engine-matrix"),
    )


def first_minutes() -> str:
    """Durations of the first commands."""
    record = _record("first_minutes.json")
    rows = [
        [name, *(m[key] for key in ("cores", "python", "load_before", "date")), m["commit"][:7], f"{m['seconds']:.0f}"]
        for name, m in sorted(record["commands"].items(), key=lambda entry: list(TARGETS).index(entry[0]))
    ]
    return _section(
        "The first commands",
        "In a clean clone, without a GPU. `report` is that of `layout_parity`: 35 configurations of 4 steps.",
        _table(["command", "cores", "Python", "load before", "date", "commit", "seconds"], rows, right=[6]),
        _source("first_minutes.json", None, record["command"]),
    )


def launch_overhead() -> str:
    """Cost of starting ranks."""
    record = _record("benchmarks/launch_overhead.json")
    job, ready = record["torchx_job"], record["ranks_ready"]
    rows = [
        ["a torchx job of two ranks, over bare `torch.distributed.run`", f"{job['overhead_median_s']:.2f}"],
        ["two ranks of the pool, ready", f"{ready['script']['2']['later_median_s']:.2f}"],
        ["four ranks of the pool, ready", f"{ready['script']['4']['later_median_s']:.2f}"],
        ["the first ranks of the pool, ready", f"{ready['script']['first_s']:.1f}"],
    ]
    return _section(
        "Starting ranks",
        f"{record['provenance']['cpu_count']} CPU cores, {_versions(record)}; medians. Measured before "
        "the ranks of torchx jobs were forked.",
        _table(["start of", "seconds"], rows, right=[1]),
        _source("benchmarks/launch_overhead.json", None, "python -m workbench bench launch_overhead"),
    )


def metrics_cost() -> str:
    """Share of a step that metrics take."""
    record = _record("benchmarks/metrics_cost.json")
    alone = record["alone"]
    return _section(
        "Metrics",
        f"One {record['device']}, {_versions(record)}: {record['model']}, a step of "
        f"{_spaced(record['tokens'])} tokens.",
        f"The {alone['metrics']} basic metrics take {alone['total_ms']:.1f} ms, {alone['share']:.1%} of the "
        "step (bar "
        f"{record['bars']['basic_share']['bar']:.0%}).",
        _source("benchmarks/metrics_cost.json", None, "python -m workbench bench metrics_cost"),
    )


def recorder_cost() -> str:
    """Share of a step that a recorder takes in a plain training loop."""
    record = _record("benchmarks/recorder_cost.json")
    medians = record["median_ms"]
    return _section(
        "Recorder",
        f"One {record['device']}, {_versions(record)}: {record['model']}, a plain loop with float32 weights under "
        f"autocast in bfloat16, a step of {_spaced(record['tokens'])} tokens.",
        f"A recorder's own work at a step takes {record['alone_ms']:.1f} ms on an idle device, "
        f"{record['alone_share']:.1%} of the step (bar {record['bars']['recorder_share']['bar']:.0%}). Steps of the "
        f"loop: {medians['without']:.0f} ms without a recorder, {medians['recorder']:.0f} ms with one, "
        f"{medians['recorder and tokens']:.0f} ms with per-token notes; they scatter by a tenth.",
        _source("benchmarks/recorder_cost.json", None, "python -m workbench bench recorder_cost"),
    )


def cpu_step() -> str:
    """A step of the default ablation on a CPU, next to a bare loop over the same documents."""
    record = _record("benchmarks/cpu_step.json")
    [bar] = record["bars"].values()
    return _section(
        "A step on a CPU",
        f"{_versions(record)}, float32: {record['documents']} documents ({_spaced(record['tokens'])} tokens) of the "
        f"default ablation, one rank. A step with its metrics and gradients written takes "
        f"{record['median_ms']['ours']:.0f} ms; a bare loop (the stock model, one padded batch of "
        f"{_spaced(record['padded_tokens'])} tokens, clipped ratios, AdamW, nothing recorded) "
        f"{record['median_ms']['bare']:.0f} ms: {bar['median']:.2f} (bar {bar['bar']}).",
        _source("benchmarks/cpu_step.json", None, "python -m workbench bench cpu_step"),
    )


def growth() -> str:
    """Growth of the cost of verbs with what they read."""
    record = _record("growth/growth.json")
    return _section(
        "Growth",
        f"{record['provenance']['cpu_count']} shared CPU cores; processor time of a command with its start-up, the "
        "least of several. The exponent is that of the part above the smallest size, between the two largest; none: "
        "the largest adds less than a tenth to the start-up.",
        _table(growth_page.HEAD, growth_page.rows(record), right=[3]),
        growth_page.constant(),
        growth_page.estimators(record),
        growth_page.long_comparison(record),
        _source("growth/growth.json", None, "python -m experiments.growth.measure"),
    )


def chaos() -> str:
    """Trials of the campaigns of chaos."""
    record = _record("chaos/record.json")
    return _section(
        "Chaos",
        chaos_page.answer(record),
        _table(chaos_page.HEAD, chaos_page.rows(record), right=[1]),
        _source("chaos/record.json", None, "make chaos SEED=1 MINUTES=30"),
    )


def saved_reports() -> str:
    """Saved comparisons and the pages that belong to them."""
    rows = []
    for folder in ("layout_parity", "layout_parity_h200", "online_layouts"):
        comparison = Comparison.load(EXPERIMENTS / folder / "comparison.json")
        counts: dict[str, int] = {}
        for c in comparison.configurations:
            counts[c.verdict] = counts.get(c.verdict, 0) + 1
        rows.append(
            [
                f"[{folder}](../experiments/{folder}/report.html)",
                len(comparison.configurations),
                ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())),
                f"`python -m workbench run experiments/{folder}/ablation.yaml`",
            ]
        )
    return _section(
        "Saved reports of layouts",
        "Verdicts of the saved ablations; every *different* configuration has a planted fault or, in "
        "`online_layouts`, "
        "another seed.",
        _table(["report", "runs", "verdicts", "command"], rows, right=[1]),
        "`layout_parity` ran on two CPU cores, `layout_parity_h200` on four H200s through NCCL (torch 2.11, "
        "transformers "
        "5.17). The effect of denominators on loss, gradient norm and training is in "
        "[normalisation](../experiments/normalisation/report.html) (`python experiments/normalisation/report.py`).",
    )


def _record(name: str) -> dict[str, Any]:
    return from_json((EXPERIMENTS / name).read_text())


def _section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *parts])


def _table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    aligned = set(right)
    lines = [list(header), ["---:" if i in aligned else "---" for i in range(len(header))], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |".replace("|  |", "| |") for line in lines)


def _source(record: str, report: str | None, command: str, *more: str) -> str:
    links = ", ".join(f"[{Path(name).name}](../experiments/{name})" for name in (record, *more))
    page = f" Page: [{Path(report).name}](../experiments/{report})." if report else ""
    return f"Record: {links}.{page} Command: `{command}`."


def _versions(record: Mapping[str, Any]) -> str:
    return f"torch {record['provenance']['versions']['torch'].partition('+')[0]}"


def _missed(bars: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, bar) for name, bar in bars.items() if not bar["holds"]]


def _best_peer(work: Mapping[str, Any], memory: str) -> Mapping[str, Any]:
    contenders = work["forward_backward"]["contenders"].values()
    peers = [
        entry for entry in contenders if entry["kind"] == "peer" and entry["memory"] == memory and "ratio" in entry
    ]
    return min(peers, key=lambda entry: entry["ratio"])


def _ratio(entry: Mapping[str, Any]) -> str:
    return f"{entry['ratio']:.2f} ({entry['extra_gib']:.1f})"


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _sentence(words: Sequence[str]) -> str:
    return " and ".join(words)


if __name__ == "__main__":
    write_whole(PAGE, page().encode())
