"""The client against a local HTTP server with recorded or documented responses; a real engine: tests/engines."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.unit.rollouts.test_engine_responses import LLAMA_CPP, PROMPT, SGLANG, VLLM, response
from workbench.errors import RecordError, SpecError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.engine_client import EngineClient, score
from workbench.rollouts.sampling import Sampling


@contextmanager
def served(answer, status=200, location=None):
    """Address of a server that gives one answer to each request, and the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, body, self.headers.get("Authorization")))
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("kind", "engine"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_recorded_documents_are_scored_as_ids(kind, engine):
    document = {"tokens": PROMPT, "loss_mask": [0, 0, 1, 1], "advantages": 1.0, "old_logprobs": [0, 0, -1.0, -1.0]}
    batch = RolloutBatch.from_documents([document, document | {"loss_mask": [0] * 4}])
    with served(response(engine, "scored")) as (address, requests):
        scored = score(batch, EngineClient(address, kind, model="tiny", api_key="secret"))
    assert scored.sampler_logprobs_T.tolist() == [0.0, 0.0, -0.75, -1.25, 0.0, 0.0, 0.0, 0.0]
    assert scored.sampling.sampler_logprobs == "raw"
    [(path, body, key)] = requests
    assert path == engine["calls"]["scored"]["path"]
    assert body["prompt" if kind == "vllm" else "input_ids"] == PROMPT
    assert body["model"] == "tiny"
    assert key == "Bearer secret"
    assert body.get("prompt_logprobs", body.get("logprob_start_len")) == 0


@pytest.mark.parametrize(("kind", "engine"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_completions_are_sampled_with_ids(kind, engine):
    sampling = Sampling(top_k=5, top_p=0.9, min_p=0.1)
    with served(response(engine, "completion")) as (address, requests):
        generated = EngineClient(address, kind).sample(
            PROMPT, sampling=sampling, temperature=0.7, max_new_tokens=2, seed=3
        )
    assert generated[:2] == ([9, 3], [-2.5, -0.5])
    body = requests[0][1] | requests[0][1].get("sampling_params", {})
    assert [body[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.7, 5, 0.9, 0.1]
    assert body["seed" if kind == "vllm" else "sampling_seed"] == 3


@pytest.mark.parametrize("call", ["raw", "truncated"])
def test_llama_cpp_reports_before_or_after_its_samplers(call):
    quantity = "truncated" if call == "truncated" else "raw"
    with served(response(LLAMA_CPP, call)) as (address, requests):
        generated = EngineClient(address, "llama_cpp").sample(
            LLAMA_CPP["prompt_ids"], sampling=Sampling(5, 0.9, 0.0, quantity), temperature=0.7, max_new_tokens=3, seed=1
        )
    assert len(generated.tokens) == 3
    assert (generated.supports is None) == (call == "raw")
    [(path, body, _)] = requests
    recorded = LLAMA_CPP["calls"][call]
    assert path == recorded["path"]
    assert body == recorded["request"] | {"n_probs": body["n_probs"]}


def test_llama_cpp_scores_a_prompt_by_one_request_for_each_token():
    with served(response(LLAMA_CPP, "alternatives")) as (address, requests):
        found = EngineClient(address, "llama_cpp").prompt_logprobs([16, 5, 9])
    assert [body["prompt"] for _, body, _ in requests] == [[16], [16, 5]]
    top = LLAMA_CPP["calls"]["alternatives"]["response"]["completion_probabilities"][0]["top_logprobs"]
    by_id = {other["id"]: other["logprob"] for other in top}
    assert found == [0.0, by_id[5], by_id[9]]


@pytest.mark.parametrize(
    ("answer", "status", "error", "message"),
    [
        ({"error": "no such model"}, 404, SpecError, "HTTP 404 Not Found: (.|\n)*no such model"),
        ("<html>", 200, RecordError, "the response of http://127.0.0.1"),
        ([1], 200, RecordError, "a JSON object"),
        ('{"choices": 1, "choices": 2}', 200, RecordError, "occurs twice"),
    ],
)
def test_what_is_no_response_is_an_error_with_the_address(answer, status, error, message):
    with served(answer, status) as (address, _), pytest.raises(error, match=message):
        EngineClient(address).prompt_logprobs(PROMPT)


def test_redirects_and_absent_engines_are_errors():
    with served({}, 302, "http://127.0.0.1:1/elsewhere") as (address, requests):
        with pytest.raises(SpecError, match="HTTP 302"):
            EngineClient(address).prompt_logprobs(PROMPT)
        assert len(requests) == 1
    with pytest.raises(SpecError, match="an inference engine that answers at this address"):
        EngineClient("http://127.0.0.1:9", timeout_s=5).prompt_logprobs(PROMPT)
    for address, kind in (("file:///etc/passwd", "vllm"), ("localhost:8000", "vllm"), ("http://localhost", "tgi")):
        with pytest.raises(SpecError, match="an address with http or https"):
            EngineClient(address, kind)
