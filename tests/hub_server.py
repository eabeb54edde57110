"""A stand-in for the Hugging Face Hub: one dataset, ``me/data``, whose files lie in a folder.

It answers the requests that ``huggingface_hub`` makes to read files, to list them and to commit
them, without its store for large files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
_API = re.compile(r"/api/datasets/me/data(?:/([\w-]+)/main(?:/(.*))?)?")
_FILE = re.compile(r"/datasets/me/data/resolve/[^/]+/(.*)")


class HubServer(ThreadingHTTPServer):
    """Serves a folder as the dataset.

    Args:
        folder: Its files are those of the dataset.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.failures = 0
        """So many of the next requests for a shard fail with the status 503."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which `huggingface_hub` comes here."""
        address = f"http://127.0.0.1:{self.server_port}"
        return {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with content, without it, or a call."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = unquote(urlsplit(self.path).path)
        file = _FILE.fullmatch(address)
        call = _API.fullmatch(address)
        if file:
            self._send_file(self.server.folder / file[1])
        elif call:
            self._answer_call(call[1] or "revision", self.server.folder / (call[2] or ""), body)
        else:
            self._refuse("RepoNotFound")

    do_HEAD = do_GET  # noqa: N815
    do_POST = do_GET  # noqa: N815

    def _answer_call(self, call: str, path: Path, body: bytes) -> None:
        if call == "revision":
            self._send_json({"id": "me/data", "sha": COMMIT, "private": False, "tags": []})
        elif call == "tree":
            if not path.is_dir():
                self._refuse("EntryNotFound")
                return
            paths = path.rglob("*") if "recursive=true" in self.path.lower() else path.iterdir()
            self._send_json([self._describe(path) for path in sorted(paths)])
        elif call == "paths-info":
            wanted = [self.server.folder / name for name in json.loads(body)["paths"]]
            self._send_json([self._describe(path) for path in wanted if path.exists()])
        elif call == "preupload":
            files = json.loads(body)["files"]
            kinds = {"uploadMode": "regular", "shouldIgnore": False}
            self._send_json({"files": [{"path": file["path"], **kinds} for file in files]})
        elif call == "commit":
            for line in body.splitlines():
                self._change(**json.loads(line))
            address = f"http://{self.headers['Host']}/datasets/me/data/commit/{COMMIT}"
            self._send_json({"commitOid": COMMIT, "commitUrl": address, "success": True})

    def _change(self, key: str, value: dict[str, Any]) -> None:
        path = self.server.folder / value.get("path", "")
        if key == "file":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(value["content"]))
        elif key == "deletedFile":
            path.unlink()

    def _describe(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.server.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
        size = path.stat().st_size
        return {"type": "file", "path": name, "oid": _hash(path.read_bytes()), "size": size}

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._refuse("EntryNotFound")
            return
        if self.server.failures and path.suffix in (".tar", ".arrays"):
            self.server.failures -= 1
            self._send(b"", 503)
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_hash(content)}"', "Accept-Ranges": "bytes"}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None:
            self._send(content, 200, **headers)
            return
        start = int(part[1])
        end = min(int(part[2]) + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._send(content[start:end], 206, **headers)

    def _refuse(self, code: str) -> None:
        self._send(b'{"error": "not found"}', 404, **{"X-Error-Code": code})

    def _send_json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), 200)

    def _send(self, content: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        headers |= {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
