"""The planted cases of the set: what is stated, and what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ST, TE, TR, LM = "stale weights", "temperature", "truncation", "log-probability mode"
HP, TP, AK, F8 = "head precision", "trunk precision", "attention kernel", "FP8"
RO, LO, TO, OF, WP = "routes", "LoRA merge", "tokenisation", "offset by one", "wrong prefix"
SIZES = {"s": "small", "m": "medium", "l": "large"}
BF, FH, FL = "bfloat16", "float16", "float32"


@dataclass
class Case:
    """One planted case.

    `trainer` and `sampler` are stated; `planted` has, for each factor, the settings that were in force instead. `mode`
    is how the sampler's recorded values were computed: `cache` (while drawing, padded on the left), `batch` (once more,
    padded on the right), `rows` (once more, one pass a row). `record` lists what else is written: `older`,
    `vocabulary`, `ids`, `routes`, `trainer` (its values), `adapter`.
    """

    id: str
    model: str
    cause: str
    origin: str
    difficulty: str
    planted: dict[str, dict[str, Any]]
    trainer: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    mode: str = "cache"
    record: tuple[str, ...] = ()
    side: str = "sampler"
    undecidable: bool = False

    @property
    def size(self) -> str:
        return SIZES[self.id[0]]


CASES: list[Case] = []


def plant(*values: Any, **named: Any) -> None:
    """Add a case: id, model, cause, origin, difficulty, planted."""
    CASES.append(Case(*values, **named))


# --- one cause, small ---
plant(
    "s01",
    "llama-s",
    "All completions come from the weights of two steps ago.",
    "SkyRL#1680, TRL#5312: a weight update that did not reach the engine",
    "easy",
    {ST: {"weights": "step_2"}},
    record=("older",),
)
plant(
    "s02",
    "moe-s",
    "Trainer and sampler are meant to use temperature 0.8; the engine's default of 1 was in force.",
    "slime#557: temperature lost on the way to the engine",
    "easy",
    {TE: {"temperature": 1.0}},
    trainer={"temperature": 0.8},
    mode="batch",
    sampler={"precision": BF},
)
plant(
    "s03",
    "llama-s",
    "The engine's generation config adds top_k 20, which nobody stated.",
    "vLLM: generation_config.json of the checkpoint overrides the defaults",
    "medium",
    {TR: {"top_k": 20}},
    sampler={"precision": BF},
)
plant(
    "s04",
    "llama-s",
    "The engine recorded raw log-probabilities at temperature 0.7 where processed ones are stated.",
    "vLLM: logprobs_mode=raw_logprobs is the default",
    "medium",
    {LM: {"logprobs": "raw"}},
    trainer={"temperature": 0.7},
)
plant(
    "s05",
    "llama-s",
    "The engine's output head runs in bfloat16 below a float32 trunk.",
    "NeMo#2232, miles: fp32_lm_head off in the engine",
    "medium",
    {HP: {"head": BF}},
    mode="rows",
)
plant(
    "s06",
    "moe-s",
    "The engine loads the mixture in bfloat16 though float32 is stated.",
    "vLLM: dtype=auto casts float32 checkpoints to a half precision",
    "medium",
    {TP: {"precision": BF, "head": BF}},
    mode="rows",
)
plant(
    "s07",
    "llama-s",
    "Both sides state sdpa in bfloat16; the sampler ran eager attention.",
    "transformers falls back to eager where a kernel is missing",
    "hard",
    {AK: {"attention": "eager"}},
    trainer={"precision": BF},
    mode="rows",
)
plant(
    "s08",
    "llama-s",
    "The engine quantises weights and activations to e4m3 by token and output channel on load.",
    "vLLM: quantization=fp8 in a launch script that is shared with serving",
    "medium",
    {F8: {"gemms": "fp8_rowwise"}},
)
plant(
    "s09",
    "moe-s",
    "The engine takes one expert fewer of each token than the checkpoint's config.",
    "num_experts_per_tok overridden on the engine's command line",
    "medium",
    {RO: {"experts": -1}},
)
plant(
    "s10",
    "llama-s",
    "The adapter's update is added twice.",
    "miles#3232: the LoRA delta counted TP times",
    "easy",
    {LO: {"lora": "doubled"}},
    record=("adapter",),
)
plant(
    "s11",
    "llama-s",
    "Completions were decoded to text and encoded again; the engine's own ids are recorded.",
    "rllm#272, ms-swift#10012",
    "easy",
    {TO: {"retokenised": "swap"}},
    record=("ids",),
    sampler={"precision": BF},
)
plant(
    "s12",
    "moe-s",
    "Each value is that of the token before, the first that of the prompt's last token.",
    "ms-swift#8196: log-probabilities one late",
    "easy",
    {OF: {"offset": "before"}},
    sampler={"precision": BF},
)
plant(
    "s13",
    "llama-s",
    "The engine cut the first 3 tokens of each prompt.",
    "max_prompt_length with truncation on the left",
    "easy",
    {WP: {"prefix": ("without_first", 3)}},
    sampler={"precision": BF, "temperature": 0.9},
)
# --- one cause, medium ---
plant(
    "m01",
    "qwen-m",
    "Some completions were begun before the weight update and come from the step before.",
    "AReaL, prime-rl: in-flight weight updates",
    "medium",
    {ST: {"weights": "step_3", "some": 0.4}},
    record=("older",),
    sampler={"precision": BF},
)
plant(
    "m02",
    "qwen-m",
    "The trainer does not divide its logits by the stated temperature 0.75.",
    "verl#3133, NeMo#660",
    "medium",
    {TE: {"temperature": 1.0}},
    trainer={"temperature": 0.75},
    record=("trainer",),
    side="trainer",
    sampler={"precision": BF},
)
plant(
    "m03",
    "mix-m",
    "The engine samples with top_p 0.85 that no setting states.",
    "TRL#6789: values over the nucleus only",
    "medium",
    {TR: {"top_p": 0.85}},
    trainer={"temperature": 0.9},
    sampler={"precision": FH},
)
plant(
    "m04",
    "qwen-m",
    "Values are after the temperature and before top_p, where processed ones are stated.",
    "vLLM RFC #42259: what a log-probability means",
    "medium",
    {LM: {"logprobs": "scaled"}},
    trainer={"temperature": 0.8},
    sampler={"top_p": 0.9},
)
plant(
    "m05",
    "qwen-m",
    "The engine's head runs in bfloat16, log-softmax included; float32 is stated, below a bfloat16 trunk.",
    "prime-rl: fused head kernels in the model's dtype",
    "medium",
    {HP: {"head": "bfloat16_softmax"}},
    sampler={"precision": BF, "head": FL},
    mode="rows",
)
plant(
    "m06",
    "qwen-m",
    "The engine runs in float16, bfloat16 is stated on both sides.",
    "vLLM: dtype=half on cards without bfloat16",
    "medium",
    {TP: {"precision": FH, "head": FH}},
    trainer={"precision": BF},
    mode="rows",
)
plant(
    "m07",
    "mix-m",
    "Both sides state eager attention in bfloat16; the sampler ran sdpa.",
    "attn_implementation is not saved with the checkpoint",
    "hard",
    {AK: {"attention": "sdpa"}},
    trainer={"precision": BF, "attention": "eager"},
    mode="rows",
)
plant(
    "m08",
    "qwen-m",
    "Weights alone are quantised to e4m3 in blocks of 128 x 128.",
    "DeepSeek-style checkpoints that are dequantised on load",
    "medium",
    {F8: {"gemms": "fp8_weights_blockwise"}},
    mode="batch",
)
plant(
    "m09",
    "mix-m",
    "The engine's routes are those of an older router; they are recorded, and own routes are stated.",
    "R3 replay switched off: verl#7340, orphan routers",
    "medium",
    {RO: {"routes_of": "step_1"}},
    record=("routes",),
    mode="batch",
)
plant(
    "m10",
    "qwen-m",
    "The engine serves the base model: the adapter was dropped.",
    "vLLM#51594: lm_head LoRA dropped in prompt_logprobs",
    "easy",
    {LO: {"lora": "dropped"}},
    record=("adapter",),
    sampler={"precision": BF},
)
plant(
    "m11",
    "mix-m",
    "Completions were encoded again from their text; only the vocabulary is at hand.",
    "TRL#5224: tokens of multi-turn rollouts",
    "medium",
    {TO: {"retokenised": "swap"}},
    record=("vocabulary",),
    sampler={"precision": BF},
)
plant(
    "m12",
    "qwen-m",
    "Each value is that of the next token.",
    "prime#606: shift of packed log-probabilities",
    "easy",
    {OF: {"offset": "next"}},
    sampler={"precision": BF, "top_p": 0.95},
)
plant(
    "m13",
    "mix-m",
    "The engine puts a second bos in front of the prompt.",
    "chat template and tokenizer both add bos",
    "medium",
    {WP: {"prefix": ("front", 1)}},
)
# --- one cause, large ---
plant(
    "l01",
    "moe-l",
    "All completions come from the oldest of the checkpoints at hand.",
    "TRL#5312: stale weights after sleep mode",
    "easy",
    {ST: {"weights": "step_2"}},
    record=("older",),
    sampler={"precision": BF},
)
plant(
    "l02",
    "llama-l",
    "The sampler states temperature 0.6 and used 0.7.",
    "two configs of the same service",
    "medium",
    {TE: {"temperature": 0.7}},
    sampler={"temperature": 0.6},
)
plant(
    "l03",
    "llama-l",
    "The sampler states top_k 50 and no truncation was in force.",
    "sampling parameters of the request ignored by a proxy",
    "medium",
    {TR: {"top_k": 0}},
    sampler={"top_k": 50},
    mode="batch",
)
plant(
    "l04",
    "llama-l",
    "The trainer divides log-probabilities by the temperature in place of logits.",
    "NeMo-RL: fused head returns log-probabilities, then / T",
    "medium",
    {LM: {"logprobs": "divided"}},
    trainer={"temperature": 0.7},
    record=("trainer",),
    side="trainer",
    sampler={"precision": BF},
)
plant(
    "l05",
    "llama-l",
    "The engine's head runs in bfloat16; float32 is stated.",
    "verl: engine without fp32 head",
    "medium",
    {HP: {"head": BF}},
    mode="rows",
)
plant(
    "l06",
    "llama-l",
    "The engine's trunk runs in bfloat16 below a float32 head; float32 is stated for both.",
    "MiniMax-M1: only the head was lifted to float32",
    "medium",
    {TP: {"precision": BF, "head": FL}},
    mode="rows",
)
plant(
    "l07",
    "moe-l",
    "Both sides state sdpa in bfloat16; the sampler ran eager attention.",
    "fallback of an attention backend",
    "hard",
    {AK: {"attention": "eager"}},
    trainer={"precision": BF},
    mode="rows",
)
plant(
    "l08",
    "llama-l",
    "The engine quantises its weights to e4m3 with one scale a tensor.",
    "miles#2722: FP8 rollout",
    "medium",
    {F8: {"gemms": "fp8_weights_tensorwise"}},
    mode="rows",
)
plant(
    "l09",
    "moe-l",
    "The engine does not renormalise the gates of the chosen experts.",
    "norm_topk_prob read from a default instead of the config",
    "medium",
    {RO: {"renormalise": False}},
)
plant(
    "l10",
    "llama-l",
    "The adapter is scaled by alpha / sqrt(r) in the engine.",
    "use_rslora not passed on",
    "medium",
    {LO: {"lora": "rslora"}},
    record=("adapter",),
    mode="batch",
)
plant(
    "l11",
    "llama-l",
    "Completions were encoded again from text; the engine's own ids are recorded.",
    "agents that keep text between turns",
    "easy",
    {TO: {"retokenised": "swap"}},
    record=("ids", "vocabulary"),
    sampler={"precision": BF},
)
plant(
    "l12",
    "llama-l",
    "Each value is read from the logits of the token's own position.",
    "labels shifted twice, TRL#5617",
    "easy",
    {OF: {"offset": "own"}},
    sampler={"precision": BF},
)
plant(
    "l13",
    "moe-l",
    "The document before stands in front of each document: packed rows without a mask.",
    "NeMo-RL#2105: cu_seqlens dropped",
    "medium",
    {WP: {"prefix": ("document_before", 0)}},
    mode="batch",
    sampler={"precision": FH},
)
# --- one cause, more of them ---
plant(
    "s14",
    "llama-s",
    "The trainer's values are read from the logits two before the token.",
    "labels shifted twice in the other direction",
    "medium",
    {OF: {"offset": "two_before"}},
    record=("trainer",),
    side="trainer",
    sampler={"precision": BF},
)
plant(
    "s15",
    "llama-s",
    "Both sides state sdpa in bfloat16; the sampler decoded with a cache under eager attention.",
    "engine kernels",
    "hard",
    {AK: {"attention": "eager"}},
    trainer={"precision": BF},
    mode="cache",
    undecidable=True,
)
plant(
    "s16",
    "moe-s",
    "The router of the engine computes in bfloat16 under a float32 trunk.",
    "NeMo-RL#4243, Megatron router dtype",
    "hard",
    {RO: {"router": BF}},
    mode="rows",
)
plant(
    "m14",
    "qwen-m",
    "Completions were encoded again; neither ids nor vocabulary are at hand.",
    "text-only rollout service",
    "hard",
    {TO: {"retokenised": "swap"}},
    undecidable=True,
)
plant(
    "m15",
    "qwen-m",
    "Weights and activations are in mxfp8: blocks of 32 with scales that are powers of two.",
    "Blackwell rollout in MXFP8",
    "hard",
    {F8: {"gemms": "mxfp8"}},
    mode="rows",
)
plant(
    "m16",
    "mix-m",
    "The sampler's min_p 0.05 is in no setting.",
    "default of a chat server",
    "hard",
    {TR: {"min_p": 0.05}},
    sampler={"temperature": 1.1},
)
plant(
    "l14",
    "llama-l",
    "Padding on the left up to the longest prompt is attended to.",
    "attention mask dropped between tokenizer and model",
    "medium",
    {WP: {"prefix": ("padded", 0)}},
    sampler={"precision": BF},
)
plant(
    "l15",
    "llama-l",
    "The adapter was merged on the bfloat16 grid, weights and update cast before they are added.",
    "NeMo-RL#3696: merged W + BA on the bf16 grid",
    "hard",
    {LO: {"lora": "merged_rounded"}},
    trainer={"precision": BF},
    record=("adapter",),
    mode="rows",
)
# --- two causes, small ---
plant(
    "s21",
    "llama-s",
    "Weights of three steps ago, and temperature 1 where 0.8 is stated.",
    "engine restarted from an old snapshot with default parameters",
    "medium",
    {ST: {"weights": "step_1"}, TE: {"temperature": 1.0}},
    trainer={"temperature": 0.8},
    record=("older",),
    sampler={"precision": BF},
)
plant(
    "s22",
    "moe-s",
    "Weights of three steps ago, and each value is that of the next token.",
    "asynchronous rollout with a new exporter",
    "hard",
    {ST: {"weights": "step_1"}, OF: {"offset": "next"}},
    record=("older",),
    sampler={"precision": FH},
)
plant(
    "s23",
    "llama-s",
    "Temperature 0.7 and top_p 0.9 of a generation config, none of them stated.",
    "generation_config.json",
    "hard",
    {TE: {"temperature": 0.7}, TR: {"top_p": 0.9}},
)
plant(
    "s24",
    "llama-s",
    "Raw values where processed ones at 0.6 are stated; the first 2 prompt tokens are missing.",
    "new engine version behind an old client",
    "medium",
    {LM: {"logprobs": "raw"}, WP: {"prefix": ("without_first", 2)}},
    trainer={"temperature": 0.6},
    sampler={"precision": BF},
)
plant(
    "s25",
    "llama-s",
    "Raw values where processed ones at 0.65 are stated, of completions that were encoded again.",
    "text-based agent loop",
    "medium",
    {LM: {"logprobs": "raw"}, TO: {"retokenised": "swap"}},
    trainer={"temperature": 0.65},
    record=("ids",),
    sampler={"precision": FH},
)
plant(
    "s26",
    "moe-s",
    "Completions were encoded again, and the engine kept a top_k of 10 that no setting states.",
    "chat server between trainer and engine",
    "hard",
    {TO: {"retokenised": "swap"}, TR: {"top_k": 10}},
    record=("ids",),
)
plant(
    "s27",
    "llama-s",
    "Trunk in float16 and head in bfloat16, float32 is stated.",
    "engine with a mixed autocast",
    "hard",
    {TP: {"precision": FH, "head": FL}, HP: {"head": BF}},
    mode="rows",
)
plant(
    "s28",
    "llama-s",
    "bfloat16 log-softmax, and the adapter merged on the bfloat16 grid.",
    "merge before the weight sync, fused head kernel",
    "hard",
    {HP: {"head": "bfloat16_softmax"}, LO: {"lora": "merged_rounded"}},
    trainer={"precision": BF, "head": FL},
    record=("adapter",),
    mode="rows",
)
plant(
    "s29",
    "moe-s",
    "bfloat16 where float32 is stated, and the adapter scaled by 1.",
    "vLLM: dtype=auto, adapter without its alpha",
    "medium",
    {TP: {"precision": BF, "head": BF}, LO: {"lora": "unscaled"}},
    record=("adapter",),
    mode="rows",
)
plant(
    "s30",
    "llama-s",
    "Eager attention and a merged adapter in bfloat16, where sdpa and an unmerged one are stated.",
    "merged export served by another backend",
    "hard",
    {AK: {"attention": "eager"}, LO: {"lora": "merged"}},
    trainer={"precision": BF},
    record=("adapter",),
    mode="rows",
)
plant(
    "s31",
    "llama-s",
    "Eager attention in bfloat16, and temperature 0.94 where 1 is stated.",
    "fallback backend with a server-side default",
    "hard",
    {AK: {"attention": "eager"}, TE: {"temperature": 0.94}},
    trainer={"precision": BF},
    mode="rows",
)
plant(
    "s32",
    "llama-s",
    "e4m3 weights and activations in blocks, and an unstated top_p of 0.9.",
    "serving defaults",
    "hard",
    {F8: {"gemms": "fp8_blockwise"}, TR: {"top_p": 0.9}},
    mode="batch",
)
plant(
    "s33",
    "llama-s",
    "e4m3 weights with one scale a tensor, and raw values where processed ones at 0.8 are stated.",
    "FP8 rollout with default logprobs_mode",
    "medium",
    {F8: {"gemms": "fp8_weights_tensorwise"}, LM: {"logprobs": "raw"}},
    trainer={"temperature": 0.8},
    mode="rows",
)
plant(
    "s34",
    "moe-s",
    "One expert more of each token, on weights of two steps ago.",
    "overridden config and a late sync",
    "hard",
    {RO: {"experts": 1}, ST: {"weights": "step_2"}},
    record=("older",),
)
plant(
    "s35",
    "llama-s",
    "The prompt of the next document, and each value is that of the token before.",
    "shuffled join of two tables",
    "hard",
    {OF: {"offset": "before"}, WP: {"prefix": ("prompt_of", 1)}},
    sampler={"precision": BF},
)
# --- two causes, medium ---
plant(
    "m21",
    "qwen-m",
    "Weights of the step before in some completions, and an unstated top_k of 30.",
    "in-flight update, generation config",
    "hard",
    {ST: {"weights": "step_1", "some": 0.6}, TR: {"top_k": 30}},
    record=("older",),
    sampler={"precision": FH},
)
plant(
    "m22",
    "mix-m",
    "Temperature 1 where 0.7 is stated, and each value is read from the token's own position.",
    "hand-written scoring loop",
    "medium",
    {TE: {"temperature": 1.0}, OF: {"offset": "own"}},
    trainer={"temperature": 0.7},
    sampler={"precision": FH},
)
plant(
    "m23",
    "qwen-m",
    "An unstated top_p of 0.8, and the prompt's last token is missing.",
    "stripped newline of the generation prompt",
    "hard",
    {TR: {"top_p": 0.8}, WP: {"prefix": ("without_last", 1)}},
    sampler={"precision": BF},
)
plant(
    "m24",
    "qwen-m",
    "Scaled values in place of raw ones at 0.6, each that of the next token.",
    "engine upgrade",
    "medium",
    {LM: {"logprobs": "scaled"}, OF: {"offset": "next"}},
    sampler={"precision": BF, "temperature": 0.6, "logprobs": "raw"},
)
plant(
    "m25",
    "mix-m",
    "Completions were encoded again, at temperature 0.7 where 1 is stated.",
    "text-only rollout service with its own defaults",
    "medium",
    {TO: {"retokenised": "swap"}, TE: {"temperature": 0.7}},
    record=("ids",),
    sampler={"precision": FH},
)
plant(
    "m26",
    "qwen-m",
    "Head in bfloat16 where float32 is stated, and eager attention for sdpa, in bfloat16.",
    "two engine defaults",
    "hard",
    {HP: {"head": "bfloat16_softmax"}, AK: {"attention": "eager"}},
    trainer={"precision": BF, "head": FL},
    mode="rows",
)
plant(
    "m27",
    "mix-m",
    "Head and router in bfloat16 where float32 is stated.",
    "partial autocast",
    "hard",
    {HP: {"head": BF}, RO: {"router": BF}},
    mode="rows",
)
plant(
    "m28",
    "qwen-m",
    "The engine runs bfloat16 with e4m3 weights by output channel where float32 is stated.",
    "serving image",
    "hard",
    {TP: {"precision": BF, "head": BF}, F8: {"gemms": "fp8_weights_rowwise"}},
    mode="rows",
)
plant(
    "m29",
    "mix-m",
    "Eager attention for sdpa in bfloat16, and one expert fewer of each token.",
    "fallback kernels and an overridden config",
    "hard",
    {AK: {"attention": "eager"}, RO: {"experts": -1}},
    trainer={"precision": BF},
    mode="rows",
)
plant(
    "m30",
    "qwen-m",
    "e4m3 weights by output channel, and temperature 0.85 where 1 is stated.",
    "serving defaults",
    "medium",
    {F8: {"gemms": "fp8_weights_rowwise"}, TE: {"temperature": 0.85}},
)
plant(
    "m31",
    "mix-m",
    "The adapter is dropped, and one expert fewer is taken of each token.",
    "base model served under the adapter's name",
    "hard",
    {RO: {"experts": -1}, LO: {"lora": "dropped"}},
    record=("adapter",),
    sampler={"precision": FH},
)
plant(
    "m32",
    "mix-m",
    "Routes of an older router (recorded), and an unstated top_p of 0.9.",
    "router weights missed by the sync",
    "hard",
    {RO: {"routes_of": "step_1"}, TR: {"top_p": 0.9}},
    record=("routes",),
    mode="batch",
)
plant(
    "m33",
    "qwen-m",
    "The adapter's update is added twice, and raw values where processed ones at 0.75 are stated.",
    "TP bug with default logprobs_mode",
    "medium",
    {LO: {"lora": "doubled"}, LM: {"logprobs": "raw"}},
    trainer={"temperature": 0.75},
    record=("adapter",),
    sampler={"precision": FH},
)
plant(
    "m34",
    "qwen-m",
    "Completions were encoded again, and each value is that of the token before.",
    "text-only service with a shifted export",
    "hard",
    {TO: {"retokenised": "swap"}, OF: {"offset": "before"}},
    record=("ids",),
    sampler={"precision": BF},
)
plant(
    "m35",
    "qwen-m",
    "bfloat16 where float32 is stated, and some completions come from the weights of the step before.",
    "dtype=auto and a late sync",
    "hard",
    {TP: {"precision": BF, "head": BF}, ST: {"weights": "step_3", "some": 0.4}},
    record=("older",),
    mode="rows",
)
# --- two causes, large ---
plant(
    "l21",
    "llama-l",
    "Weights of an older step, and the first token of each prompt is missing.",
    "late sync, bos dropped",
    "hard",
    {ST: {"weights": "step_2"}, WP: {"prefix": ("without_first", 1)}},
    record=("older",),
    sampler={"precision": FH},
)
plant(
    "l22",
    "llama-l",
    "The adapter is dropped, and an unstated min_p of 0.02.",
    "base model on a chat server",
    "hard",
    {TR: {"min_p": 0.02}, LO: {"lora": "dropped"}},
    record=("adapter",),
)
plant(
    "l23",
    "llama-l",
    "Weights of an older step, and raw values where processed ones at 0.7 are stated.",
    "late sync with default logprobs_mode",
    "medium",
    {LM: {"logprobs": "raw"}, ST: {"weights": "step_2"}},
    trainer={"temperature": 0.7},
    record=("older",),
    sampler={"precision": BF},
)
plant(
    "l24",
    "llama-l",
    "Completions were encoded again, and the prompt's first 4 tokens are missing.",
    "context window of a text service",
    "hard",
    {TO: {"retokenised": "swap"}, WP: {"prefix": ("without_first", 4)}},
    record=("ids",),
    sampler={"precision": BF},
)
plant(
    "l25",
    "llama-l",
    "e4m3 weights by output channel, and log-softmax in bfloat16.",
    "FP8 rollout with a fused head",
    "hard",
    {HP: {"head": "bfloat16_softmax"}, F8: {"gemms": "fp8_weights_rowwise"}},
    sampler={"precision": BF, "head": FL},
    mode="rows",
)
plant(
    "l26",
    "moe-l",
    "Trunk in bfloat16 below a float32 head, one expert fewer of each token; float32 is stated.",
    "partial autocast and an overridden config",
    "hard",
    {TP: {"precision": BF, "head": FL}, RO: {"experts": -1}},
    mode="rows",
)
plant(
    "l27",
    "llama-l",
    "float16 and eager attention where bfloat16 and sdpa are stated.",
    "older cards in the rollout pool",
    "hard",
    {AK: {"attention": "eager"}, TP: {"precision": FH, "head": FH}},
    trainer={"precision": BF},
    mode="rows",
)
plant(
    "l28",
    "llama-l",
    "Eager attention for sdpa in bfloat16, on weights of the step before.",
    "fallback kernels and a late sync",
    "hard",
    {AK: {"attention": "eager"}, ST: {"weights": "step_3"}},
    trainer={"precision": BF},
    record=("older",),
    mode="rows",
)
plant(
    "l29",
    "llama-l",
    "e4m3 weights in blocks, and a second bos in front of the prompt.",
    "FP8 rollout behind a chat template",
    "hard",
    {F8: {"gemms": "fp8_weights_blockwise"}, WP: {"prefix": ("front", 1)}},
    mode="batch",
)
plant(
    "l30",
    "moe-l",
    "Gates are not renormalised, at temperature 0.8 where 1 is stated.",
    "config defaults of the engine",
    "hard",
    {RO: {"renormalise": False}, TE: {"temperature": 0.8}},
    sampler={"precision": FH},
)
plant(
    "l31",
    "moe-l",
    "One expert fewer of each token, and the first token of each prompt is missing.",
    "overridden config, bos dropped",
    "hard",
    {RO: {"experts": -1}, WP: {"prefix": ("without_first", 1)}},
)
plant(
    "l32",
    "llama-l",
    "Each value is that of the next token, at temperature 1 where 0.7 is stated.",
    "new exporter with lost parameters",
    "medium",
    {OF: {"offset": "next"}, TE: {"temperature": 1.0}},
    trainer={"temperature": 0.7},
    sampler={"precision": BF},
)
plant(
    "l33",
    "llama-l",
    "Head in bfloat16 where float32 is stated, at temperature 0.99 where 1 is stated.",
    "engine defaults",
    "hard",
    {HP: {"head": BF}, TE: {"temperature": 0.99}},
    mode="rows",
)
plant(
    "l34",
    "moe-l",
    "Completions were encoded again, and each value is that of the next token.",
    "text-only service with a shifted export",
    "hard",
    {TO: {"retokenised": "swap"}, OF: {"offset": "next"}},
    record=("ids",),
    sampler={"precision": BF},
)
