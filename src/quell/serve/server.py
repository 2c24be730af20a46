"""`quell serve`: the page on localhost, with sliders.

It reads and computes but changes nothing, listens on 127.0.0.1 only, and answers only requests addressed to that
name: a web page elsewhere that points its own name at this machine (DNS rebinding) is refused by the Host header, and
one that merely links here by Sec-Fetch-Site.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from quell.errors import QuellError
from quell.run import Run
from quell.serve.desk import Desk, SupersededError, controls, read_question
from quell.show.page.document import document

HOST = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves one page and its plans; `port` 0 takes any free one."""

    daemon_threads = True  # Ctrl-C does not wait for a plan nobody will read

    def __init__(self, run: Run, port: int) -> None:
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as problem:
            raise QuellError(f"cannot listen on port {port}: {problem}; choose another --port, 0 for any") from problem
        self.run, self.desk = run, Desk()
        self.page = document(None, "This page needs scripts; quell plan prints the same.", {"controls": controls(run)})

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def names(self) -> tuple[str, ...]:
        """What a Host header may say."""
        return tuple(f"{name}:{self.server_address[1]}" for name in (HOST, "localhost"))


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /plan?… a plan; errors are JSON with a message."""

    server: PageServer
    server_version, sys_version = "quell", ""
    timeout = 30  # seconds a client may take to state its request

    def do_GET(self) -> None:
        if self.headers.get_all("Host", []) not in [[name] for name in self.server.names]:
            return self._fail(HTTPStatus.FORBIDDEN, f"this server answers only to {self.server.url}")
        address = urlsplit(self.path)
        if address.path == "/":
            return self._reply(HTTPStatus.OK, "text/html", self.server.page.html)
        if address.path != "/plan":
            return self._fail(HTTPStatus.NOT_FOUND, "there is only / and /plan here")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return self._fail(HTTPStatus.FORBIDDEN, "plans are computed only for Quell's own page")
        return self._plan(address.query)

    def _plan(self, query: str) -> None:
        try:
            plan = self.server.desk.answer(read_question(query, self.server.run))
        except SupersededError:
            self._fail(HTTPStatus.CONFLICT, "a newer request of the same page took its place")
        except QuellError as problem:
            self._fail(HTTPStatus.BAD_REQUEST, str(problem))
        except Exception as problem:
            traceback.print_exc()
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"planning failed: {type(problem).__name__}; see the terminal")
        else:
            self._reply(HTTPStatus.OK, "application/json", json.dumps({"plan": plan}, allow_nan=False))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses (other methods, malformed requests) is JSON too."""
        self._fail(code, message or HTTPStatus(code).phrase)

    def _fail(self, status: int, message: str) -> None:
        self._reply(status, "application/json", json.dumps({"error": message}))

    def _reply(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{self.server.page.policy}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the page moved on while this was computed
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing: the terminal belongs to the person who started the server."""


def serve(run: Run, port: int, say: Callable[[str], None]) -> None:
    """Answer until interrupted."""
    server = PageServer(run, port)
    try:
        say(f"Open {server.url} in a browser; Ctrl-C ends.")
        server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        server.server_close()
