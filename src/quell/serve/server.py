"""`quell serve`: the page on localhost, with sliders.

It reads and computes but changes nothing, listens on 127.0.0.1 only, and answers only requests addressed to that
name: a web page elsewhere that points its own name at this machine (DNS rebinding) is refused by the Host header, and
one that merely links here by Sec-Fetch-Site.

An answer is a stream of lines, each a JSON object: progress, then the plan. A page that wants something else by now, or
was closed, ends its connection, and the computation ends with it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import traceback
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from threadpoolctl import threadpool_limits

from quell.errors import QuellError
from quell.run import Run
from quell.serve.controls import controls, presets
from quell.serve.desk import NAMES, Desk, read_question
from quell.show.page.document import document

HOST = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves one page and its plans; `port` 0 takes any free one."""

    daemon_threads = True  # Ctrl-C does not wait for a plan nobody will read

    def __init__(self, run: Run, port: int, usual_delta: bool = False) -> None:
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as problem:
            raise QuellError(
                f"cannot listen on port {port}: {str(problem).rstrip('.')}; choose another --port, 0 for any"
            ) from problem
        self.run, self.desk = run, Desk()
        live = {"controls": controls(run, usual_delta), "presets": presets()}
        self.page = document(None, "This page needs scripts; quell plan prints the same.", live)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    @property
    def names(self) -> tuple[str, ...]:
        """What a Host header may say."""
        return tuple(f"{name}:{self.server_address[1]}" for name in (HOST, "localhost"))


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /plan?… a plan, in lines of JSON; errors are JSON with a message."""

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
        begun = False

        def tell(message: dict[str, Any]) -> None:
            nonlocal begun
            if self._gone():
                raise ConnectionAbortedError
            if not begun:
                self._head(HTTPStatus.OK, "application/x-ndjson")
                begun = True
            self.wfile.write(f"{json.dumps(message, allow_nan=False)}\n".encode())

        def fail(status: int, message: str, field: str | None = None) -> None:
            if begun:
                tell({"error": message, "field": field})
            else:
                self._fail(status, message, field)

        try:
            try:
                self.server.desk.answer(read_question(query, self.server.run), tell)
            except QuellError as problem:
                fail(HTTPStatus.BAD_REQUEST, str(problem), problem.about if problem.about in NAMES else None)
            except (ConnectionError, TimeoutError):
                raise
            except Exception as problem:
                traceback.print_exc()
                fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"planning failed: {type(problem).__name__}; see the terminal")
        except (ConnectionError, TimeoutError):  # the page wants something else by now, or does not read
            self.close_connection = True

    def _gone(self) -> bool:
        """Whether the other end has hung up: nothing else than the end can come after a request."""
        if not select.select([self.connection], [], [], 0)[0]:
            return False
        return not self.connection.recv(1, socket.MSG_PEEK)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses (other methods, malformed requests) is JSON too."""
        self._fail(code, message or HTTPStatus(code).phrase)

    def _fail(self, status: int, message: str, field: str | None = None) -> None:
        self._reply(status, "application/json", json.dumps({"error": message, "field": field}))

    def _reply(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        try:
            self._head(status, kind, len(body))
            self.wfile.write(body)
        except ConnectionError:  # the page was closed meanwhile
            self.close_connection = True

    def _head(self, status: int, kind: str, length: int | None = None) -> None:
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            **({} if length is None else {"Content-Length": str(length)}),
            "Content-Security-Policy": f"{self.server.page.policy}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: the terminal belongs to the person who started the server."""


def serve(run: Run, port: int, say: Callable[[str], None], usual_delta: bool = False, browser: bool = False) -> None:
    """Answer until interrupted; with `browser`, also open the page where there is a screen."""
    server = PageServer(run, port, usual_delta)
    try:
        opened = browser and _has_screen() and webbrowser.open(server.url)
        say(f"{'Opened' if opened else 'Open'} {server.url} in a browser; Ctrl-C ends.")
        with threadpool_limits(1):  # for all threads: searches of several pages change it for each other otherwise
            server.serve_forever()
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        server.server_close()


def _has_screen() -> bool:
    """Whether a browser would open in a window, and not in this terminal."""
    return sys.platform in ("win32", "darwin") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
