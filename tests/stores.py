"""An object store for the tests: a server that answers as S3 does, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colab_utils import urls

ROOT = Path(__file__).resolve().parents[1]


def forget_servers() -> None:
    """Another server may have the same address in the next test."""
    urls.open_system.cache_clear()


class S3:
    """S3, by moto, with an empty bucket.

    Args:
        folder: A folder for the server's rules, and for credentials.
        patch: Sets the environment, so that the package finds the server.
    """

    url = "s3://bucket"

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.rules = folder / "rules.json"
        self.folder = folder
        self._user = 1
        self.patch = patch
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.s3_server", str(self.rules)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        # Its first line of output is its port.
        port = int(self.process.stdout.readline())
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            self.patch.setenv(name, value)
        self._set_credentials()
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")

    def set_rules(self, **rules: Any) -> None:
        """Make the server refuse requests."""
        self.rules.write_text(json.dumps(rules))

    def close(self) -> None:
        """End the server."""
        self.process.kill()
        self.process.wait()

    def expire(self, skip: int) -> None:
        """Make the credentials of this process expire after ``skip`` requests for a shard."""
        self.set_rules(expired=f"user-{self._user}", skip=skip)

    def renew(self) -> None:
        """Give this process new credentials, as a user does."""
        self._user += 1
        self._set_credentials()

    def _set_credentials(self) -> None:
        self.patch.setenv("AWS_SESSION_TOKEN", f"user-{self._user}")

    def remove_credentials(self) -> None:
        """Leave this process without credentials."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            self.patch.delenv(name)
        self.patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        self.patch.setenv("AWS_CONFIG_FILE", str(self.folder / "none"))
        self.patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self.folder / "none"))
