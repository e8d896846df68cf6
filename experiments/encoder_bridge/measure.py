"""Benchmark: an encoder and a policy in two layouts compared with one process, and the bugs that each check detects.

On simulated ranks, in float64, with a tiny SigLIP and a tiny Qwen3: gradients of every parameter in each pair of
layouts against one rank, and each known bug of a bridge (`workbench.faults.bridge`) against the right step, by
three checks: gradients, weights after one step of Adam, and `diagnose` on two records. No times are measured.

Units: distances are of a parameter's gradient, in parts of its norm, or of a floor if that is nearly 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.encoder_bridge.page import write_encoder_bridge_report
from workbench.diagnose import Record, diagnose
from workbench.diagnose.record import RecordedStep
from workbench.faults import planted_faults
from workbench.faults.bridge import BRIDGE_FAULTS
from workbench.policy.decoder import tiny_siglip
from workbench.policy.encoder import make_encoder
from workbench.policy.model import load_policy
from workbench.prove.documents import Document, draw_documents, to_batch
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.sharding.bridge import Grid, GridGroups, connect
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate
from workbench.specs.run import RunSpec
from workbench.train.encoder_step import ENCODER, IMAGE_FEATURES, image_features, prepare_image_rows, run_image_step
from workbench.train.step import StepResult, build_loss

BAR = 1e-12
ADAM = {"learning_rate": 1e-4, "tolerance": 1e-3}
"""Of the usual check: weights after one step, with this tolerance, relative and absolute."""

IMAGES, FEATURES = 8, 4
"""Of the step: one image per document, and the number of features of a tiny SigLIP."""


@dataclass(frozen=True)
class Setting:
    """Two layouts of one number of ranks, and the delivery from one to the other.

    Attributes:
        encoder: sizes of its dimensions.
        policy: of the policy's.
        delivery: of the bridge.
        micro_batches: of a dp rank.
        shared: two documents read each image.
    """

    encoder: Mapping[str, int]
    policy: Mapping[str, int]
    delivery: str = "sharded"
    micro_batches: int = 1
    shared: bool = False


SETTINGS = {
    "fan-in": Setting({"tp": 2, "dp": 4}, {"tp": 2, "cp": 2, "dp": 2}, "whole"),
    "fan-out": Setting({"tp": 4, "dp": 2}, {"cp": 2, "dp": 4}, "whole"),
    "equal": Setting({"tp": 2, "dp": 4}, {"cp": 2, "dp": 4}, "whole"),
    "straight into shards": Setting({"tp": 2, "dp": 4}, {"tp": 2, "cp": 2, "dp": 2}),
    "source cp": Setting({"cp": 2, "dp": 2}, {"tp": 2, "cp": 2}),
    "dp 3 and 2": Setting({"tp": 2, "dp": 3}, {"cp": 3, "dp": 2}),
    "4 micro-batches": Setting({"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}, micro_batches=4),
    "images read twice": Setting({"dp": 4}, {"cp": 2, "dp": 2}, shared=True),
}
"""Settings that are compared with one rank, by name."""


def measure(
    *, pairs: int = 0, later: int = 0, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Run every pair of layouts and every fault once, and return a record.

    Args:
        pairs: not used; every benchmark takes it.
        later: not used.
        report_progress: called with progress messages.
    """
    layouts, faults = {}, {}
    for name, setting in SETTINGS.items():
        report_progress(f"layouts: {name}")
        baseline = _step(Setting({}, {}, shared=setting.shared))[0]
        result, path = _step(setting)
        layouts[name] = {
            **asdict(setting),
            "path": path,
            "parameters": len(result.gradients),
            "distance": max(_distances(result, baseline).values()),
        }
    for name in BRIDGE_FAULTS:
        report_progress(f"faults: {name}")
        faults[name] = _fault(name)
    bars = {
        "layouts": {"bar": BAR, "holds": all(entry["distance"] <= BAR for entry in layouts.values())},
        "gradients see every fault": {"holds": all(entry["distance"] > 1e-6 for entry in faults.values())},
        "diagnose names every scale": {
            "holds": all(entry["diagnosis"] == "module_scaled" for entry in faults.values() if entry["scales_encoder"])
        },
    }
    return {
        "benchmark": "encoder_bridge",
        "device": "cpu, simulated ranks",
        "images": IMAGES,
        "layouts": layouts,
        "faults": faults,
        "adam": ADAM,
        "bars": bars,
        "provenance": provenance(project_root()),
    }


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = [
        f"{name}: {entry['path']}, {entry['parameters']} parameters within {entry['distance']:.1e}"
        for name, entry in record["layouts"].items()
    ]
    lines += [
        f"{name}: gradients {entry['distance']:.2g} off; after one step of Adam "
        f"{'passes' if entry['passes_adam'] else 'fails'} ({entry['adam_largest']:.1e}); diagnose says "
        f"{entry['diagnosis']}"
        for name, entry in record["faults"].items()
    ]
    return "\n".join(lines)


