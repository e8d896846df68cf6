"""The factors of the gap: each is a set of fields of a configuration, and the values that a search tries for them.

To add one: a `Factor` with the fields that it owns, listed in `FACTORS`. The search, the parts and the page read that
table only.

Letters: T tokens | V vocabulary | K sizes of a support.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import CURRENT, RECORDED, Configuration
from workbench.mismatch.prefixes import SMALL_VOCABULARY, prefix_names
from workbench.mismatch.routing import VARIANTS
from workbench.mismatch.settings import Gemms, Head, Lora
from workbench.mismatch.tokenisation import respelled

TINY = 1e-6
"""Nats below which two log-probabilities count as the same in a score: rounding of float32 near 10 nats."""
SIGNS = 4.0
"""Standard errors, over tokens, by which a gain has to differ from 0: 300 switches are tried, in rows of tokens that
are not independent."""
ALIKE = 0.05
"""Mean log distance, 5 %, by which two values of a setting may differ and count as one."""
SAMPLING = ("temperature", "truncation", "log-probability mode")
"""Factors that can give the same values: the drawn tokens decide between them."""
OWN_GAIN = 2.0
"""Mean log distance that a document's own reading of its prompt gains: a factor of seven."""
FITTED = 512
"""Tokens on which a continuous setting is fitted."""
SCREENED, SCREENED_TOKENS = 4, 12
"""Documents, and tokens of each, on which the many readings of a prompt are tried first: its effect begins at once."""


@dataclass(frozen=True)
class Switch:
    """Other values of one factor.

    Attributes:
        factor: its name.
        label: what it would mean.
        changes: field of `Configuration` and value.
        documents: numbers of the documents in which it acts; None: in all.
    """

    factor: str
    label: str
    changes: tuple[tuple[str, object], ...]
    documents: frozenset[int] | None = None


@dataclass(frozen=True)
class State:
    """Evidence from which a factor proposes values.

    Attributes:
        computation: of the record.
        configuration: so far.
        recorded_T: [T] column to be explained.
        column_T: [T] column of the configuration so far, its partial switches included.
    """

    computation: Computation
    configuration: Configuration
    recorded_T: Tensor
    column_T: Tensor


@dataclass(frozen=True)
class Factor:
    """One possible source of the gap.

    Attributes:
        name: of the factor, as reports have it.
        question: what it is about.
        fields: of `Configuration` that it owns.
        propose: switches that are worth trying from a state.
        partial: it may act in some documents only.
        record: what to record to decide about it.
    """

    name: str
    question: str
    fields: tuple[str, ...]
    propose: Callable[[State], Iterator[Switch]]
    partial: bool = False
    record: str = ""


def distance(column_T: Tensor, recorded_T: Tensor, counted_T: Tensor) -> Tensor:
    """Log of the distance of each counted token, floored at `TINY`; tokens without a value count as not compared.

    Shapes: [T] each -> [T], NaN where nothing is compared.
    """
    log_T = torch.log(TINY + (column_T - recorded_T).abs())
    return torch.where(counted_T, log_T, torch.nan)


def score(column_T: Tensor, recorded_T: Tensor, counted_T: Tensor) -> float:
    """Mean log distance over compared tokens: log nats, the smaller the nearer."""
    mean = torch.nanmean(distance(column_T, recorded_T, counted_T))
    return float(mean) if mean.isfinite() else float("inf")


def as_near(other_T: Tensor, best_T: Tensor) -> bool:
    """True if log distances are no larger than the best ones, beyond `ALIKE` and chance.

    The best of many values of a continuous setting hits some tokens by chance, and each hit counts for many others.
    """
    gain_T = (other_T - best_T)[other_T.isfinite() & best_T.isfinite()]
    if not len(gain_T):
        return False
    return float(gain_T.mean()) <= ALIKE or float(gain_T.sum()) <= SIGNS * float(gain_T.square().sum().sqrt())


def _values(factor: str, field: str, values: object, label: str, now: object) -> Iterator[Switch]:
    for value in values:  # type: ignore[attr-defined]
        if value != now:
            yield Switch(factor, label.format(value), ((field, value),))


# ---- proposals -------------------------------------------------------------------------------------------


def _stale(state: State) -> Iterator[Switch]:
    names = [CURRENT, *state.computation.older]
    yield from _values("stale weights", "weights", names, "weights of {}", state.configuration.weights)


