"""The content of folders, to compare it."""

from __future__ import annotations

from pathlib import Path

from colab_utils.shards.source import SOURCE_NAME


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the content of each file, but the note of when the data were changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != SOURCE_NAME
    }
