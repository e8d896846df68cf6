"""Arrangement of the documents of a step over ranks, the outcome of a subject's step in it, and differences of two.

All ranks are simulated in this process, in float64, on a decoder of toy size: a loss's divisor does not depend on the
size of the model.

Tolerances, where a correct layout stays near 1e-15: a parameter's gradient within 1e-10 of the plain one's norm, or of
a floor if that norm is smaller; the loss within 1e-12 of itself or of the whole gradient's norm; a metric within 1e-10.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.compare.distances import SAME, meaning
from workbench.faults import planted
from workbench.policy.model import Policy, load_policy
from workbench.policy.routers import Routes
from workbench.prove.documents import Document, to_batch
from workbench.prove.subject import Subject
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.groups import DataSpec, LayoutSpec, ModelSpec, PolicySpec
from workbench.specs.lora import LoraSpec
from workbench.specs.mixtures import RoutingSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.routes import NOTED, StepRoutes, with_routes
from workbench.train.rows import LocalRow
from workbench.train.step import StepResult

TIMEOUT_S = 60.0
BLOCK_TOKENS = 2
"""Block size of the balanced order: rows here are short."""


@dataclass(frozen=True)
class Arrangement:
    """Documents of one optimizer step, and the place of each.

    Attributes:
        documents: of the whole step.
        rows: numbers of the documents of each row, in their order there: the micro-batches of the first dp rank, then
            those of the second, ...
        pp, schedule, stages_per_rank: stages of the layers, which the micro-batches pass in the order of a schedule.
        mixture: True for a decoder with experts; ep ranks share them.
        replay: True if its routers replay what they choose for these documents on one rank, in one row.
        order: token order, which deals a row's tokens to cp ranks.
        attention: exchange of keys and values between cp ranks.
        sequence_parallel: True if tp ranks shard tokens between tensor-parallel layers.
        multiple_of: rows are padded to a multiple of this; None: of the layout's requirement.
        chunk_tokens: tokens whose logits exist at a time; None: all.
        fused: True to compute loss and gradient in one pass over the head, where that is possible.
    """

    documents: tuple[Document, ...]
    rows: tuple[tuple[int, ...], ...]
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    ep: int = 1
    mixture: bool = False
    replay: bool = False
    order: str = "contiguous"
    attention: str = "gathered"
    sequence_parallel: bool = False
    multiple_of: int | None = None
    chunk_tokens: int | None = None
    fused: bool = False

    @property
    def micro_batches(self) -> int:
        """Number of rows of each dp rank."""
        return len(self.rows) // self.dp

    @property
    def layout(self) -> LayoutSpec:
        """Layout of the ranks."""
        names = ("dp", "cp", "tp", "pp", "ep", "stages_per_rank", "order", "attention", "sequence_parallel")
        more = {"block_tokens": BLOCK_TOKENS, "pipeline_schedule": self.schedule}
        return LayoutSpec.model_validate({name: getattr(self, name) for name in names} | more)

    @property
    def tokens(self) -> int:
        """Tokens of all rows, with the padding that ``multiple_of`` adds."""
        each = self.multiple_of or 1
        lengths = [sum(len(self.documents[number].tokens) for number in row) for row in self.rows]
        return sum(max(1, -(-length // each)) * each for length in lengths)

    def spec(self, base: RunSpec) -> RunSpec:
        """A spec with this layout, packing and head, and the loss and the advantages of another."""
        head: dict[str, Any] = {}
        if self.chunk_tokens is not None:
            head = {"logprobs": "chunked", "fused_loss": self.fused, "chunk_tokens": self.chunk_tokens}
        return RunSpec(
            loss=base.loss,
            model=ModelSpec(source="tiny-qwen3-moe" if self.mixture else "tiny-qwen3"),
            layout=self.layout,
            policy=PolicySpec(temperature=base.policy.temperature, **head),
            lora=_everywhere(base.lora, mixture=self.mixture),
            precision="float64",
            faults=base.faults,
            routing=RoutingSpec(replay="recorded" if self.replay else "none"),
            data=DataSpec(
                advantages=base.data.advantages, keep_groups=base.data.keep_groups, multiple_of=self.multiple_of
            ),
        )

    def __str__(self) -> str:
        """Short description."""
        parts = [str(self.layout), *(["a mixture of experts"] if self.mixture else [])]
        parts += ["replayed routes"] if self.replay else []
        parts += [*([f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else [])]
        if len(self.rows) > 1 or self.rows[0] != tuple(range(len(self.documents))):
            parts.append("documents " + " | ".join(" ".join(map(str, row)) or "none" for row in self.rows))
        if self.multiple_of is not None and self.tokens > sum(len(d.tokens) for d in self.documents):
            parts.append(f"padded to {self.tokens} tokens")
        if self.chunk_tokens is not None:
            tokens = "1 token" if self.chunk_tokens == 1 else f"{self.chunk_tokens} tokens"
            parts.append(f"head {tokens} at a time{', fused' if self.fused else ''}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """Result of a step in an arrangement, or the exception it raised.

    Attributes:
        loss: the total.
        gradients: whole, by parameter.
        metrics: by key, including the terms of the loss.
        idle: True if some rank had a micro-batch in which none of its tokens counts.
        error: exception, if one was raised.
    """

    loss: float = math.nan
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    idle: bool = False
    error: BaseException | None = None

    @property
    def norm(self) -> float:
        """Norm of the whole gradient."""
        return norm_of(self.gradients)


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """L2 norm of a whole gradient."""
    return math.sqrt(sum(float(values.square().sum()) for values in gradients.values()))


def perform(subject: Subject, arrangement: Arrangement) -> Outcome:
    """Take the step on every rank of an arrangement. An exception of a rank is part of the outcome."""
    spec = arrangement.spec(subject.run_spec)
    batch = to_batch(arrangement.documents)
    if arrangement.replay:
        batch = with_routes(batch, _own_routes(batch, spec))
    chosen: Any = replace(subject, run_spec=spec)  # type: ignore[type-var]
    idle = []

    def rank(mesh: Mesh) -> StepResult:
        rows, totals = flow.prepare_rows(batch, spec, mesh, arrangement.rows)
        idle.append(any(not bool(local.row.loss_mask_T.any()) for local in rows))
        policy = _policy(mesh, spec)
        if arrangement.replay:
            routes = StepRoutes(policy, rows, spec.routing, totals)
            rows = [_Replayed(**vars(local), begin=partial(routes.begin, at)) for at, local in enumerate(rows)]
        return chosen.step(policy, rows, totals)

    try:
        with planted(spec.faults):
            sizes: dict[str, Any] = arrangement.layout.mesh_sizes
            result = simulate(rank, **sizes, timeout_s=TIMEOUT_S)[0]
    except Exception as error:
        return Outcome(idle=any(idle), error=error)
    terms = {f"loss/{name}": float(scalar) for name, scalar in result.loss.items() if name != "total"}
    return Outcome(float(result.loss["total"]), result.gradients, {**terms, **result.metrics}, any(idle))


@dataclass(frozen=True)
class _Replayed(LocalRow):
    """A row whose routers replay its routes, whatever step passes it."""

    begin: Callable[[], Routes] | None = None

    def hidden_states(self, policy: Policy, routes: Routes | None = None) -> Tensor:
        """[t, D] hidden states of this rank's tokens."""
        assert self.begin is not None, "every replayed row has its routes"
        return super().hidden_states(policy, self.begin())