def write_page(record: dict[str, Any], folder: Path) -> Path:
    """Write the record as a page."""
    return write_encoder_bridge_report(record, folder)


def _fault(name: str) -> dict[str, Any]:
    """Result of each check on a fault, in a setting that shows it."""
    shown = BRIDGE_FAULTS[name].shows_in
    setting = Setting(shown["encoder"], shown["layout"], shown["delivery"], shared=shown.get("shared", False))
    (right, _), (wrong, _) = _step(setting), _step(setting, name)
    diagnosis = diagnose(_record(right, setting), _record(wrong, setting))
    parts = {part: _ratio(wrong, right, inside=part == "encoder") for part in ("encoder", "policy")}
    moved = [
        abs(_after_adam(wrong.gradients[key]) - _after_adam(gradient)).max()
        for key, gradient in right.gradients.items()
    ]
    largest = float(torch.stack(moved).max())
    return {
        "what": BRIDGE_FAULTS[name].what,
        "loss": float(wrong.loss["total"]) / float(right.loss["total"]),
        **parts,
        "scales_encoder": _is_multiple(wrong, right) and abs(parts["policy"] - 1) < BAR,
        "distance": max(_distances(wrong, right).values()),
        "adam_largest": largest,
        "passes_adam": largest <= ADAM["tolerance"],
        "diagnosis": diagnosis.causes[0].name,
        "evidence": diagnosis.causes[0].evidence[0],
    }


