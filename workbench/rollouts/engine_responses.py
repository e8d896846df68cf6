"""Log-probabilities in the responses of inference engines: of a prompt's tokens, and of generated ones.

    vLLM         prompt_logprobs of a choice (completions) or of the response (chat): one mapping for each token of the
                 prompt, null for the first; id -> {"logprob": ...}. Generated: logprobs.token_logprobs with the tokens
                 as
                 "token_id:7" (request return_tokens_as_token_ids), or with token_ids (request return_token_ids)
    SGLang       meta_info.input_token_logprobs and output_token_logprobs: [logprob, id, text] of each token
    llama.cpp    completion_probabilities of `/completion`: {"id": ..., "logprob": ...} of each generated token, or,
                 with post_sampling_probs, {"id": ..., "prob": ..., "top_probs": [...]}: probabilities within the
                 truncated support, and its tokens
    OpenAI       logprobs.content of a chat choice; logprobs.tokens and token_logprobs of a completion. Tokens are
                 text, from which ids cannot be read: refused without ids (above) or a tokenizer's vocabulary

A token is checked against its id wherever the response has ids: log-probabilities of other tokens, or one late, are
refused.

Source: vllm/entrypoints/openai (v0.20.2); SGLang docs, native API; llama.cpp tools/server/README.md; OpenAI API
reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from workbench.errors import RecordError
from workbench.rollouts.records import broken

_ID_PREFIX = "token_id:"


class TokenLogprob(NamedTuple):
    """A token of a response.

    Attributes:
        id: vocabulary id.
        logprob: nats; None for the first token of a prompt.
        support: ids from which it was drawn, if the response has them.
    """

    id: int
    logprob: float | None
    support: list[int] | None = None


class Generated(NamedTuple):
    """A generated completion: ids, nats of each, and the ids from which each was drawn, if the response has them."""

    tokens: list[int]
    logprobs: list[float]
    supports: list[list[int]] | None = None


def prompt_logprobs(where: str, response: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Return the log-probability of each token that was sent as the prompt, but for the first, which has none: 0.

    ``where`` begins errors; generated tokens, which engines add, are not read.

    Units:  nats.
    Raises: RecordError: no log-probabilities of the prompt, another number of them, or those of other tokens.
    """
    choice = _choices(where, response)[0]
    if (entries := choice.get("prompt_logprobs", response.get("prompt_logprobs"))) is not None:
        found = [_of_mapping(where, entry, token) for entry, token in zip(entries, tokens, strict=False)]
        count = len(entries)
    elif (entries := _meta(response).get("input_token_logprobs")) is not None:
        found, count = [_of_triple(where, entry) for entry in entries], len(entries)
    else:
        raise broken(
            where,
            "prompt_logprobs, meta_info.input_token_logprobs",
            f"missing; the response has {', '.join(response)}",
            "an engine that scores tokens returns the log-probability of each",
            "request prompt_logprobs: 0 of vLLM, or return_logprob with logprob_start_len: 0 of SGLang",
        )
    if count != len(tokens):
        raise broken(where, "prompt_logprobs", f"{count} tokens", f"the {len(tokens)} tokens that were sent")
    return [0.0, *_values(where, found[1:], tokens[1:], first=1)]


def completion_logprobs(
    where: str, response: Mapping[str, Any], vocabulary: Mapping[str, int] | None = None
) -> list[Generated]:
    """Return the generated tokens of each choice of a response.

    ``vocabulary`` maps the text of a token to its id, for engines that return no ids.

    Units:  nats.
    Raises: RecordError: no log-probabilities, tokens without ids, or a text that stands for no id.
    """
    results = []
    for choice in _choices(where, response):
        found = list(_generated(where, response, choice, vocabulary))
        ids = [token.id for token in found]
        supports = [token.support for token in found if token.support is not None]
        results.append(Generated(ids, _values(where, found, ids), supports if len(supports) == len(ids) else None))
    return results


