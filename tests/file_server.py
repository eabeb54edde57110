"""A web server of a folder, which fails on command.

The faults lie in a JSON file that is read at each request: ``status`` answers with this number,
``cut`` sends half of the bytes, ``times`` says how many requests for a shard that lasts.
"""

from __future__ import annotations

import json
import re
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class FileServer(ThreadingHTTPServer):
    """Serves a folder.

    Args:
        folder: Its files are served.
        faults: The JSON file.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, faults: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.faults = faults
        self._lock = threading.Lock()
        self._failed = 0

    def take_fault(self, path: str) -> dict[str, Any]:
        """The fault of this request, if it has one."""
        if not self.faults.exists() or "shard-" not in path:
            return {}
        fault: dict[str, Any] = json.loads(self.faults.read_text())
        with self._lock:
            if self._failed >= fault["times"]:
                return {}
            self._failed += 1
        return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with a file, or a part of it; a HEAD request without the content."""
        is_head = self.command == "HEAD"
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        fault = {} if is_head else self.server.take_fault(self.path)
        status = fault.get("status", HTTPStatus.OK)
        if status == HTTPStatus.OK and not path.is_file():
            status = HTTPStatus.NOT_FOUND
        if status != HTTPStatus.OK:
            self._refuse(status)
            return
        size = path.stat().st_size
        start = 0
        stop = size
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match:
            start = int(match[1])
            stop = min(size, int(match[2] or size) + 1)
            if start >= size:
                self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        else:
            self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if not is_head:
            self._send(path, start, stop, is_cut=bool(fault.get("cut")))

    do_HEAD = do_GET  # noqa: N815

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, path: Path, start: int, stop: int, *, is_cut: bool) -> None:
        left = stop - start
        if is_cut:
            left //= 2
            self.close_connection = True
        self.wfile.write(path.read_bytes()[start : start + left])