def _temperature(state: State) -> Iterator[Switch]:
    now = state.configuration
    if now.logprobs == "raw":
        return
    values = {1.0}
    if (fitted := fitted_temperature(state)) is not None:
        values.add(fitted)
    for value in sorted(values - {now.temperature}):
        yield Switch("temperature", f"temperature {value:g}", (("temperature", value),))


def _truncation(state: State) -> Iterator[Switch]:
    now = state.configuration
    if now.logprobs != "processed":
        return
    none = (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    if any(getattr(now, name) != value for name, value in none):
        yield Switch("truncation", "no truncation", none)
    for name, value in fitted_truncation(state):
        changes = dict(none) | {name: value}
        if any(getattr(now, field) != other for field, other in changes.items()):
            yield Switch("truncation", f"{name} {value:g}", tuple(changes.items()))


def _mode(state: State) -> Iterator[Switch]:
    now = state.configuration
    truncated = bool(now.top_k) or now.top_p < 1 or now.min_p > 0
    modes = ["raw"] if now.temperature != 1 or truncated else []
    modes += ["scaled"] if truncated and now.temperature != 1 else []
    modes += ["processed"] if truncated or now.temperature != 1 else []
    modes += ["divided"] if now.temperature != 1 else []
    labels = {
        "raw": "log-probabilities of the logits as they are",
        "scaled": "log-probabilities after the temperature, over the whole vocabulary",
        "processed": "log-probabilities after temperature and truncation",
        "divided": "log-probabilities divided by the temperature, instead of logits",
    }
    for mode in modes:
        if mode != now.logprobs:
            yield Switch("log-probability mode", labels[mode], (("logprobs", mode),))


def _head(state: State) -> Iterator[Switch]:
    names = Head.__args__  # type: ignore[attr-defined]
    now = state.configuration.head_dtype
    yield from _values("head precision", "head", [n for n in names if n != "float64"], "head in {}", now)


def _trunk(state: State) -> Iterator[Switch]:
    for switch in _values(
        "trunk precision", "precision", ("float32", "bfloat16", "float16"), "trunk in {}", state.configuration.precision
    ):
        yield switch
        if state.configuration.head is None:  # the trunk alone: the head stays as it was
            kept = ("head", state.configuration.precision)
            yield Switch(switch.factor, f"{switch.label}, the head not", (*switch.changes, kept))


def _attention(state: State) -> Iterator[Switch]:
    now = state.configuration.attention
    yield from _values("attention kernel", "attention", ("sdpa", "eager"), "attention by {}", now)


def _gemms(state: State) -> Iterator[Switch]:
    names = Gemms.__args__  # type: ignore[attr-defined]
    yield from _values("FP8", "gemms", names, "linear layers in {}", state.configuration.gemms)


def _routes(state: State) -> Iterator[Switch]:
    if not state.computation.mixture:
        return
    now = state.configuration
    if state.computation.routes_recorded:
        yield from _values("routes", "routes", ("own", "recorded"), "{} routes", now.routes)
    yield from _values("routes", "router", ("own", *VARIANTS), "router: {}", now.router)


def _lora(state: State) -> Iterator[Switch]:
    if state.computation.adapter is None:
        return
    names = Lora.__args__  # type: ignore[attr-defined]
    yield from _values("LoRA merge", "lora", names, "adapter {}", state.configuration.lora)


def _tokenisation(state: State) -> Iterator[Switch]:
    now = state.configuration
    if now.tokens != RECORDED:
        return
    if "sampler_ids" in state.computation.readings:
        yield Switch("tokenisation", "the engine's own tokens", (("tokens", "sampler_ids"),))
        return
    if (name := respelled(state.computation, now, state.column_T, state.recorded_T)) is not None:
        yield Switch("tokenisation", "other tokens of the same text", (("tokens", name),))


def _offset(state: State) -> Iterator[Switch]:
    labels = {
        "values +1": "the value of the next token",
        "values -1": "the value of the token before",
        "logits +1": "logits of the token's own position",
        "logits -1": "logits of two positions before",
        "none": "the value of the token itself",
    }
    for name, label in labels.items():
        if name != state.configuration.offset:
            yield Switch("offset by one", label, (("offset", name),))


def _prefix(state: State) -> Iterator[Switch]:
    """Readings of the prompt that come near in the documents that are furthest off; and each document's own."""
    computation, now = state.computation, state.configuration
    if now.prefix != RECORDED:
        return
    log_T = distance(state.column_T, state.recorded_T, computation.counted_T)
    by_document = [torch.nanmean(log_T[computation.document_T == n]) for n in range(len(computation.documents))]
    means = torch.stack(by_document).nan_to_num(-torch.inf)
    order = means.argsort(descending=True).tolist()
    names, gains_ND = _screened(state, log_T, order[:SCREENED])
    ranked = sorted(zip(gains_ND.amax(1).tolist(), names, strict=True), reverse=True)
    for _, name in ranked[:3]:
        yield Switch("wrong prefix", f"prompt: {name}", (("prefix", name),))
    own = {names[int(best)] for best, gain in zip(gains_ND.argmax(0), gains_ND.amax(0), strict=True) if gain > OWN_GAIN}
    if len(own) > 1:
        off = [n for n in order if float(means[n]) > float(means.min()) + OWN_GAIN] or order  # all may be off
        _, gains_ND = _screened(state, log_T, off)
        best = {n: names[int(gains_ND[:, i].argmax())] for i, n in enumerate(off) if gains_ND[:, i].max() > OWN_GAIN}
        table = [best.get(n, RECORDED) for n in range(len(computation.documents))]
        label = ", ".join(dict.fromkeys(best.values()))
        yield Switch("wrong prefix", f"prompt: {label}", (("prefix", computation.add_prefixes(table)),))


def _screened(state: State, log_T: Tensor, numbers: list[int]) -> tuple[list[str], Tensor]:
    """Readings of a prompt, and what each gains in each of some documents, over their first tokens. Shape: [N, D]."""
    computation, now, config = state.computation, state.configuration, state.computation.config
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = [token for key in keys for token in _ids(getattr(config, key, None))]
    names = list(prefix_names(computation.all_documents, min(config.vocab_size, SMALL_VOCABULARY + 1), special))
    few = computation.openings(now.tokens, names, numbers, SCREENED_TOKENS)
    gains = []
    sizes = [len(one.completion) for one in few.documents]
    for number, column_C in enumerate(few.column(now).split(sizes)):
        own = computation.document_T == numbers[number % len(numbers)]
        gain_C = log_T[own] - distance(column_C, state.recorded_T[own], computation.counted_T[own])
        gains.append(float(torch.nanmean(gain_C).nan_to_num(-torch.inf)))
    return names, torch.tensor(gains).reshape(len(names), len(numbers))


def _ids(value: object) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]  # type: ignore[call-overload]


