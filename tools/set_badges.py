"""Point the Colab badges and install lines of the notebooks and texts at another GitHub repository.

Usage: python tools/set_badges.py OWNER/NAME
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLUG = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}/[A-Za-z0-9._-]{1,100}"
MARKS = re.compile(
    rf"(?:colab\.research\.google\.com/github/|git\+https://github\.com/)({SLUG}?)(?=/blob/|@|\.git\b|[\s\"'`\\)])"
)
"""The two places that name our repository: a badge, and an install line."""


def list_files(root: Path) -> list[Path]:
    """The files that name the repository."""
    return [*sorted(root.glob("notebooks/*.ipynb")), *sorted(root.glob("*.md"))]


def find_slugs(text: str) -> set[str]:
    """The repositories that the badges and install lines of a text name.

    Example:
        >>> find_slugs("pip install -q --no-deps git+https://github.com/me/fast.git@v1")
        {'me/fast'}
    """
    return set(MARKS.findall(text))


def set_badges(root: Path, slug: str) -> list[Path]:
    """Replace the repository's name in every link to it; links to other repositories stay."""
    if not re.fullmatch(SLUG, slug) or slug.endswith((".git", "/.", "/..")):
        raise ValueError(f"expected REPO=owner/name as on GitHub, found {slug!r}: run make badges REPO=owner/name")
    texts = {path: path.read_text(encoding="utf-8") for path in list_files(root)}
    old = set().union(*map(find_slugs, texts.values()))
    names = "|".join(re.escape(name) for name in sorted(old, key=len, reverse=True))
    link = re.compile(rf"(github\.com/|colab\.research\.google\.com/github/)(?:{names})(?![\w-]|\.(?!git\b)\w)")
    changed = []
    for path, text in texts.items():
        new = link.sub(rf"\g<1>{slug}", text) if old else text
        if new != text:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
            temporary.write_text(new, encoding="utf-8")
            os.replace(temporary, path)
            changed.append(path)
    return changed


if __name__ == "__main__":
    try:
        files = set_badges(ROOT, sys.argv[1] if len(sys.argv) == 2 else "")
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("\n".join(f"changed {path.relative_to(ROOT)}" for path in files) or "nothing to change")
