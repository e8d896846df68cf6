"""The distribution from which tokens were sampled, and what the reported log-probabilities are of.

Three log-probabilities of one token, of which an inference engine reports one:

    raw        log softmax(a)[token]                a: logits as the head returns them
    scaled     log softmax(a / temperature)[token]
    truncated  log softmax(a / temperature, over the truncated support)[token] = scaled - log mass

where mass is the probability, after the temperature, of the tokens that top-k, top-p and min-p keep: the truncated
support. An importance ratio of a truncated over a scaled one is wrong by exactly the mass. Without truncation,
truncated is scaled; at temperature 1, scaled is raw.

Source: vLLM's ``logprobs_mode``: raw_logprobs (its default: before penalties and temperature) and processed_logprobs
        (after temperature, top-k and top-p), vllm/v1/sample/sampler.py of v0.20.2; its prompt_logprobs are raw in both
        (`_get_prompt_logprobs_dict`, vllm/v1/worker/gpu_model_runner.py). SGLang: after the temperature and
        before the truncation; before both with SGLANG_RETURN_ORIGINAL_LOGPROB, python/sglang/srt/layers/sampler.py.
        The mass in ratios: huggingface/trl#6789, vllm-project/vllm#42259.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from workbench.errors import ShapeError, SpecError

Quantity = Literal["raw", "scaled", "truncated"]
"""Quantities of a log-probability; see above."""

Order = Literal["transformers", "vllm"]
ORDERS: dict[Order, tuple[str, ...]] = {
    "transformers": ("top_k", "top_p", "min_p"),
    "vllm": ("min_p", "top_k", "top_p"),
}
"""Order in which an engine truncates; each step sees what those before it left, renormalized. transformers 5: logits
processors of `GenerationMixin._get_logits_processor`; vLLM v0.20.2: min_p is a logits processor, top-k and top-p are
applied with the draw (vllm/v1/sample/sampler.py). Alone, each truncates alike in both."""

ENGINE_MODES: dict[str, Quantity] = {
    "raw_logprobs": "raw",
    "processed_logprobs": "truncated",
    "sglang": "scaled",
    "sglang_original": "raw",
    "llama_cpp": "raw",
}
"""Mode of an engine -> the quantity that it reports. llama_cpp: without post_sampling_probs, as measured on its server
(tests/engines/test_llama_cpp.py)."""


@dataclass(frozen=True)
class Sampling:
    """Truncation of the sampler, and the quantities of the recorded log-probabilities.

    Attributes:
        top_k: tokens that are kept at most; None: all.
        top_p: the smallest set of most probable tokens with at least this probability is kept, of those that the steps
            before left, renormalized; 1 keeps all.
        min_p: tokens with at least this share of the largest probability are kept; 0 keeps all.
        order: of the three, by engine.
        sampler_logprobs: what the sampler reported.
        trainer_logprobs: what the log-probabilities of the old and the reference policy are.

    Raises:
        ShapeError: a value outside its range, or another quantity.

    Example:
        >>> Sampling(top_k=20).truncates, Sampling().truncates
        (True, False)
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    sampler_logprobs: Quantity = "scaled"
    trainer_logprobs: Quantity = "scaled"
    order: Order = "transformers"

    def __post_init__(self) -> None:
        if broken := list(self._broken()):
            raise ShapeError(
                "Sampling",
                found="; ".join(broken),
                rule="top_k >= 1 or None, 0 < top_p <= 1, 0 <= min_p <= 1, "
                f"quantities {', '.join(get_args(Quantity))}, orders {', '.join(ORDERS)}",
                fix="give the settings of the sampler; an engine's 0 or -1 for no top-k is None here",
            )

    def _broken(self) -> Iterator[str]:
        if self.top_k is not None and (isinstance(self.top_k, bool) or self.top_k < 1):
            yield f"top_k = {self.top_k}"
        if not 0 < self.top_p <= 1:
            yield f"top_p = {self.top_p}"
        if not 0 <= self.min_p <= 1:
            yield f"min_p = {self.min_p}"
        if self.order not in ORDERS:
            yield f"order = {self.order!r}"
        for name in ("sampler_logprobs", "trainer_logprobs"):
            if getattr(self, name) not in get_args(Quantity):
                yield f"{name} = {getattr(self, name)!r}"

    @property
    def truncates(self) -> bool:
        """True if the sampler drew from less than the whole vocabulary."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, by name."""
        return {name: value for name, value in asdict(self).items() if value != getattr(Sampling, name)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.changed().items()) or "not truncated"


def quantity_of(mode: str) -> Quantity:
    """Return the quantity that a mode of an engine reports, or the quantity itself.

    Raises:
        SpecError: another name; raw or processed logits, which are no log-probabilities.

    Example:
        >>> quantity_of("processed_logprobs"), quantity_of("scaled")
        ('truncated', 'scaled')
    """
    if mode in get_args(Quantity):
        return mode  # type: ignore[return-value]
    if mode in ENGINE_MODES:
        return ENGINE_MODES[mode]
    logits = mode in ("raw_logits", "processed_logits")
    raise SpecError(
        f"log-probabilities of mode {mode!r}",
        found="logits, not log-probabilities: their normalizer is not reported" if logits else "an unknown mode",
        rule=f"one of {', '.join([*get_args(Quantity), *ENGINE_MODES])}",
        fix="start the engine with --logprobs-mode raw_logprobs or processed_logprobs"
        if logits
        else "take one of these",
    )
