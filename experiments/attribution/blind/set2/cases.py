"""The planted cases of the set: what is said of each, and what makes it.

``python cases.py`` writes ``causes.yaml`` and ``expected.yaml``; ``measure.py`` adds ``moved`` and ``noise``.
A case has what both sides state, and its factors: what one side truly does in place of what is stated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SIZES = {
    "pebble": "small",
    "gravel": "small",
    "creek": "medium",
    "delta": "medium",
    "ridge": "large",
    "massif": "large",
}

STALE, TEMP, TRUNC, MODE = "stale weights", "temperature", "truncation", "log-probability mode"
HEAD, TRUNK, ATTN, FP8 = "head precision", "trunk precision", "attention kernel", "FP8"
ROUTES, LORA, TOKENS, OFFSET, PREFIX = "routes", "LoRA merge", "tokenisation", "offset by one", "wrong prefix"


@dataclass(frozen=True)
class Factor:
    """What one side truly does: settings in place of the stated ones, in all documents or in a share of them."""

    name: str
    true: dict[str, Any]
    side: str = "sampler"
    some: float = 1.0


@dataclass(frozen=True)
class Case:
    """A case: what is stated, what is true, and how the sampler computes."""

    id: str
    model: str
    factors: tuple[Factor, ...]
    cause: str = ""
    origin: str = ""
    difficulty: str = "medium"
    trainer: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    how: str = "cache"
    n: int | None = None
    recorded: bool = False  # the trainer's values are in the record
    undecidable: bool = False
    older: bool = False  # older checkpoints are listed although none was used

    @property
    def size(self) -> str:
        return SIZES[self.model]


def f(name: str, side: str = "sampler", some: float = 1.0, **true: Any) -> Factor:
    return Factor(name, true, side, some)


BF, HALF = {"precision": "bfloat16"}, {"precision": "float16"}
BOTH_BF = {"trainer": BF}
HEAD32 = {"trainer": {"precision": "bfloat16", "head": "float32"}}
ROWS = {"how": "rows"}

CASES: list[Case] = []


def case(id: str, model: str, factors: Factor | list[Factor], cause: str, origin: str, difficulty: str, **more: Any):
    listed = tuple(factors) if isinstance(factors, list) else (factors,)
    more.setdefault("recorded", any(one.side == "trainer" for one in listed))
    CASES.append(Case(id, model, listed, cause, origin, difficulty, **more))


# --- singles: small -----------------------------------------------------------------------------------------------
case(
    "s01-stale",
    "pebble",
    f(STALE, older="v5"),
    "The engine never received the last two updates and still has v5.",
    "asynchronous training: a weight update that the engine skips under load",
    "easy",
    sampler=BF,
)
case(
    "s02-temperature",
    "gravel",
    f(TEMP, temperature=0.85),
    "The engine's generation_config.json sets a temperature of 0.85; the request says 1.",
    "vLLM takes default sampling parameters from the checkpoint's generation_config.json",
    "easy",
)
case(
    "s03-truncation",
    "pebble",
    f(TRUNC, top_p=0.92),
    "The engine cuts at top_p 0.92, which is stated nowhere.",
    "default sampling parameters of a checkpoint's generation_config.json",
    "medium",
    sampler=BF,
    how="padded",
)
case(
    "s04-mode",
    "pebble",
    f(MODE, logprobs="raw"),
    "The engine draws at 0.75 and returns log-probabilities of the raw logits.",
    "vLLM V1: logprobs_mode is raw_logprobs by default",
    "medium",
    sampler={"temperature": 0.75},
)
case(
    "s05-head",
    "pebble",
    f(HEAD, head="bfloat16"),
    "The head's GEMM and logits are in bfloat16 on a trunk in float32.",
    "MiniMax-M1 report: precision of the head separates training from inference",
    "medium",
    **ROWS,
)
case(
    "s06-trunk",
    "gravel",
    f(TRUNK, precision="bfloat16"),
    "The engine has loaded the mixture in bfloat16; float32 was asked for.",
    "dtype auto of an engine follows config.json",
    "medium",
    **ROWS,
)
case(
    "s07-attention",
    "pebble",
    f(ATTN, attention="eager"),
    "The engine scores with eager attention; both are meant to use sdpa.",
    "an attn_implementation that falls back when a kernel is not installed",
    "hard",
    **BOTH_BF,
    **ROWS,
)
case(
    "s08-fp8",
    "pebble",
    f(FP8, gemms="fp8_rowwise"),
    "The engine quantises linear layers to e4m3 by rows and tokens.",
    "vLLM quantization=fp8 left on from serving",
    "easy",
    sampler={"temperature": 0.8},
)
case(
    "s09-routes",
    "gravel",
    f(ROUTES, experts=-1),
    "The engine takes one expert a token instead of two.",
    "an override of num_experts_per_tok to serve faster",
    "easy",
    how="padded",
)
case(
    "s10-lora",
    "pebble",
    f(LORA, lora="dropped"),
    "The adapter is not loaded: the engine serves the base model.",
    "a request without its LoRARequest",
    "easy",
    sampler=BF,
)
case(
    "s11-tokens",
    "gravel",
    f(TOKENS, tokens="merged", evidence="ids"),
    "The trainer tokenised the completion's text again, which merges pieces; the ids of the engine are in the record.",
    "retokenization drift of agent frameworks that pass text",
    "easy",
)
case(
    "s12-offset",
    "pebble",
    f(OFFSET, offset="next"),
    "Each token has the value of the token that follows; the last has that of the stop token, which is stripped.",
    "slices of prompt_logprobs, whose first entry is None",
    "easy",
    how="padded",
    sampler=BF,
)
case(
    "s13-prefix",
    "gravel",
    f(PREFIX, prefix=("front", 1)),
    "The engine puts a second bos in front of the prompt.",
    "chat template with bos and a tokeniser that adds special tokens",
    "medium",
)
# --- singles: medium ----------------------------------------------------------------------------------------------
case(
    "m01-stale",
    "creek",
    f(STALE, older="v6", some=0.5),
    "Half of the completions were drawn before the weights of the last update arrived.",
    "PipelineRL, AReaL: updates in flight",
    "medium",
    recorded=True,
)
case(
    "m02-temperature",
    "creek",
    f(TEMP, temperature=1.15),
    "The engine draws at 1.15; the settings say 1.",
    "a sampling configuration of exploration that was not passed on to the trainer",
    "easy",
    sampler=BF,
)
case(
    "m03-truncation",
    "delta",
    f(TRUNC, top_k=25),
    "The engine cuts at top_k 25; no truncation is stated.",
    "defaults of generate: transformers had top_k 50",
    "easy",
    how="padded",
)
case(
    "m04-mode",
    "creek",
    f(MODE, logprobs="divided"),
    "Log-probabilities are divided by the temperature, in place of logits.",
    "a loss that divides what log_softmax gave",
    "medium",
    sampler={"temperature": 0.8},
)
case(
    "m05-head",
    "delta",
    f(HEAD, head="bfloat16"),
    "The head is meant to be in float32 on the bfloat16 trunk; the engine left it in bfloat16.",
    "a float32 head that is switched on in the trainer only",
    "hard",
    **HEAD32,
    **ROWS,
)
case(
    "m06-trunk",
    "creek",
    f(TRUNK, precision="float16"),
    "The engine computes in float16; bfloat16 is stated on both sides.",
    "arXiv 2510.26788: float16 for both sides, changed on one",
    "medium",
    **BOTH_BF,
    **ROWS,
)
case(
    "m07-attention",
    "delta",
    f(ATTN, attention="sdpa"),
    "Eager attention is stated for both, and the engine scores with sdpa.",
    "an attn_implementation that is read by the trainer alone",
    "hard",
    trainer={"precision": "bfloat16", "attention": "eager"},
    **ROWS,
)
case(
    "m08-fp8",
    "creek",
    f(FP8, gemms="fp8_blockwise"),
    "The engine's linear layers are in e4m3 in blocks, as DeepSeek-V3 has them.",
    "block FP8 rollouts of verl and slime",
    "easy",
    sampler={"temperature": 0.9},
)
case(
    "m09-routes",
    "delta",
    f(ROUTES, renorm=True),
    "The engine renormalises the gates of the two experts; the model does not.",
    "a fused MoE kernel whose renormalize is left at its default",
    "medium",
)
case(
    "m10-lora",
    "creek",
    f(LORA, lora="alpha / sqrt(r)"),
    "The engine scales the adapter by alpha / sqrt(r).",
    "PEFT's use_rslora, not written into the adapter's config",
    "medium",
    sampler=BF,
)
case(
    "m11-tokens",
    "creek",
    f(TOKENS, tokens="merged", evidence="vocabulary"),
    "The trainer tokenised the text again; only the vocabulary is in the record.",
    "chat endpoints that return text",
    "hard",
)
case(
    "m12-offset",
    "delta",
    f(OFFSET, side="trainer", offset="own"),
    "The trainer scores each token by the logits of its own position.",
    "labels that were shifted before a loss that shifts no more",
    "easy",
    sampler=BF,
)
case(
    "m13-prefix",
    "creek",
    f(PREFIX, prefix=("keep_last", 7)),
    "The engine truncates prompts to their last 7 tokens.",
    "vLLM truncate_prompt_tokens, TRL max_prompt_length",
    "medium",
    how="kernel",
)
# --- singles: large -----------------------------------------------------------------------------------------------
case(
    "l01-stale",
    "massif",
    f(STALE, older="v6"),
    "The engine is one update behind, with a mixture.",
    "one-step-off-policy training",
    "medium",
)
case(
    "l02-temperature",
    "ridge",
    f(TEMP, side="trainer", temperature=1.0),
    "Both know of 0.7; the trainer recorded its values without the division.",
    "old log-probabilities of a trainer that forgets the sampler's temperature",
    "medium",
    trainer={"temperature": 0.7},
)
case(
    "l03-truncation",
    "ridge",
    f(TRUNC, top_p=1.0),
    "top_p 0.85 is stated, and the engine ignores it.",
    "an engine whose fast sampling path has no top_p",
    "medium",
    sampler={"top_p": 0.85, "precision": "bfloat16"},
)
case(
    "l04-mode",
    "ridge",
    f(MODE, logprobs="scaled"),
    "Values after truncation are stated; the engine returns those after the temperature alone.",
    "vLLM logprobs_mode processed_logprobs asked for, an older engine at work",
    "medium",
    sampler={"temperature": 0.9, "top_k": 30},
    how="padded",
)
case(
    "l05-head",
    "ridge",
    f(HEAD, head="bfloat16_softmax"),
    "The engine's log-softmax is in bfloat16 over bfloat16 logits.",
    "log_softmax of logits that nobody lifted to float32",
    "medium",
    **BOTH_BF,
    **ROWS,
)
case(
    "l06-trunk",
    "ridge",
    f(TRUNK, precision="bfloat16", head="float32_masters"),
    "The engine's trunk is in bfloat16 under a float32 head; both are stated in float32.",
    "autocast around the trunk alone",
    "medium",
    **ROWS,
)
case(
    "l07-attention",
    "massif",
    f(ATTN, attention="eager"),
    "The engine scores a mixture with eager attention; sdpa is meant.",
    "a mask that sdpa's fast kernel does not take",
    "hard",
    **BOTH_BF,
    **ROWS,
)
case(
    "l08-fp8",
    "massif",
    f(FP8, gemms="fp8_weights_rowwise"),
    "The engine stores all weights but the head in e4m3, experts as well, and computes in float32.",
    "weight-only FP8 checkpoints",
    "medium",
    how="padded",
)
case(
    "l09-routes",
    "massif",
    f(ROUTES, bias=0.6),
    "The engine has biases that steer the router's choice alone and records its routes; the trainer knows neither.",
    "rollout routing replay (arXiv 2510.11370) that is recorded and not switched on",
    "medium",
    **ROWS,
)
case(
    "l10-lora",
    "ridge",
    f(LORA, lora="doubled"),
    "The adapter was merged into weights that the engine adds it to again.",
    "merged weights are sent while the adapter stays loaded",
    "easy",
)
case(
    "l11-tokens",
    "ridge",
    f(TOKENS, tokens="split", evidence="ids"),
    "The trainer's tokeniser lacks some words and splits what the engine drew whole; the engine's ids are recorded.",
    "a tokeniser that was extended in the engine's folder only",
    "easy",
    how="padded",
)
case(
    "l12-offset",
    "massif",
    f(OFFSET, offset="previous"),
    "Each token has the value of the token before.",
    "a slice that begins at the prompt's last token",
    "easy",
    how="padded",
)
case(
    "l13-prefix",
    "ridge",
    f(PREFIX, prefix=("drop_first", 3), some=0.5),
    "In half of the completions the first three tokens of the prompt are missing in the engine.",
    "prompts that exceed a limit of the engine in some requests",
    "hard",
    sampler=BF,
)
# --- further singles ----------------------------------------------------------------------------------------------
case(
    "s14-fp8",
    "pebble",
    f(FP8, gemms="fp8_weights_tensorwise"),
    "The engine stores the weights of linear layers in e4m3 with one scale a tensor.",
    "vLLM's per-tensor FP8",
    "medium",
    how="padded",
)
case(
    "s15-tokens",
    "pebble",
    f(TOKENS, tokens="merged", evidence=None),
    "The text was tokenised again; neither the engine's ids nor a vocabulary are recorded.",
    "logs that keep ids of the trainer alone",
    "hard",
    undecidable=True,
)
case(
    "s16-prefix",
    "pebble",
    f(PREFIX, prefix=("padding", 0)),
    "Prompts are padded on the left with pad and the padding is attended to.",
    "generate without an attention_mask",
    "medium",
    sampler=BF,
)
case(
    "m14-prefix",
    "delta",
    f(PREFIX, side="trainer", prefix=("document", 0)),
    "The trainer packs two documents in a row and attention reaches into the document before.",
    "packing without a block mask",
    "medium",
)
case(
    "m15-trunk",
    "creek",
    f(TRUNK, precision="float32"),
    "bfloat16 is stated for the engine, which computes in float32.",
    "a CPU fallback of an engine",
    "hard",
    sampler=BF,
    **ROWS,
)
case(
    "m16-truncation",
    "creek",
    f(TRUNC, min_p=0.02),
    "The engine cuts at min_p 0.02.",
    "a server-side default",
    "medium",
    recorded=True,
)
case(
    "l14-routes",
    "massif",
    f(ROUTES, router="bfloat16"),
    "The router's GEMM is in bfloat16 in the engine.",
    "Megatron's moe-router-dtype fp32, in the trainer alone",
    "hard",
    how="padded",
)
case(
    "l15-attention",
    "ridge",
    f(ATTN, attention="eager"),
    "Values come from a cache under eager attention in bfloat16.",
    "engines with kernels of their own",
    "hard",
    **BOTH_BF,
    how="cache",
    undecidable=True,
)

# --- pairs: small -------------------------------------------------------------------------------------------------
case(
    "sp01",
    "pebble",
    [f(STALE, older="v5"), f(TEMP, temperature=0.8)],
    "Two updates behind, and a temperature of 0.8 that is stated nowhere.",
    "two bugs of one launcher",
    "easy",
)
case(
    "sp02",
    "gravel",
    [f(STALE, older="v5"), f(OFFSET, side="trainer", offset="previous")],
    "The engine is two updates behind; the trainer's values are those of the token before.",
    "a skipped sync and a slice that begins too early",
    "medium",
)
case(
    "sp03",
    "pebble",
    [f(TEMP, temperature=1.2), f(PREFIX, prefix=("drop_last", 2), some=0.5)],
    "The engine draws at 1.2 and half of its prompts lack their last two tokens.",
    "a template without its generation prompt, in one of two workers",
    "medium",
    how="padded",
)
case(
    "sp04",
    "pebble",
    [f(TRUNC, top_k=12), f(LORA, lora="alpha")],
    "The engine cuts at top_k 12 and scales the adapter by alpha alone.",
    "a rewritten LoRA loader",
    "medium",
    sampler=BF,
)
case(
    "sp05",
    "gravel",
    [f(MODE, logprobs="raw"), f(ROUTES, renorm=True)],
    "The engine returns raw log-probabilities at 0.7 and renormalises its gates.",
    "engine defaults",
    "medium",
    sampler={"temperature": 0.7},
)
case(
    "sp06",
    "pebble",
    [f(HEAD, head="bfloat16"), f(ATTN, attention="eager")],
    "The head is in bfloat16 in place of float32, and attention is eager.",
    "an engine without its patches",
    "hard",
    **HEAD32,
    **ROWS,
)
case(
    "sp07",
    "pebble",
    [f(TRUNK, precision="bfloat16"), f(FP8, gemms="fp8_rowwise")],
    "An FP8 engine in bfloat16, where a float32 one was meant.",
    "a serving configuration",
    "medium",
    **ROWS,
)
case(
    "sp08",
    "pebble",
    [f(TOKENS, tokens="merged", evidence="ids"), f(TEMP, temperature=0.7)],
    "The text is tokenised again and the engine draws at 0.7.",
    "an agent's chat endpoint with its defaults",
    "medium",
)
case(
    "sp09",
    "gravel",
    [f(TOKENS, tokens="merged", evidence="ids"), f(STALE, older="v5")],
    "The text is tokenised again and weights are two updates old.",
    "asynchronous agents",
    "medium",
    how="padded",
    sampler={"temperature": 1.1},
)
case(
    "sp10",
    "gravel",
    [f(PREFIX, prefix=("front", 1)), f(ROUTES, experts=1)],
    "A second bos, and one expert a token more.",
    "a foreign serving setup of a mixture",
    "medium",
)
case(
    "sp11",
    "pebble",
    [f(FP8, gemms="fp8_weights_tensorwise"), f(TRUNC, top_p=0.95)],
    "FP8 weights with one scale a tensor, and top_p 0.95.",
    "served checkpoint with its generation config",
    "medium",
    sampler={"temperature": 0.9},
)
case(
    "sp12",
    "pebble",
    [f(OFFSET, side="trainer", offset="previous"), f(LORA, lora="dropped")],
    "The engine lacks the adapter and the trainer's values are those of the token before.",
    "two mistakes of a fresh port",
    "medium",
    sampler=BF,
)
case(
    "sp13",
    "gravel",
    [f(MODE, logprobs="raw"), f(PREFIX, prefix=("drop_first", 2))],
    "Raw log-probabilities at 1.3, and the first two tokens of each prompt missing.",
    "a hand-written client",
    "medium",
    sampler={"temperature": 1.3},
    how="padded",
)
# --- pairs: medium ------------------------------------------------------------------------------------------------
case(
    "mp01",
    "creek",
    [f(STALE, older="v5"), f(PREFIX, prefix=("padding", 2), some=0.5)],
    "Two updates old; half of the completions attend to padding of eos.",
    "generate with pad = eos",
    "hard",
)
case(
    "mp02",
    "creek",
    [f(TEMP, temperature=0.75), f(OFFSET, offset="next")],
    "The engine draws at 0.75 and its values are shifted by one token.",
    "a wrapper around an engine",
    "easy",
    how="padded",
    sampler=BF,
)
case(
    "mp03",
    "creek",
    [f(TRUNC, top_p=0.99), f(HEAD, head="bfloat16")],
    "top_p 0.99, and a head in bfloat16 on a float32 trunk.",
    "defaults of an engine",
    "hard",
    **ROWS,
)
case(
    "mp04",
    "delta",
    [f(TRUNC, top_k=20), f(ROUTES, experts=1)],
    "top_k 20, and a third expert a token.",
    "a serving setup",
    "medium",
    sampler={"temperature": 0.9},
)
case(
    "mp05",
    "creek",
    [f(MODE, logprobs="raw"), f(FP8, gemms="fp8_blockwise")],
    "Raw log-probabilities at 0.9 of an engine in block FP8.",
    "vLLM defaults with block FP8",
    "medium",
    sampler={"temperature": 0.9},
)
case(
    "mp06",
    "creek",
    [f(ATTN, attention="eager"), f(LORA, lora="merged_rounded")],
    "Eager attention, and an adapter merged in bfloat16.",
    "merge_and_unload of a bfloat16 model",
    "hard",
    **BOTH_BF,
    **ROWS,
)
case(
    "mp07",
    "delta",
    [f(TRUNK, precision="bfloat16"), f(STALE, older="v6", some=0.5)],
    "bfloat16 in place of float32, and half of the completions one update old.",
    "updates in flight",
    "hard",
    **ROWS,
)
case(
    "mp08",
    "creek",
    [f(TOKENS, tokens="merged", evidence="ids"), f(PREFIX, prefix=("front", 1))],
    "Completions are tokenised again and the engine has a second bos.",
    "a chat endpoint",
    "medium",
    sampler=BF,
)
case(
    "mp09",
    "delta",
    [f(TOKENS, tokens="split", evidence="ids"), f(MODE, logprobs="raw")],
    "The trainer splits words and the engine returns raw values at 0.6.",
    "a tokeniser of another version",
    "medium",
    sampler={"temperature": 0.6},
)
case(
    "mp10",
    "delta",
    [f(HEAD, head="bfloat16"), f(ROUTES, router="bfloat16")],
    "The head and the router are in bfloat16 in a float32 engine.",
    "module-wise casts of a mixture",
    "hard",
    **ROWS,
)
case(
    "mp11",
    "creek",
    [f(LORA, lora="doubled"), f(TEMP, temperature=0.9)],
    "The adapter is added twice and the engine draws at 0.9.",
    "merged and loaded",
    "medium",
    sampler=BF,
)
case(
    "mp12",
    "delta",
    [f(OFFSET, side="trainer", offset="next"), f(ROUTES, experts=-1)],
    "The trainer's values are one token late; the engine takes one expert less.",
    "a fresh port",
    "medium",
)
case(
    "mp13",
    "creek",
    [f(FP8, gemms="fp8_weights_blockwise"), f(PREFIX, prefix=("end", 2))],
    "Weight-only block FP8, and an eos at the prompt's end.",
    "prompts tokenised with a closing eos",
    "medium",
)
case(
    "mp14",
    "creek",
    [f(TRUNK, precision="bfloat16"), f(TRUNC, min_p=0.01)],
    "bfloat16 in place of float32, and min_p 0.01.",
    "engine defaults",
    "hard",
    **ROWS,
)
# --- pairs: large -------------------------------------------------------------------------------------------------
case(
    "lp01",
    "ridge",
    [f(STALE, older="v5"), f(MODE, logprobs="raw")],
    "Two updates old, and raw values at 0.85.",
    "asynchronous vLLM",
    "medium",
    sampler={"temperature": 0.85},
)
case(
    "lp02",
    "massif",
    [f(STALE, older="v6"), f(ROUTES, experts=-1)],
    "One update old, and two experts a token in place of three.",
    "a cheaper rollout",
    "medium",
)
case(
    "lp03",
    "ridge",
    [f(TEMP, temperature=0.9), f(FP8, gemms="fp8_rowwise")],
    "0.9 in place of 1, and an FP8 engine.",
    "FP8 rollouts with a served configuration",
    "medium",
    how="padded",
)
case(
    "lp04",
    "ridge",
    [f(TRUNC, top_k=15), f(PREFIX, prefix=("keep_last", 6))],
    "top_k 15, and prompts of 6 tokens at most.",
    "limits of a server",
    "medium",
    how="kernel",
    sampler=BF,
)
case(
    "lp05",
    "massif",
    [f(OFFSET, side="trainer", offset="two"), f(PREFIX, prefix=("next", 0), some=0.4)],
    "The trainer's logits are shifted twice; two of five completions answer the next document's prompt.",
    "a gather of requests in another order",
    "hard",
)
case(
    "lp06",
    "ridge",
    [f(HEAD, head="bfloat16"), f(LORA, lora="merged_rounded")],
    "The head is in bfloat16 in place of float32, and the adapter was merged in bfloat16.",
    "a merged export",
    "hard",
    **HEAD32,
    **ROWS,
)
case(
    "lp07",
    "ridge",
    [f(TRUNK, precision="bfloat16"), f(TEMP, temperature=0.97)],
    "bfloat16 in place of float32, and a temperature of 0.97.",
    "a sweep's leftover",
    "hard",
    **ROWS,
)
case(
    "lp08",
    "massif",
    [f(ATTN, attention="eager"), f(HEAD, head="bfloat16")],
    "Eager attention, and a head in bfloat16 in place of float32.",
    "an engine without patches",
    "hard",
    **HEAD32,
    **ROWS,
)
case(
    "lp09",
    "ridge",
    [f(TOKENS, tokens="merged", evidence="ids"), f(LORA, lora="dropped")],
    "Text tokenised again, from an engine without the adapter.",
    "a chat endpoint of the base model",
    "medium",
    sampler=BF,
)
case(
    "lp10",
    "massif",
    [f(TOKENS, tokens="merged", evidence="vocabulary"), f(ROUTES, renorm=False)],
    "Text tokenised again, and gates that are not renormalised.",
    "a chat endpoint of a mixture",
    "hard",
)
case(
    "lp11",
    "massif",
    [f(TRUNK, precision="float16"), f(ROUTES, router="bfloat16")],
    "A float16 trunk in place of float32, with a router in bfloat16.",
    "float16 rollouts of a mixture",
    "hard",
    **ROWS,
)
case(
    "lp12",
    "massif",
    [f(FP8, gemms="fp8_weights_rowwise"), f(HEAD, head="bfloat16")],
    "Weight-only FP8, experts as well, and the head's GEMM and logits in bfloat16.",
    "a served bfloat16 checkpoint",
    "hard",
    **ROWS,
)
case(
    "lp13",
    "ridge",
    [f(OFFSET, offset="previous"), f(MODE, logprobs="raw")],
    "Values of the token before, and raw ones at 0.6.",
    "a client of prompt_logprobs",
    "medium",
    sampler={"temperature": 0.6},
    how="padded",
)
case(
    "lp14",
    "ridge",
    [f(ATTN, attention="eager"), f(FP8, gemms="fp8_weights_rowwise")],
    "Eager attention, and weight-only FP8.",
    "a debugging engine",
    "hard",
    **BOTH_BF,
    **ROWS,
)

SECOND = {  # a second reading that is the same statement
    # without the division by the stated temperature, a trainer's values are raw values: it draws nothing that decides
    "l02-temperature": [[TEMP], [MODE]],
}


def write(folder: Path, measured: dict[str, dict[str, Any]] | None = None) -> None:
    """Write ``causes.yaml`` and ``expected.yaml``."""
    rows = []
    for one in CASES:
        row: dict[str, Any] = {"id": one.id, "size": one.size, "factors": [part.name for part in one.factors]}
        row |= {"cause": one.cause, "origin": one.origin, "difficulty": one.difficulty}
        if one.undecidable:
            row["undecidable"] = True
        rows.append(row | (measured or {}).get(one.id, {}))
    (folder / "causes.yaml").write_text(yaml.safe_dump(rows, sort_keys=False, width=118, allow_unicode=True))
    readings = {one.id: SECOND.get(one.id, [part.name for part in one.factors]) for one in CASES}
    (folder / "expected.yaml").write_text(yaml.safe_dump(readings, sort_keys=False, default_flow_style=None, width=118))


if __name__ == "__main__":
    write(Path(__file__).parent)
