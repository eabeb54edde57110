"""Object stores for the tests: servers that answer as S3 and as Google Cloud Storage do, each in a
process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colab_utils import places

ROOT = Path(__file__).resolve().parents[1]


def start(*words: object) -> subprocess.Popen[str]:
    """Start a server of the tests; return its process. Its first line of output is its port."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def forget_servers() -> None:
    """Another server may have the same address in the next test."""
    places._open_system.cache_clear()


class Store:
    """A server with an empty bucket.

    Args:
        folder: A folder for the server's rules, and for credentials.
        patch: Sets the environment, so that the package finds the server.
    """

    module = ""
    """The program of the server."""
    url = ""
    """The bucket."""
    packages: tuple[str, ...] = ()
    """What the server and its client need."""
    expired = ""
    """What is said of credentials that have expired."""
    missing = ""
    """What is said without credentials."""
    denied = ""
    """What is said where rights are missing."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.rules = folder / "rules.json"
        self.folder = folder
        self._user = 1
        self.patch = patch
        self.process = start("-m", self.module, self.rules)
        assert self.process.stdout is not None
        self.address = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self._set_credentials(f"user-{self._user}")
        self._set_environment()

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
        self._set_credentials(f"user-{self._user}")

    def _set_credentials(self, user: str) -> None:
        raise NotImplementedError

    def remove_credentials(self) -> None:
        """Leave this process without credentials."""
        raise NotImplementedError

    def _set_environment(self) -> None:
        raise NotImplementedError


async def _sleep_briefly(seconds: float) -> None:
    await asyncio.sleep(seconds / 1000)


class S3(Store):
    """S3, by moto."""

    module = "tests.s3_server"
    url = "s3://bucket"
    packages = ("s3fs", "moto")
    expired = "400"
    missing = "NoCredentials"
    denied = r"403 An error occurred \(AccessDenied\)"

    def _set_environment(self) -> None:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.address,
        }.items():
            self.patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")

    def _set_credentials(self, user: str) -> None:
        self.patch.setenv("AWS_SESSION_TOKEN", user)

    def remove_credentials(self) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            self.patch.delenv(name)
        self.patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        self.patch.setenv("AWS_CONFIG_FILE", str(self.folder / "none"))
        self.patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(self.folder / "none"))


class Google(Store):
    """Google Cloud Storage."""

    module = "tests.gcs_server"
    url = "gs://bucket"
    packages = ("gcsfs",)
    expired = "401"
    missing = "401"
    denied = "OSError: Forbidden.*storage.objects.get"

    def _set_environment(self) -> None:
        self.patch.setenv("STORAGE_EMULATOR_HOST", self.address)
        import gcsfs.retry

        # gcsfs asks six times, and waits for half a minute in all.
        self.patch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=_sleep_briefly))

    def _set_credentials(self, user: str) -> None:
        """Write the key of a service account, whose tokens this server gives."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        account = {
            "type": "service_account",
            "project_id": "project",
            "private_key_id": "1",
            "private_key": key.decode(),
            "client_email": f"{user}@project.iam.gserviceaccount.com",
            "token_uri": f"{self.address}/token",
        }
        path = self.folder / f"{user}.json"
        path.write_text(json.dumps(account))
        self.patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))

    def remove_credentials(self) -> None:
        self.patch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
        self.patch.setenv("NO_GCE_CHECK", "true")
        self.patch.setenv("HOME", str(self.folder))
        self.patch.setenv("CLOUDSDK_CONFIG", str(self.folder))