def records_of_responses(
    lines: Iterable[tuple[str, Any]], vocabulary: Mapping[str, int] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield records of `workbench.load_rollouts` from lines with a request's tokens, its response, and rewards.

    A line has ``prompt_ids`` (the tokens that were sent), ``response`` (what the engine returned) and the further keys
    of a record, such as ``group_id``; ``reward`` and ``advantage`` have one number for each choice. old_logprobs are
    the sampler's, if the line has none.

    Raises:
        RecordError: a line without these, or a response as in `completion_logprobs`.
    """
    for where, line in lines:
        if not isinstance(line, Mapping) or not {"prompt_ids", "response"} <= set(line):
            found = ", ".join(line) if isinstance(line, Mapping) else type(line).__name__
            raise broken(where, "prompt_ids, response", found, "a request's tokens and the engine's response to it")
        if not isinstance(line["response"], Mapping):
            raise broken(where, "response", type(line["response"]).__name__, "the JSON object that the engine returned")
        choices = completion_logprobs(where, line["response"], vocabulary)
        for number, (ids, logprobs, supports) in enumerate(choices):
            more = {key: value for key, value in line.items() if key not in ("prompt_ids", "response")}
            for key in ("reward", "advantage"):
                if isinstance(more.get(key), list):
                    if len(more[key]) != len(choices):
                        raise broken(where, key, f"{len(more[key])} numbers", f"one for each of {len(choices)} choices")
                    more[key] = more[key][number]
            yield (
                f"{where}, choice {number}",
                {
                    "prompt_ids": line["prompt_ids"],
                    "completion_ids": ids,
                    "sampler_logprobs": logprobs,
                    "old_logprobs": logprobs,
                    **({} if supports is None else {"support_ids": supports}),
                    **more,
                },
            )


def _choices(where: str, response: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Choices of an OpenAI-compatible response, or the response itself."""
    if isinstance(response.get("error"), str | Mapping):
        raise broken(where, "error", str(response["error"])[:200], "a response", "read the engine's message")
    choices = response.get("choices", [response])
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, Mapping) for choice in choices):
        raise broken(where, "choices", f"{choices!r}"[:80], "a list of objects, at least one")
    return choices


def _meta(response: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = response.get("meta_info")
    return meta if isinstance(meta, Mapping) else {}


def _generated(
    where: str, response: Mapping[str, Any], choice: Mapping[str, Any], vocabulary: Mapping[str, int] | None
) -> Iterator[TokenLogprob]:
    """Generated tokens of a choice, in whichever form the response has."""
    if (triples := _meta(response).get("output_token_logprobs")) is not None:
        yield from (_of_triple(where, entry) for entry in triples)
        return
    if (entries := response.get("completion_probabilities")) is not None:
        for entry in entries:
            yield _of_llama_cpp(where, entry)
        return
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, Mapping):
        raise broken(
            where,
            "logprobs",
            f"{logprobs!r}"[:80],
            "log-probabilities of the generated tokens",
            "request logprobs: 0 (completions), logprobs: true (chat), or return_logprob (SGLang)",
        )
    if logprobs.get("content") is not None:
        if all(isinstance(entry, Mapping) and "id" in entry for entry in logprobs["content"]):  # llama.cpp
            yield from (_of_llama_cpp(where, entry) for entry in logprobs["content"])
            return
        texts = [entry.get("token") if isinstance(entry, Mapping) else None for entry in logprobs["content"]]
        values = [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in logprobs["content"]]
    else:
        texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    ids = choice.get("token_ids")
    if len(texts) != len(values) or (ids is not None and len(ids) != len(values)):
        given = f"{len(values)} log-probabilities for {len(texts) if ids is None else len(ids)} tokens"
        raise broken(where, "logprobs", given, "one for each token")
    for at, (text, value) in enumerate(zip(texts, values, strict=True)):
        token = _of_text(where, text, vocabulary) if ids is None else _id(where, ids[at])
        yield TokenLogprob(token, _number(where, value))


def _of_text(where: str, text: Any, vocabulary: Mapping[str, int] | None) -> int:
    if isinstance(text, str) and text.startswith(_ID_PREFIX):
        digits = text.removeprefix(_ID_PREFIX)
        if digits.isdecimal():
            return int(digits)
    if vocabulary is not None and text in vocabulary:
        return vocabulary[text]
    rule = "token ids: text does not tell which token it was"
    fix = (
        "request return_tokens_as_token_ids or return_token_ids of vLLM, or pass the engine's vocabulary (text -> id); "
        "llama.cpp's own /completion returns ids"
    )
    raise broken(where, "logprobs, token", f"{text!r}"[:80], rule, fix)


