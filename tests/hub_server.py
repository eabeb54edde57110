"""A stand-in for the Hugging Face Hub: one dataset, ``me/data``, whose files lie in a folder.

It answers the requests that ``huggingface_hub`` makes to read files, to list them and to commit
them, without its store for large files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.file_server import NOTHING, FileServer, Handler

COMMIT = "c" * 40
_API = re.compile(r"/api/datasets/me/data(?:/([\w-]+)/main(?:/(.*))?)?")
_FILE = re.compile(r"/datasets/me/data/resolve/[^/]+/(.*)")


class _HubHandler(Handler):
    def do_GET(self) -> None:  # noqa: N802
        """Answer with content, without it, or a call."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = unquote(urlsplit(self.path).path)
        file = _FILE.fullmatch(address)
        call = _API.fullmatch(address)
        if file and self.server.failures and file[1].endswith((".tar", ".arrays")):
            self.server.failures -= 1
            self.send(b"", HTTPStatus.SERVICE_UNAVAILABLE)
        elif file:
            self.send_file(file[1])
        elif call:
            self._answer_call(call[1] or "revision", self.server.folder / (call[2] or ""), body)
        else:
            self.send(b"", HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815
    do_POST = do_GET  # noqa: N815

    def send(
        self,
        content: bytes,
        status: int = HTTPStatus.OK,
        headers: Mapping[str, str] = NOTHING,
        *,
        is_cut: bool = False,
    ) -> None:
        """Send content with what the hub says of each file."""
        headers = {**headers, "X-Repo-Commit": COMMIT, "ETag": f'"{_hash(content)}"'}
        if status == HTTPStatus.NOT_FOUND:
            headers["X-Error-Code"] = "EntryNotFound"
        super().send(content, status, headers)

    def _answer_call(self, call: str, path: Path, body: bytes) -> None:
        if call == "revision":
            self._send_json({"id": "me/data", "sha": COMMIT, "private": False, "tags": []})
        elif call == "tree":
            if not path.is_dir():
                self.send(b"", HTTPStatus.NOT_FOUND)
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

    def _send_json(self, value: Any) -> None:
        self.send(json.dumps(value).encode())


class HubServer(FileServer):
    """Serves a folder as the dataset."""

    handler = _HubHandler
    failures = 0
    """So many of the next requests for a shard fail with the status 503."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which `huggingface_hub` comes here."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}


def _hash(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
