"""A synthetic comparison: 15 configurations like those of layout_parity, with one of every verdict.

Its numbers are plausible and fixed; nothing here ran. Six layouts at two precisions, three faults (factors
2.03 and 0.5, and a gradient that points elsewhere); one run failed on rank 1.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

from workbench.compare.comparison import Comparison, Configuration, ParameterDifference
from workbench.specs.run import RunSpec

LAYOUTS = {
    "one_rank": {},
    "cp2_contiguous": {"cp": 2, "order": "contiguous"},
    "cp2_zigzag": {"cp": 2, "order": "zigzag"},
    "tp2": {"tp": 2},
    "dp2_cp2": {"dp": 2, "cp": 2, "order": "zigzag"},
    "cp2_tp2": {"cp": 2, "tp": 2, "order": "zigzag"},
}
FAULTS = {
    "fault_local_denominator": (2.03, "close to cp"),
    "fault_missing_cp_factor": (0.5, "1 / cp"),
    "fault_shift_after_shard": (1.004, ""),
}
FAILED = "cp2_tp2-float32"
STEPS = 4
PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PARAMETERS = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{part}.weight" for layer in range(3) for part in PARTS),
    "model.norm.weight",
    "lm_head.weight",
]
FLOORED = "model.layers.0.self_attn.k_norm.weight"
TRACEBACK = """Traceback (most recent call last):
  File "workbench/train/worker.py", line 88, in main
    train(run)
ShardingError: 3 heads do not divide by tp=2
"""
EDGES = [0.5 + 0.04 * i for i in range(31)]


def layout_parity() -> Comparison:
    """The whole comparison."""
    made = [
        _configuration(f"{layout}-{precision}", {"layout": settings, "precision": precision})
        for layout, settings in LAYOUTS.items()
        for precision in ("float64", "float32")
    ]
    made += [
        _configuration(
            name, {"layout": LAYOUTS["cp2_zigzag"], "precision": "float64", "faults": [name.removeprefix("fault_")]}
        )
        for name in FAULTS
    ]
    return Comparison(
        experiment="layout_parity",
        question="Does GRPO give every parameter the same gradient in every layout?",
        configurations=made,
        provenance={
            "git": {"sha": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
            "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0", "workbench": "0.1.0"},
            "argv": ["workbench", "run", "experiments/layout_parity/ablation.yaml"],
            "seed": 0,
            "devices": [],
            "cpu_count": 2,
        },
    )


def several(count: int, *, prefix: str = "", parameters: int = 0) -> Comparison:
    """So many configurations: those of the whole comparison, then again with other learning rates; few parameters."""
    whole, made = layout_parity(), []
    for place in range(count):
        turn, which = divmod(place, len(whole.configurations))
        c = whole.configurations[which]
        after = f"-v{turn}" if turn else ""
        kept = PARAMETERS[:parameters]
        made.append(
            replace(
                c,
                name=f"{prefix}{c.name}{after}",
                against=c.against and f"{prefix}{c.against}",
                settings=c.settings | {"learning_rate": 1e-5 * (1 + turn)},
                parameters=[p for p in c.parameters if p.parameter in kept],
            )
        )
    return replace(whole, configurations=made)


def seeds(count: int) -> Comparison:
    """Three configurations, each with so many seeds."""
    whole = layout_parity()
    members = [whole[name] for name in ("one_rank-float64", "cp2_zigzag-float64", "tp2-float64")]
    made = [
        replace(
            c,
            name=f"{c.name}-seed{seed}",
            against=c.against and f"{c.against}-seed{seed}",
            settings=c.settings | {"seed": seed},
            parameters=[],
        )
        for c in members
        for seed in range(count)
    ]
    return replace(whole, configurations=made)


def renamed(comparison: Comparison, old: str, new: str) -> Comparison:
    """The comparison with another name for one configuration."""

    def one(c: Configuration) -> Configuration:
        return replace(c, name=new if c.name == old else c.name, against=new if c.against == old else c.against)

    return replace(comparison, configurations=[one(c) for c in comparison.configurations])


def bare(c: Configuration, *kept: str) -> Configuration:
    """A configuration without the numbers of its figures, but for these fields: drawing is most of a page's time."""
    numbers: dict = {"steps": [], "ratios": {}, "parameters": [], "whole_gradient": []}
    return replace(c, **{name: nothing for name, nothing in numbers.items() if name not in kept})


