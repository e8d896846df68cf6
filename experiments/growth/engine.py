"""An inference engine of this machine without a model: every token that it is asked to score has the same probability.

`rollouts score` sends it one request for each document, as to SGLang; its own time is not that of the command.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOGPROB = -1.25
"""Of each token; any number would do."""


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
        scored = [[None if at == 0 else LOGPROB, token, None] for at, token in enumerate(tokens)]
        content = json.dumps({"meta_info": {"input_token_logprobs": scored}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """Serve on loopback, and return the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
