"""A web server of a folder in a process of its own, which fails on command: `python -m
tests.file_server FOLDER FAULTS.json`.

The faults lie in a JSON file that is read at each request: ``status`` answers with this number,
``cut`` sends half of the bytes, ``times`` says how many requests for a shard that lasts.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_BUFFERED_S = 0.02


class FileServer(ThreadingHTTPServer):
    """Serves a folder.

    Args:
        folder: Its files are served.
        faults: The JSON file.
        bytes_per_s: The rate at which all files together are sent; 0 sends at full speed.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, faults: Path, *, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.faults = faults
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._sent_s = 0.0
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

    def wait_for_link(self, count: int) -> None:
        """Wait until so many bytes may have been sent, by all requests in turn."""
        if not self.bytes_per_s:
            return
        with self._lock:
            # A link goes on into the buffers of its connections for a while.
            self._sent_s = max(self._sent_s, time.perf_counter() - _BUFFERED_S)
            self._sent_s += count / self.bytes_per_s
            wait_s = self._sent_s - time.perf_counter()
        time.sleep(max(0.0, wait_s))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer without the content."""
        self._answer(is_head=True)

    def do_GET(self) -> None:
        """Answer with a file, or a part of it."""
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
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

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, path: Path, start: int, stop: int, *, is_cut: bool) -> None:
        left = stop - start
        if is_cut:
            left //= 2
            self.close_connection = True
        with path.open("rb") as file:
            file.seek(start)
            while left:
                piece = file.read(min(left, 1 << 18))
                self.server.wait_for_link(len(piece))
                self.wfile.write(piece)
                left -= len(piece)


def main() -> None:
    """Serve, and print the port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("faults", type=Path)
    parser.add_argument("--bytes-per-s", type=float, default=0)
    options = parser.parse_args()
    server = FileServer(
        options.folder,
        options.faults,
        bytes_per_s=options.bytes_per_s,
    )
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