# ---- fits ------------------------------------------------------------------------------------------------


def _sample(state: State) -> tuple[Tensor, Tensor, Tensor] | None:
    """Logits, tokens and recorded values of some counted tokens; None if the reading has other tokens or an offset."""
    now, computation = state.configuration, state.computation
    if now.tokens != RECORDED or now.prefix == "none":
        return None
    at_T = torch.nonzero(computation.counted_T & state.recorded_T.isfinite())[:, 0]
    if now.offset.startswith("values"):
        step = 1 if now.offset == "values +1" else -1
        inside = (at_T + step >= 0) & (at_T + step < len(computation.document_T))
        at_T = at_T[inside]
        at_T = at_T[computation.document_T[at_T + step] == computation.document_T[at_T]]
    else:
        step = 0
    at_T = at_T[:: max(1, len(at_T) // FITTED)]
    logits_TV, tokens_T = computation.logits_of(now, at_T + step)
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return wide_TV, tokens_T, state.recorded_T[at_T].to(wide_TV.device)


def fitted_temperature(state: State) -> float | None:
    """Temperature that comes nearest to the recorded values, rounded as far as that comes no further off."""
    sample = _sample(state)
    if sample is None:
        return None
    logits_TV, tokens_T, recorded_T = sample
    now = state.configuration

    def distances(temperature: float) -> Tensor:
        from workbench.mismatch.quantities import recorded_quantity

        column_T = recorded_quantity(
            logits_TV,
            tokens_T,
            temperature=temperature,
            sampling=now.sampling,
            logprobs=now.logprobs,
        )
        return torch.log(TINY + (column_T - recorded_T).abs())

    def off(temperature: float) -> float:
        return float(distances(temperature).mean())

    low, high = 0.1, 10.0
    best = now.temperature
    for _ in range(7):  # each round narrows the bracket ninefold: to a relative 1e-6
        grid = torch.logspace(torch.log10(torch.tensor(low)), torch.log10(torch.tensor(high)), 19).tolist()
        best = min(grid, key=off)
        at = grid.index(best)
        low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    reached_T = distances(best)
    for digits in (1, 2, 3, 4):
        rounded = float(f"{best:.{digits}g}")
        if as_near(distances(rounded), reached_T):
            return rounded
    return best


def fitted_truncation(state: State) -> list[tuple[str, float]]:
    """Best value of top_k, of top_p and of min_p, each alone, by name."""
    sample = _sample(state)
    if sample is None:
        return []
    logits_TV, tokens_T, recorded_T = sample
    scaled_TV = logits_TV.double() / state.configuration.temperature
    logprob_TV = torch.log_softmax(scaled_TV, -1)
    own_T = logprob_TV.gather(1, tokens_T[:, None])[:, 0]
    sorted_TV = logprob_TV.exp().sort(dim=-1, descending=True).values
    mass_TV = sorted_TV.cumsum(-1)
    rank_T = (logprob_TV > own_T[:, None]).sum(-1)

    def off(kept_T: Tensor) -> float:
        kept_T = kept_T.clamp(1, sorted_TV.shape[1])
        mass_T = mass_TV.gather(1, kept_T[:, None] - 1)[:, 0] + torch.where(rank_T >= kept_T, own_T.exp(), 0.0)
        return float(torch.log(TINY + (own_T - mass_T.log() - recorded_T).abs()).mean())

    size = sorted_TV.shape[1]
    counts = [k for k in (*range(1, 129), 150, 200, 250, 256, 300, 400, 500, 512, 1000) if k < size]
    by_count = min(counts, key=lambda k: off(torch.full_like(rank_T, k)), default=0)
    masses = [i / 200 for i in range(1, 200)] + [0.999]
    by_mass = min(masses, key=lambda p: off(((mass_TV - sorted_TV) < p).sum(-1)))
    shares = [0.001, 0.002, 0.005, *(i / 100 for i in range(1, 61))]
    by_share = min(shares, key=lambda share: off((sorted_TV >= share * sorted_TV[:, :1]).sum(-1)))
    return [*([("top_k", by_count)] if by_count else []), ("top_p", by_mass), ("min_p", by_share)]


FACTORS = (
    Factor(
        "stale weights", "which weights", ("weights",), _stale, True, "the version of the weights of each completion"
    ),
    Factor(
        "temperature", "divisor of the logits", ("temperature",), _temperature, record="the engine's sampling settings"
    ),
    Factor(
        "truncation",
        "top_k, top_p, min_p",
        ("top_k", "top_p", "min_p", "order"),
        _truncation,
        record="the kept ids of each token",
    ),
    Factor(
        "log-probability mode",
        "raw, scaled or processed",
        ("logprobs",),
        _mode,
        record="the engine's log-probability mode (vLLM: logprobs_mode)",
    ),
    Factor("head precision", "GEMM and logits of the output head", ("head",), _head, record="the engine's head dtype"),
    Factor("trunk precision", "weights and activations", ("precision",), _trunk, record="the engine's dtype"),
    Factor(
        "attention kernel", "kernel of attention", ("attention",), _attention, record="the engine's attention backend"
    ),
    Factor("FP8", "format of the linear layers", ("gemms",), _gemms, record="the engine's quantization"),
    Factor("routes", "experts of each token", ("routes", "router"), _routes, True, "sampler_routes"),
    Factor("LoRA merge", "how the adapter is applied", ("lora",), _lora, record="hashes of the engine's weights"),
    Factor("tokenisation", "ids of the completion", ("tokens",), _tokenisation, True, "sampler_ids"),
    Factor("offset by one", "whose value it is", ("offset",), _offset, True, "one completion's ids with its values"),
    Factor("wrong prefix", "tokens before the completion", ("prefix",), _prefix, True, "the engine's prompt token ids"),
)
"""All factors, in the order of reports."""

BY_NAME = {factor.name: factor for factor in FACTORS}
