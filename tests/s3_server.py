"""A server that answers as S3 does, in a process of its own:
`python -m tests.s3_server RULES.json`.

moto keeps the files. In front of it, a request is refused if its session token has expired, or as
the rules say. The answer to a HEAD request has a status and no reason, as with S3.

The rules lie in a JSON file that is read at each request. ``expired`` is a session token that is
refused after ``skip`` requests for a shard. ``code`` and ``status`` answer the requests for a shard
after ``skip`` of them, ``times`` times.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

_MESSAGES = {
    "AccessDenied": "Access Denied",
    "ExpiredToken": "The provided token has expired.",
    "SlowDown": "Please reduce your request rate.",
}


class GuardedS3:
    """The WSGI application: moto's, behind the checks.

    Args:
        rules: The JSON file.
    """

    def __init__(self, rules: Path) -> None:
        # Only the environment of make test-engines has moto.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._rules = rules
        self._files = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._rules_text = ""
        self._asked = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Refuse the request, or answer it."""
        status, code = self._check(environ)
        if not code:
            return self._files(environ, start_response)
        # A client that still sends does not read the answer.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        message = _MESSAGES.get(code, code)
        content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        if environ["REQUEST_METHOD"] == "HEAD":
            content = b""
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))]
        start_response(f"{status} {code}", headers)
        return [content]

    def _check(self, environ: dict[str, Any]) -> tuple[int, str]:
        """Return the status and the code of a refusal; (200, "") if there is none."""
        rules, number = self._read_rules(environ["RAW_URI"])
        if "HTTP_AUTHORIZATION" not in environ:
            return 403, "AccessDenied"
        is_late = number > rules.get("skip", 0)
        token = environ.get("HTTP_X_AMZ_SECURITY_TOKEN")
        if is_late and token is not None and token == rules.get("expired"):
            return 400, "ExpiredToken"
        is_over = number > rules.get("skip", 0) + rules.get("times", 10**6)
        if is_late and not is_over and "code" in rules and "shard-" in environ["RAW_URI"]:
            return rules["status"], rules["code"]
        return 200, ""

    def _read_rules(self, path: str) -> tuple[dict[str, Any], int]:
        """Return the rules, and how many requests for a shard came since they are new."""
        text = self._rules.read_text() if self._rules.exists() else "{}"
        with self._lock:
            if text != self._rules_text:
                self._rules_text = text
                self._asked = 0
            self._asked += "shard-" in path
            return json.loads(text), self._asked


def main() -> None:
    """Serve, and print the port."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    server = make_server(
        "127.0.0.1",
        0,
        GuardedS3(Path(sys.argv[1])),
        threaded=True,
        request_handler=MotoRequestHandler,
    )
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