def _configuration(name: str, settings: dict) -> Configuration:
    spec = RunSpec(
        steps=STEPS, **settings, loss={"surrogate": {"clip_low": 0.2, "clip_high": 0.28}, "kl": {"coefficient": 0.05}}
    )
    draw = random.Random(name)
    fault = name if name in FAULTS else ""
    reference = name.startswith("one_rank")
    against = "" if reference else "one_rank-float64" if fault else f"one_rank-{spec.precision}"
    wants_gpus = spec.layout.world_size == 4
    common = {
        "name": name,
        "settings": spec.model_dump(mode="json"),
        "run": f"runs/{name}-{spec.content_hash()}",
        "world_size": spec.layout.world_size,
        "against": against,
        "device_note": "asked for 4 GPUs, 0 here" if wants_gpus else "",
    }
    if name == FAILED:
        return Configuration(
            **common,
            state="failed",
            verdict="failed",
            why="rank 1 stopped with ShardingError before step 0",
            failure={
                "rank": 1,
                "coordinates": {"dp": 0, "cp": 0, "tp": 1},
                "exception": "ShardingError",
                "traceback": TRACEBACK,
            },
        )
    steps, ratios = _steps(fault, draw), _ratios()
    if reference:
        return Configuration(**common, steps=steps, ratios=ratios, why="the others are held against it")
    parameters = [
        _difference(step, parameter, spec.precision, fault, draw) for step in range(STEPS) for parameter in PARAMETERS
    ]
    double = spec.precision == "float64"
    whole = [
        {
            "step": step,
            "distance": draw.uniform(0.05, 0.3) * budget if not fault else 0.6,
            "budget": budget,
            "relative_l2": 2e-15 if double else 3e-7,
            "bitwise_equal": False,
            "flipped_clips": 0,
        }
        for step in range(STEPS)
        for budget in [1e-12 if double else 4e-7]
    ]
    if not fault:
        return Configuration(
            **common,
            steps=steps,
            ratios=ratios,
            parameters=parameters,
            whole_gradient=whole,
            verdict="equal" if double else "within budget",
            why="every parameter within 1e-12 of the reference"
            if double
            else "no further from the float64 truth than 1.5x the reference",
        )
    factor, meaning = FAULTS[fault]
    return Configuration(
        **common,
        steps=steps,
        ratios=ratios,
        parameters=parameters,
        whole_gradient=whole,
        verdict="different",
        factor=factor,
        factor_meaning=meaning,
        first_step=0,
        first_parameter=PARAMETERS[0],
        why="the same direction with another length"
        if factor != 1.004
        else "another direction: cosine 0.990 with the reference",
    )


def _difference(step: int, parameter: str, precision: str, fault: str, draw: random.Random) -> ParameterDifference:
    reference = 0.02 + 0.4 * random.Random(parameter).random() * 0.9**step
    floor = parameter == FLOORED
    if floor:
        reference = 3e-9
    noise = 1e-15 if precision == "float64" else 2e-7
    unit = 1e-12 if precision == "float64" else 8e-7
    ratio, relative, cosine = 1 + noise * draw.uniform(-1, 1), noise * draw.uniform(0.2, 1), 1.0
    if fault:
        factor = FAULTS[fault][0]
        ratio = factor * (1 + 0.02 * draw.uniform(-1, 1)) if factor != 0.5 else 0.5
        relative, cosine = abs(ratio - 1) + 0.01, 1.0
        if factor == 1.004:
            relative, cosine, ratio = 0.14, 0.99, 1.004 + 0.03 * draw.uniform(-1, 1)
    budget = unit * max(reference, 2e-3)
    return ParameterDifference(
        step=step,
        parameter=parameter,
        norm=reference * ratio,
        reference_norm=reference,
        norm_ratio=ratio,
        relative_l2=relative,
        cosine=cosine,
        distance=relative * reference,
        budget=budget,
        judged_by="floor" if floor else "gradient",
        within=relative * reference <= budget,
    )


def _steps(fault: str, draw: random.Random) -> list[dict]:
    scale = FAULTS[fault][0] if fault else 1.0
    return [
        {
            "step": step,
            "loss/total/sum": 0.031 - 0.011 * step + (scale - 1) * 0.012,
            "gradient/norm/global": scale * (1.42 - 0.24 * step + 0.05 * step**2),
            "time/step_ms": draw.uniform(36, 44) * (3.1 if step == 0 else 1),
            "memory/peak_bytes": 231.0 * 2**20 + draw.randrange(0, 9) * 2**18,
        }
        for step in range(STEPS)
    ]


def _ratios() -> dict[str, dict[str, list[float]]]:
    out = {}
    for step in range(STEPS):
        width = 0.004 + 0.06 * step
        counts = [
            round(4000 * math.exp(-((((a + b) / 2 - 1) / width) ** 2) / 2) / (width * 25))
            for a, b in itertools.pairwise(EDGES)
        ]
        out[str(step)] = {"edges": EDGES, "counts": counts}
    return out