def _own_routes(batch: RolloutBatch, spec: RunSpec) -> Tensor:
    """[S, L, k] experts that the routers choose on one rank, in one row."""
    alone = spec.model_copy(update={"layout": LayoutSpec(), "routing": NOTED, "data": DataSpec()})
    mesh = single_process_mesh()
    [local], totals = flow.prepare_rows(batch, alone, mesh, [range(batch.num_documents)])
    policy = _copy(0, spec.model.source, spec.lora, routing=True)
    taken = StepRoutes(policy, [local], NOTED, totals)
    routes = taken.begin(0)
    with torch.no_grad():
        local.hidden_states(policy, routes)
    taken.finish(0, routes)
    routes_SLk = taken.in_source_order(batch.num_tokens)
    assert routes_SLk is not None, "they are recorded"
    return routes_SLk


def _everywhere(lora: LoraSpec, *, mixture: bool) -> LoraSpec:
    """Adapters on every layer, the head and the experts of the decoder of proofs, if the run trains adapters.

    With its rank and scale (of a source, a rank of 2); B is random, as no gradient reaches A where B is 0.
    """
    if not lora.on:
        return LoraSpec()
    return LoraSpec(
        r=lora.r or 2,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        target_modules=".*(_proj|lm_head)",
        target_parameters=("experts.gate_up_proj", "experts.down_proj") if mixture else (),
        init_lora_weights="random",
    )


def one_rank_policy() -> Policy:
    """The decoder of all proofs, unsharded."""
    return _copy(0)