def _of_mapping(where: str, entry: Any, token: int) -> TokenLogprob:
    """A token of vLLM's prompt_logprobs, among the most probable ones of its place."""
    if entry is None:
        return TokenLogprob(token, None)
    if not isinstance(entry, Mapping) or not entry:
        raise broken(where, "prompt_logprobs", f"{entry!r}"[:80], "id -> logprob of each token, null for the first")
    value = entry.get(str(token), entry.get(token))
    if value is None:
        other = next(iter(entry))
        raise broken(where, "prompt_logprobs", f"id {other} where {token} was sent", "the tokens that were sent")
    return TokenLogprob(token, _number(where, value.get("logprob") if isinstance(value, Mapping) else value))


def _of_triple(where: str, entry: Any) -> TokenLogprob:
    """[logprob, id, text] of SGLang."""
    if not isinstance(entry, list) or len(entry) < 2:
        raise broken(where, "token_logprobs", f"{entry!r}"[:80], "[logprob, id, text] of each token")
    return TokenLogprob(_id(where, entry[1]), None if entry[0] is None else _number(where, entry[0]))


def _of_llama_cpp(where: str, entry: Any) -> TokenLogprob:
    """A token with its log-probability before the samplers, or with its probability after them and their support."""
    if not isinstance(entry, Mapping) or "id" not in entry or not {"logprob", "prob"} & set(entry):
        raise broken(where, "completion_probabilities", f"{entry!r}"[:80], "id, and logprob or prob, of each token")
    token = _id(where, entry["id"])
    if "prob" not in entry:
        return TokenLogprob(token, _number(where, entry["logprob"]))
    prob, kept = entry["prob"], entry.get("top_probs")
    if isinstance(prob, bool) or not isinstance(prob, int | float) or not 0 < prob <= 1 + 1e-5:
        raise broken(where, "prob", f"{prob!r}"[:80], "a probability that is not 0")
    if not isinstance(kept, list) or not all(isinstance(other, Mapping) and "id" in other for other in kept):
        raise broken(where, "top_probs", f"{kept!r}"[:80], "the tokens that the samplers kept: request a large n_probs")
    support = sorted(_id(where, other["id"]) for other in kept)
    if token not in support:
        found = f"{len(support)} tokens without {token}, which was drawn"
        fix = "request n_probs of the vocabulary's size"
        raise broken(where, "top_probs", found, "all tokens that the samplers kept", fix)
    return TokenLogprob(token, min(0.0, math.log(prob)), support)


def alternative_logprob(where: str, response: Mapping[str, Any], token: int) -> float:
    """Return the log-probability of any token at the one place that llama.cpp generated, before its samplers.

    Units:  nats.
    Raises: RecordError: the token is not among the alternatives of the response.
    """
    entries = response.get("completion_probabilities")
    if isinstance(entries, list) and len(entries) >= 1 and isinstance(entries[0], Mapping):
        for other in entries[0].get("top_logprobs") or []:
            if isinstance(other, Mapping) and other.get("id") == token:
                return _number(where, other.get("logprob"))
    rule = "the log-probability of every token of the vocabulary"
    raise broken(where, "top_logprobs", f"none of token {token}", rule, "request n_probs of the vocabulary's size")


def _id(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise broken(where, "token id", f"{value!r}"[:80], "a whole number from 0")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-4:
        found = f"{value!r}"[:80]
        if isinstance(value, float) and value > 1e-4:
            found += ": these may be logits (vLLM: raw_logits, processed_logits)"
        raise broken(where, "logprob", found, "a finite number that is at most 0")
    return float(value)


def _values(where: str, found: Sequence[TokenLogprob], tokens: Sequence[int], first: int = 0) -> list[float]:
    """Log-probabilities of tokens that were sent, or their own."""
    values: list[float] = []
    for at, (entry, token) in enumerate(zip(found, tokens, strict=True), start=first):
        if entry.id != token:
            raise _other_token(where, at, entry.id, token)
        if entry.logprob is None:
            raise broken(f"{where}, token {at}", "logprob", "null", "only the first token of a prompt has none")
        values.append(entry.logprob)
    return values


def _other_token(where: str, at: int, found: int, token: int) -> RecordError:
    return broken(
        f"{where}, token {at}",
        "token id",
        f"{found} where {token} was sent",
        "log-probabilities are those of the tokens that were sent, in their order",
        "send token ids, not text, so that the engine does not tokenize again or add a start token",
    )
