"""The page of ``top --web``: a server on this machine alone, with a secret in its address."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from managedmem._cli.top_view import View

HOSTS = ("localhost", "127.0.0.1")
"""A request with another host name is from a site that points its name here (DNS rebinding)."""
POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Serves the page and the latest view below a secret folder, as other users reach the port."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder = f"/{secrets.token_urlsafe(16)}/"
        self.page = files("managedmem").joinpath("data/top.html").read_bytes()
        self.view = b"null"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing for a page that is closed in the middle of an answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}{self.folder}"

    def show(self, view: View) -> None:
        """Serve this view from now on."""
        self.view = json.dumps(view.for_page()).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers GET of the page and of its view."""

    server: Server
    timeout = 10

    def do_GET(self) -> None:
        """Answer a request, whose host must be this machine."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        folder = self.server.folder
        if host not in HOSTS:
            self._send(403, "text/plain", b"the host must be localhost or 127.0.0.1\n")
        elif secrets.compare_digest(self.path.encode(), folder.encode()):
            self._send(200, "text/html; charset=utf-8", self.server.page)
        elif secrets.compare_digest(self.path.encode(), f"{folder}view.json".encode()):
            self._send(200, "application/json", self.server.view)
        else:
            self._send(404, "text/plain", b"the address is the one that managedmem top printed\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing: each view is a request."""


@contextlib.contextmanager
def page(port: int) -> Iterator[Callable[[View], None]]:
    """Serve the page, print its address, and yield the function that changes its view.

    Raises OSError if the port is not available.
    """
    try:
        made = Server(port)
    except OSError as error:
        raise OSError(
            f"port {port} is not available: {error.strerror}. Give --web another one, or none for "
            "a free one"
        ) from error
    with made as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            print(server.address, flush=True)
            yield server.show
        finally:
            server.shutdown()
            thread.join()