@functools.cache
def _problem(shared: bool) -> tuple[RolloutBatch, Tensor]:
    """Documents near the policy, most of them with an image's features after the first token; and the images."""
    policy = load_policy("tiny-qwen3", precision="float64", seed=3)
    documents = [
        _with_feature_tokens(document) if number < IMAGES else document
        for number, document in enumerate(draw_documents("images", policy))
    ]
    numbers = []
    for number, document in enumerate(documents):
        features = [PADDING] * len(document.tokens)
        if number < IMAGES:
            image = number // 2 if shared else number
            features[1 : 1 + FEATURES] = range(image * FEATURES, (image + 1) * FEATURES)
        numbers += features
    pixels = torch.randn(IMAGES, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = to_batch(documents)
    reads = {IMAGE_FEATURES: image_features(torch.tensor(numbers))}
    return replace(batch, extensions={**batch.extensions, **reads}), pixels


def _with_feature_tokens(document: Document) -> Document:
    """Insert tokens that do not count after the first one, as places of the features."""
    changed: dict[str, Any] = {}
    for name, values in vars(document).items():
        if isinstance(values, tuple):
            changed[name] = (*values[:1], *(type(values[0])() for _ in range(FEATURES)), *values[1:])
    return replace(document, **changed)


def _dealt(setting: Setting) -> list[list[int]] | None:
    """Documents of each row, for a bridge that deals whole images in order."""
    if setting.delivery == "sharded":
        return None
    dp = setting.policy.get("dp", 1)
    rows = [list(range(rank * IMAGES // dp, (rank + 1) * IMAGES // dp)) for rank in range(dp)]
    return [*rows[:-1], [*rows[-1], *range(IMAGES, _problem(False)[0].num_documents)]]


def step_on(world: Axis, setting: Setting, device: torch.device | str = "cpu") -> tuple[StepResult, str]:
    """Run one step, and return this rank's result and the path. Collective over the world.

    Args:
        world: all ranks; one rank if both layouts have one.
        setting: the layouts.
        device: of this rank.
    """
    source, destination = Grid.of(**setting.encoder), Grid.of(**setting.policy)
    batch, pixels = _problem(setting.shared)
    spec = RunSpec.model_validate(
        {
            "precision": "float64",
            "loss": {"name": "dapo", "kl": {"coefficient": 0.05}},
            "layout": {**setting.policy, "order": "zigzag"},
            "data": {"micro_batches": setting.micro_batches},
        }
    )
    groups, sharded = GridGroups(world), setting.delivery == "sharded"
    bridge = connect(
        source,
        destination,
        groups,
        delivery="sharded" if sharded else "whole",
        order="zigzag" if sharded else None,
        source_order="contiguous",
    )
    encoder = make_encoder(tiny_siglip(seed=4), 64, mesh=groups.mesh(source, device), precision="float64", seed=6)
    policy = load_policy("tiny-qwen3", mesh=groups.mesh(destination, device), precision="float64", seed=3)
    rows, totals = prepare_image_rows(batch, pixels, spec, policy.mesh, encoder, bridge, _dealt(setting))
    path = bridge.route([IMAGES // source["dp"]] * source["dp"]).path
    result = run_image_step(
        encoder,
        policy,
        build_loss(spec.loss),
        rows,
        totals,
        num_source=batch.num_tokens,
        keep_gradients=True,
        loss_spec=spec.loss,
    )
    groups.destroy()
    return result, path


def _step(setting: Setting, fault: str | None = None) -> tuple[StepResult, str]:
    """Result of the first simulated rank, and the path."""
    with planted_faults([BRIDGE_FAULTS[fault]] if fault else []):
        return simulate(lambda mesh: step_on(mesh["dp"], setting), dp=Grid.of(**setting.encoder).size)[0]


def _distances(result: StepResult, right: StepResult) -> dict[str, float]:
    elements = sum(gradient.numel() for gradient in right.gradients.values())
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in right.norms.values()) / elements)
    return {
        name: float((result.gradients[name] - gradient).norm())
        / max(float(gradient.norm()), floor * math.sqrt(gradient.numel()))
        for name, gradient in right.gradients.items()
    }


def _ratio(wrong: StepResult, right: StepResult, *, inside: bool) -> float:
    """Norm of a module's gradient over the right one's."""
    wrong_norm, right_norm = (
        math.sqrt(sum(norm**2 for name, norm in result.norms.items() if name.startswith(ENCODER) == inside))
        for result in (wrong, right)
    )
    return wrong_norm / right_norm


def _is_multiple(wrong: StepResult, right: StepResult) -> bool:
    """True if the encoder's gradient is a multiple of the right one, and not the right one."""
    vectors = [
        torch.cat([gradient.flatten() for name, gradient in result.gradients.items() if name.startswith(ENCODER)])
        for result in (wrong, right)
    ]
    cosine = float(torch.nn.functional.cosine_similarity(*vectors, dim=0))
    return cosine > 1 - BAR and abs(_ratio(wrong, right, inside=True) - 1) > 1e-6


def _record(result: StepResult, setting: Setting) -> Record:
    context = {
        "dp": 1,
        "cp": 1,
        "tp": 1,
        **setting.policy,
        "precision": "float64",
        "micro_batches": 1,
        "modules": {"encoder": {"dp": 1, "cp": 1, "tp": 1, **setting.encoder}},
    }
    batch, _ = _problem(setting.shared)
    source = {"documents": batch.document_ids_T, "features": batch.extensions[IMAGE_FEATURES].values}
    counts = {"trained_tokens": float(result.totals.tokens), "documents": float(result.totals.documents)}
    return Record(
        context,
        (
            RecordedStep(
                0,
                float(result.loss["total"]),
                dict(result.metrics),
                dict(result.norms),
                counts,
                dict(result.gradients),
                dict(result.tokens) | source,
            ),
        ),
    )


def _after_adam(gradient: Tensor) -> Tensor:
    """Weights, from zero, after one step."""
    weight = torch.zeros_like(gradient, requires_grad=True)
    weight.grad = gradient
    torch.optim.Adam([weight], lr=ADAM["learning_rate"]).step()
    return weight.detach()
