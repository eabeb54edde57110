"""A web server of a folder, which fails on command.

The faults lie in a JSON file that is read at each request: ``status`` answers with this number,
``cut`` sends half of the bytes, ``times`` says how many requests for a shard that lasts.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Handler(BaseHTTPRequestHandler):
    """Answers with a file, or a part of it; a HEAD request without the content."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer, or fail."""
        fault = NOTHING if self.command == "HEAD" else self.server.take_fault(self.path)
        if "status" in fault:
            self.send(b"", fault["status"])
        else:
            self.send_file(unquote(urlsplit(self.path).path), is_cut="cut" in fault)

    do_HEAD = do_GET  # noqa: N815

    def send_file(self, name: str, *, is_cut: bool = False) -> None:
        """Send the part of a file that is asked for."""
        path = self.server.folder / name.lstrip("/")
        if not path.is_file():
            self.send(b"", HTTPStatus.NOT_FOUND)
            return
        content = path.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self.send(content, is_cut=is_cut)
            return
        start = int(part[1])
        stop = min(len(content), int(part[2] or len(content)) + 1)
        if start >= stop:
            self.send(b"", HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self.send(content[start:stop], HTTPStatus.PARTIAL_CONTENT, headers, is_cut=is_cut)

    def send(
        self,
        content: bytes,
        status: int = HTTPStatus.OK,
        headers: Mapping[str, str] = NOTHING,
        *,
        is_cut: bool = False,
    ) -> None:
        """Send content, or half of it."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if is_cut:
            content = content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)


class FileServer(ThreadingHTTPServer):
    """Serves a folder, for as long as its block lasts.

    Args:
        folder: Its files are served.
        faults: The JSON file.
    """

    daemon_threads = True
    request_queue_size = 256
    handler = Handler

    def __init__(self, folder: Path, faults: Path) -> None:
        super().__init__(("127.0.0.1", 0), self.handler)
        self.folder = folder
        self.faults = faults
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._lock = threading.Lock()
        self._failed = 0

    def __enter__(self) -> Any:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def take_fault(self, path: str) -> Mapping[str, Any]:
        """Return the fault of this request, if it has one."""
        if not self.faults.exists() or "shard-" not in path:
            return NOTHING
        fault: dict[str, Any] = json.loads(self.faults.read_text())
        with self._lock:
            if self._failed >= fault["times"]:
                return NOTHING
            self._failed += 1
        return fault