def one_row(documents: Sequence[Document], **settings: Any) -> Arrangement:
    """All documents in one row of one rank, unless settings override that."""
    return Arrangement(tuple(documents), (tuple(range(len(documents))),), **settings)


def _policy(mesh: Mesh, spec: RunSpec) -> Policy:
    """The decoder as sharded on one rank of a mesh. Ranks of one mesh have separate copies of the weights."""
    settings = spec.policy
    head: dict[str, Any] = {"temperature": settings.temperature or 1.0, "chunk_tokens": settings.chunk_tokens}
    source, layout = spec.model.source, spec.layout
    if max(layout.tp, layout.pp, layout.ep) > 1:
        head["implementation"] = "auto" if settings.logprobs == "reference" else settings.logprobs
        return load_policy(
            source,
            mesh=mesh,
            precision="float64",
            sequence_parallel=layout.sequence_parallel,
            pipeline_schedule=layout.pipeline_schedule,
            stages_per_rank=layout.stages_per_rank,
            routing=spec.routing.on,
            lora=spec.lora,
            **head,
        )
    whole = _copy(mesh["dp_cp"].rank, source, spec.lora, routing=spec.routing.on)
    implementation = whole.implementation if settings.logprobs == "auto" else settings.logprobs
    return replace(whole, mesh=mesh, implementation=implementation, **head)


@functools.cache
def _copy(number: int, source: str = "tiny-qwen3", lora: LoraSpec | None = None, *, routing: bool = False) -> Policy:
    return load_policy(source, precision="float64", lora=lora, routing=routing)


