"""An OpenAI-compatible server that answers, or misbehaves, as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]


def completion(content: Any, *, finish: str = "stop", **message: Any) -> Reply:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": finish,
    }
    return 200, {}, json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()


def echo(body: dict[str, Any]) -> Reply:
    """An answer that depends on the whole request, and on nothing else."""
    said = " | ".join(f"{m['role'][0]}:{m['content']}" for m in body["messages"])
    return completion(f"[{said}]")


class FakeEndpoint:
    """Use as a context manager. `reply(number, body)` decides about each request, from 0."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], Any] | None = None) -> None:
        self.reply = reply or (lambda number, body: echo(body))
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.models = ["tiny"]
        self.connections = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                outer.connections += 1

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                listed = {"data": [{"id": name} for name in outer.models]}
                self._send(200, {}, json.dumps(listed).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.times.append(time.monotonic())
                reply = outer.reply(number, body)
                if reply is None:  # no response at all
                    self.close_connection = True
                    return
                self._send(*reply)

            def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
                if int(headers.get("Content-Length", len(content))) != len(content):
                    self.close_connection = True

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # of 5, clients beyond it wait a second for the next try

            def handle_error(self, *_: Any) -> None:
                pass  # a client that left is what some tests are about

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> FakeEndpoint:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
