"""Log-probabilities of an inference engine by HTTP: vLLM, SGLang, llama.cpp and what is compatible with OpenAI's API.

An engine scores the tokens of recorded documents as a prompt (`score`), or samples completions of prompts (`sample`).
Tokens are sent as ids: text would be tokenized again. What an engine reports depends on its mode
(`workbench.rollouts.sampling`); scores of a prompt are raw in vLLM and SGLang, whatever the temperature of the request.

Requests go to the address that the caller gives and to no other: redirects are refused.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from workbench.errors import RecordError, SpecError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.engine_responses import Generated, alternative_logprob, completion_logprobs, prompt_logprobs
from workbench.rollouts.places import places_of_each
from workbench.rollouts.sampling import Quantity, Sampling, quantity_of
from workbench.untrusted import parse_json

RESPONSE_BYTES = 2**28
"""Longest response that is read: 256 MiB are a million tokens with 20 alternatives each."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **more: Any) -> None:
        """Refuse: the caller named the address."""
        return


@dataclass(frozen=True)
class EngineClient:
    """An inference engine at an address.

    Attributes:
        url: such as http://localhost:8000.
        kind: vllm (`/v1/completions`), sglang (`/generate`) or llama_cpp (`/completion`, which samples and does not
        score). model: name of the model in requests, for vllm.
        api_key: sent as a bearer token, if given.
        timeout_s: a request that takes longer fails.

    Raises:
        SpecError: an address that is not http or https.
    """

    url: str
    kind: Literal["vllm", "sglang", "llama_cpp"] = "vllm"
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 120.0
    vocabulary_size: int = 2**18
    """Alternatives that are requested of llama.cpp, which returns no more than it has: 2^18 exceeds common
    vocabularies."""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or self.kind not in _PATHS:
            raise SpecError(
                f"an engine {self.kind!r} at {self.url!r}",
                rule=f"an address with http or https, and one of {', '.join(_PATHS)}",
                fix="pass such as EngineClient('http://localhost:8000', 'vllm')",
            )

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token given those before it; 0 for the first.

        Units:  nats.
        Raises: SpecError: no such engine, or one that does not score; RecordError: a response without scores of them.
        """
        more: dict[str, Any]
        match self.kind:
            case "vllm":
                more = {"prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
            case "sglang":
                sampling = {"max_new_tokens": 1, "temperature": 1.0}
                more = {"input_ids": list(tokens), "return_logprob": True, "logprob_start_len": 0}
                more |= {"sampling_params": sampling}
            case "llama_cpp":
                # It has no scores of a prompt: each token is looked up among the alternatives to the one it would draw.
                more = {"n_predict": 1, "n_probs": self.vocabulary_size, "post_sampling_probs": False}
                following = (
                    alternative_logprob(self.url, self._post(more | {"prompt": list(tokens[:at])}), tokens[at])
                    for at in range(1, len(tokens))
                )
                return [0.0, *following]
        return prompt_logprobs(self.url, self._post(more), tokens)

    def sample(
        self,
        tokens: Sequence[int],
        *,
        sampling: Sampling,
        temperature: float,
        max_new_tokens: int,
        seed: int | None = None,
    ) -> Generated:
        """Sample one completion of a prompt.

        Log-probabilities are of the engine's mode (`workbench.rollouts.sampling.ENGINE_MODES`). From llama.cpp, where
        ``sampling`` reports truncated ones, they are those after its samplers, with the tokens that these kept.

        Units:  nats.
        Raises: SpecError: no such engine; RecordError: a response without log-probabilities or ids.
        """
        common: dict[str, Any] = {"temperature": temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        if sampling.top_k is not None or self.kind == "llama_cpp":
            common["top_k"] = sampling.top_k or 0  # llama.cpp's own default is 40, and 0 is none
        if seed is not None:
            common["sampling_seed" if self.kind == "sglang" else "seed"] = seed
        match self.kind:
            case "vllm":
                more = {"prompt": list(tokens), "max_tokens": max_new_tokens, "logprobs": 0}
                more |= {"return_tokens_as_token_ids": True} | common
            case "sglang":
                more = {"input_ids": list(tokens), "return_logprob": True}
                more |= {"sampling_params": {"max_new_tokens": max_new_tokens} | common}
            case "llama_cpp":
                after = sampling.sampler_logprobs == "truncated"
                more = {"prompt": list(tokens), "n_predict": max_new_tokens, "cache_prompt": False}
                more |= {"n_probs": self.vocabulary_size if after else 1, "post_sampling_probs": after} | common
        return completion_logprobs(self.url, self._post(more))[0]

    def _post(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request; return the JSON object of the response."""
        content = json.dumps({**({"model": self.model} if self.model else {}), **body}).encode()
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url.rstrip("/") + _PATHS[self.kind], content, headers)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s) as response:
                text = response.read(RESPONSE_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(500).decode(errors="replace")
            raise _unreachable(request.full_url, f"HTTP {error.code} {error.reason}: {detail}") from None
        except (OSError, ValueError) as error:
            found = getattr(error, "reason", error)
            raise _unreachable(request.full_url, f"{type(error).__name__}: {found}") from None
        if len(text) > RESPONSE_BYTES:
            raise _no_object(request.full_url, f"more than {RESPONSE_BYTES} bytes")
        try:
            value = parse_json(text)
        except ValueError as error:
            raise _no_object(request.full_url, str(error)[:200]) from None
        if not isinstance(value, Mapping):
            raise _no_object(request.full_url, type(value).__name__)
        return value


_PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "llama_cpp": "/completion"}


def score(batch: RolloutBatch, engine: EngineClient, *, mode: str = "raw") -> RolloutBatch:
    """Return a batch whose sampler log-probabilities are an engine's, of the documents' own tokens.

    One request for each document with trained tokens. ``mode`` states what the engine reports of a prompt: raw, unless
    it was started otherwise.

    Raises:
        SpecError: no such engine, another mode; RecordError: a response without scores of these tokens.
    """
    quantity: Quantity = quantity_of(mode)
    scores_T = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for places in places_of_each(batch.document_ids_T).values():
        if batch.loss_mask_T[places].any():
            logprobs = engine.prompt_logprobs(batch.tokens_T[places].tolist())
            scores_T[places] = torch.tensor(logprobs, dtype=torch.float64)
    scores_T = torch.where(batch.loss_mask_T, scores_T, 0.0).to(batch.old_logprobs_T.dtype)
    return replace(batch, sampler_logprobs_T=scores_T, sampling=replace(batch.sampling, sampler_logprobs=quantity))


def _unreachable(url: str, found: str) -> SpecError:
    return SpecError(
        f"a request to {url}",
        found=found,
        rule="an inference engine that answers at this address",
        fix="check address, model name and key, and that the engine has started",
    )


def _no_object(url: str, found: str) -> RecordError:
    return RecordError(f"the response of {url}", found=found, rule="a JSON object", fix="check what serves the address")