GRADIENT_BAR = 1e-10
LOSS_BAR = 1e-12
METRIC_BAR = 1e-10
FLOOR = 1e-3
"""Of the root mean square of the whole gradient: a parameter whose gradient is smaller is judged by this."""
NOTHING = 1e-12
"""A metric below this counts as 0, and a whole gradient shorter than this, or than this part of the plain one,
trains nothing."""
PARALLEL = 0.999
"""Cosine above which a gradient is a multiple of another one."""

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Difference between two outcomes.

    Attributes:
        worst: greatest relative difference of any number.
        differing: "gradient", "loss", "metric KEY", "not a number" or "error"; () if all are within tolerance.
        description: description, one sentence.
        factor: multiplier of the gradient, or of the loss if the gradient is right; None if it is no multiple.
        factor_name: expression that equals it; "" if nothing simple.
    """

    worst: float
    differing: tuple[str, ...] = ()
    description: str = ""
    factor: float | None = None
    factor_name: str = ""

    @property
    def signature(self) -> tuple[str, bool, str]:
        """The properties that stay the same while a counterexample is shrunk."""
        return "".join(self.differing[:1]), self.factor is None, self.factor_name


def difference(plain: Outcome, changed: Outcome, arrangements: tuple[Arrangement, Arrangement]) -> Difference:
    """Compare the outcome of a changed arrangement with that of the plain one, which is finite and has a gradient.

    The arrangements of both have the sizes that a factor may equal.
    """
    if changed.error is not None:
        lines = str(changed.error).splitlines() or [""]
        details = [line.strip() for line in lines if line.strip().startswith("found: ")]
        return Difference(math.inf, ("error",), "; ".join([f"{type(changed.error).__name__}: {lines[0]}", *details]))
    broken = [name for name, values in changed.gradients.items() if not bool(values.isfinite().all())]
    if broken or not math.isfinite(changed.loss):
        where = f"the gradient of {len(broken)} parameter(s), {broken[0]} first" if broken else "the loss"
        return Difference(math.inf, ("not a number",), f"{where} is not a number")
    gradient, name = _farthest(plain.gradients, changed.gradients)
    loss = _relative(plain.loss, changed.loss, floor=plain.norm)
    metrics = {
        key: _relative(value, changed.metrics.get(key, math.nan), floor=NOTHING / METRIC_BAR)
        for key, value in plain.metrics.items()
    }
    worst = max([gradient, loss, *metrics.values()])
    differing, messages = [], []
    factor, sizes = None, _sizes(*arrangements)
    if gradient > GRADIENT_BAR:
        factor, message = _gradient_message(plain.gradients, changed.gradients, name)
        differing.append("gradient")
        messages.append(message + _in_brackets(factor, sizes))
    if loss > LOSS_BAR:
        message = f"the loss is {_apart(changed.loss, plain.loss)}"
        if not differing and plain.loss:
            factor = changed.loss / plain.loss
            message += f": {_times(factor)} times{_in_brackets(factor, sizes)}"
        differing.append("loss")
        messages.append(message)
    off = [key for key, far in metrics.items() if far > METRIC_BAR and not _follows(key, differing)]
    if off:
        first, before = changed.metrics.get(off[0], math.nan), plain.metrics[off[0]]
        if not differing and before:
            factor = first / before
        more = f", and {len(off) - 1} more metrics differ" if len(off) > 1 else ""
        messages.append(f"{off[0]} is {_apart(first, before)}{more}")
    differing += [f"metric {key}" for key in off]
    return Difference(
        worst, tuple(differing), "; ".join(messages), factor, "" if factor is None else meaning(factor, sizes)
    )


def _apart(changed: float, plain: float) -> str:
    """Two numbers with enough digits to distinguish them, at least 4."""
    digits = next((digits for digits in range(4, 17) if f"{changed:.{digits}g}" != f"{plain:.{digits}g}"), 17)
    return f"{changed:.{digits}g}, not {plain:.{digits}g}"


def _times(factor: float) -> str:
    """A factor as text; close to 1 as its distance from 1."""
    rest = factor - 1
    if not rest or abs(rest) >= 5e-4:
        return f"{factor:.4g}"
    return f"1 {'+' if rest > 0 else '-'} {abs(rest):.1e}"


def _in_brackets(factor: float | None, sizes: Mapping[str, float]) -> str:
    named = "" if factor is None else meaning(factor, sizes)
    return f" ({named})" if named else ""


def _sizes(plain: Arrangement, changed: Arrangement) -> dict[str, float]:
    """Sizes that a factor may equal, simplest first: ratios of changed to plain."""
    axes = {
        name: getattr(changed, name) / getattr(plain, name) for name in ("cp", "dp", "tp", "pp", "ep", "micro_batches")
    }
    grown = [name for name, size in axes.items() if size != 1]
    pairs = {f"{a} * {b}": axes[a] * axes[b] for at, a in enumerate(grown) for b in grown[at:]}
    shares = {
        "padded tokens / tokens": changed.tokens / plain.tokens,
        "all documents / documents": len(changed.documents) / len(plain.documents),
        "(tokens + silent documents) / tokens": _one_at_least(changed) / _one_at_least(plain),
    }
    return {**axes, **pairs, **shares}


def _one_at_least(arrangement: Arrangement) -> int:
    """Trained tokens, where a document without any counts as one."""
    return sum(max(1, document.trained) for document in arrangement.documents)


def _farthest(plain: Gradients, changed: Gradients) -> tuple[float, str]:
    """The greatest distance of a parameter's gradient, relative to its norm or the floor, and the parameter."""
    elements = sum(values.numel() for values in plain.values())
    floor = FLOOR * norm_of(plain) / math.sqrt(elements)
    far = {
        name: float((changed[name] - values).norm()) / max(float(values.norm()), floor * math.sqrt(values.numel()))
        for name, values in plain.items()
    }
    name = max(far, key=far.__getitem__)
    return far[name], name


def _gradient_message(plain: Gradients, changed: Gradients, farthest: str) -> tuple[float | None, str]:
    """The factor between two gradients, if there is one, and a sentence."""
    product = sum(float((changed[name] * values).sum()) for name, values in plain.items())
    norm, other = norm_of(plain), norm_of(changed)
    if other <= NOTHING * norm:
        return 0.0, "the gradient is 0"
    cosine, factor = product / (norm * other), product / norm**2
    if abs(cosine) < PARALLEL:
        return None, (
            f"the gradient is another one: cosine {cosine:.3f}, {other / norm:.3g} times as long, "
            f"farthest in {farthest}"
        )
    rest = math.sqrt(sum(float((changed[name] - factor * values).square().sum()) for name, values in plain.items()))
    if rest > SAME * other:
        return None, f"the gradient is nearly {_times(factor)} times the plain one, farthest in {farthest}"
    return factor, f"the gradient is {_times(factor)} times the plain one"


def _relative(plain: float, changed: float, *, floor: float) -> float:
    if plain == changed or (math.isnan(plain) and math.isnan(changed)):
        return 0.0
    far = abs(changed - plain) / max(abs(plain), floor)
    return math.inf if math.isnan(far) else far


def _follows(metric: str, what: list[str]) -> bool:
    """True if a metric follows from a difference already listed: a norm of the gradient, a term of the loss."""
    return (metric.startswith("gradient/") and "gradient" in what) or (metric.startswith("loss/") and "loss" in what)
