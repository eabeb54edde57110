"""A server that answers as Google Cloud Storage does (its JSON API), in a process of its own:
`python -m tests.gcs_server RULES.json`.

It keeps the files of one bucket, ``bucket``, in memory, and hands out tokens to service accounts.
The rules lie in a JSON file that is read at each request. ``expired`` is the account whose tokens
are refused after ``skip`` requests for a shard, and that gets no new ones. ``status`` answers the
requests for a shard after ``skip`` of them, ``times`` times.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import threading
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"
_TOKEN = "token of "
# A part of a file that is not its last must be a multiple of so many bytes.
_PART_BYTES = 1 << 18
# A listing has no more entries than this on a page, so that all clients have to turn pages.
_PAGE = 3
_MESSAGES = {
    HTTPStatus.UNAUTHORIZED: "Invalid Credentials",
    HTTPStatus.FORBIDDEN: "somebody does not have storage.objects.get access to the object.",
    HTTPStatus.NOT_FOUND: "The specified bucket does not exist.",
    HTTPStatus.TOO_MANY_REQUESTS: "The rate of requests is too high.",
}


class GcsServer(ThreadingHTTPServer):
    """A bucket in memory.

    Args:
        rules: The JSON file.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, rules: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, tuple[bytes, dict[str, Any]]] = {}
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self.lock = threading.Lock()
        self._rules = rules
        self._rules_text = ""
        self._asked = 0

    def read_rules(self, path: str) -> dict[str, Any]:
        """Return the rules for a request: none of those whose turn has not come, or has passed."""
        text = self._rules.read_text() if self._rules.exists() else "{}"
        rules: dict[str, Any] = json.loads(text)
        with self.lock:
            if text != self._rules_text:
                self._rules_text = text
                self._asked = 0
            self._asked += "shard-" in path
            number = self._asked - rules.get("skip", 0)
        if number < 1 and "skip" in rules:
            return {}
        if "shard-" not in path or number > rules.get("times", 10**6):
            rules.pop("status", None)
        return rules

    def store(self, name: str, content: bytes) -> dict[str, Any]:
        """Keep a file; return what the API tells about it."""
        resource = {
            "kind": "storage#object",
            "bucket": BUCKET,
            "name": name,
            "size": str(len(content)),
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "updated": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        }
        with self.lock:
            self.files[name] = (content, resource)
        return resource


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GcsServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with the entry or the content of a file, or with a listing."""
        self._begin(self._get)

    def do_POST(self) -> None:
        """Give a token, or take a file or a part of it."""
        self._begin(self._post)

    def do_DELETE(self) -> None:
        """Remove a file."""
        self._begin(self._delete)

    def _begin(self, answer: Any) -> None:
        """Refuse the request, or answer it."""
        address = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        rules = self.server.read_rules(unquote(self.path) + self._name_sent())
        if address.path == "/token":
            self._give_token(rules)
            return
        account = self.headers.get("Authorization", "").removeprefix(f"Bearer {_TOKEN}")
        fault = rules.get("status", 0)
        if account.startswith("Bearer") or account in ("", rules.get("expired")):
            fault = HTTPStatus.UNAUTHORIZED
        match = re.fullmatch(
            r"(?:/download|/upload)?/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", address.path
        )
        if fault:
            self._refuse(fault)
        elif match is None or match[1] != BUCKET:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            answer(unquote(match[2] or ""))

    def _give_token(self, rules: dict[str, Any]) -> None:
        """Give an account a token, unless it is expired."""
        assertion = parse_qs(self.body.decode())["assertion"][0]
        payload = assertion.split(".")[1]
        claim = json.loads(base64.urlsafe_b64decode(payload + "=="))
        account = claim["iss"].partition("@")[0]
        if account == rules.get("expired"):
            problem = "Invalid JWT Signature."
            refusal = {"error": "invalid_grant", "error_description": problem}
            self._send_json(refusal, HTTPStatus.BAD_REQUEST)
        else:
            token = {"access_token": _TOKEN + account, "expires_in": 3600, "token_type": "Bearer"}
            self._send_json(token)

    def _name_sent(self) -> str:
        """Return the name of the file that is sent in the body."""
        match = re.search(rb'"name": "([^"]*)"', self.body[:1000])
        return match[1].decode() if match else ""

    def _get(self, name: str) -> None:
        if not name:
            self._list()
            return
        content, resource = self.server.files.get(name, (b"", {}))
        if not resource:
            self._refuse(HTTPStatus.NOT_FOUND)
        elif self.query.get("alt") == "media":
            self._send_content(content)
        else:
            self._send_json(resource)

    def _list(self) -> None:
        prefix = self.query.get("prefix", "")
        delimiter = self.query.get("delimiter", "")
        entries: dict[str, Any] = {}
        with self.server.lock:
            for name, (_, resource) in sorted(self.server.files.items()):
                rest = name.removeprefix(prefix)
                if not name.startswith(prefix):
                    continue
                if delimiter and delimiter in rest:
                    entries[prefix + rest.partition(delimiter)[0] + delimiter] = None
                else:
                    entries[name] = resource
        start = int(self.query.get("pageToken", 0))
        stop = start + min(_PAGE, int(self.query.get("maxResults", _PAGE)))
        page = list(entries.items())[start:stop]
        listing: dict[str, Any] = {"kind": "storage#objects"}
        listing["items"] = [resource for _, resource in page if resource is not None]
        listing["prefixes"] = [name for name, resource in page if resource is None]
        if stop < len(entries):
            listing["nextPageToken"] = str(stop)
        self._send_json(listing)

    def _post(self, name: str) -> None:
        if "/rewriteTo/" in name:
            source, _, target = name.partition(f"/rewriteTo/b/{BUCKET}/o/")
            if source not in self.server.files:
                self._refuse(HTTPStatus.NOT_FOUND)
                return
            resource = self.server.store(target, self.server.files[source][0])
            self._send_json({"done": True, "resource": resource})
        elif "/moveTo/" in name:
            source, _, target = name.partition("/moveTo/o/")
            content, _ = self.server.files.pop(source, (None, {}))
            if content is None:
                self._refuse(HTTPStatus.NOT_FOUND)
                return
            self._send_json(self.server.store(target, content))
        elif self.query.get("uploadType") == "multipart":
            boundary = self.headers["Content-Type"].partition('boundary="')[2].rstrip('"')
            _, head, rest = self.body.split(b"--" + boundary.encode(), 2)
            sent = json.loads(head.partition(b"\n\n")[2])
            content = rest.partition(b"\n\n")[2].removesuffix(b"\n--" + boundary.encode() + b"--")
            self._send_json(self.server.store(sent["name"], content))
        elif "upload_id" in self.query:
            self._take_part(self.query["upload_id"])
        else:
            upload = str(len(self.server.uploads))
            self.server.uploads[upload] = (json.loads(self.body)["name"], bytearray())
            host = f"http://127.0.0.1:{self.server.server_address[1]}"
            location = f"{host}/upload/storage/v1/b/{BUCKET}/o?upload_id={upload}"
            self._send(b"", HTTPStatus.OK, {"Location": location})

    def _take_part(self, upload: str) -> None:
        name, content = self.server.uploads[upload]
        first, last, size = map(int, re.findall(r"\d+", self.headers["Content-Range"]))
        is_last = last + 1 == size
        if first != len(content) or len(self.body) != last + 1 - first:
            self._refuse(HTTPStatus.BAD_REQUEST)
        elif not is_last and len(self.body) % _PART_BYTES:
            self._refuse(HTTPStatus.BAD_REQUEST)
        else:
            content += self.body
            if is_last:
                self._send_json(self.server.store(name, bytes(content)))
            else:
                received = {"Range": f"bytes=0-{len(content) - 1}"}
                self._send(b"", HTTPStatus.PERMANENT_REDIRECT, received)

    def _delete(self, name: str) -> None:
        with self.server.lock:
            is_there = self.server.files.pop(name, None) is not None
        if is_there:
            self._send(b"", HTTPStatus.NO_CONTENT, {})
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _send_content(self, content: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self._send(content, HTTPStatus.OK, {})
            return
        start = int(match[1])
        stop = min(len(content), int(match[2] or len(content)) + 1)
        if start >= len(content):
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        place = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(content[start:stop], HTTPStatus.PARTIAL_CONTENT, {"Content-Range": place})

    def _refuse(self, status: int) -> None:
        message = _MESSAGES.get(HTTPStatus(status), HTTPStatus(status).phrase)
        self._send_json({"error": {"code": int(status), "message": message}}, status)

    def _send_json(self, answer: Any, status: int = HTTPStatus.OK) -> None:
        self._send(json.dumps(answer).encode(), status, {"Content-Type": "application/json"})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve, and print the port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rules", type=Path)
    options = parser.parse_args()
    server = GcsServer(options.rules)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
