"""Name one GitHub repository in the badges and addresses of the notebooks and texts: `make badges`.

Usage: python -m tools.set_badges OWNER/NAME
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.setup_cell import ROOT, print_changes

__all__ = ["find_slugs", "list_files", "read_slug", "set_badges", "set_title"]

PLACEHOLDER = "OWNER/REPO"
_SLUG = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}/[A-Za-z0-9._-]{1,100}"
_END = r"(?=/blob/|\.git\b|[\s\"'`\\)])"
_MARKS = re.compile(
    rf"(?:colab\.research\.google\.com/github/|git\+https://github\.com/)({_SLUG}?){_END}"
)
"""The two places that name our repository: a badge, and the install line."""
_BADGE = re.compile(r"^\[!\[Open In Colab\].*\n?", re.MULTILINE)


def list_files(root: Path) -> list[Path]:
    """Return the files that name the repository."""
    paths = []
    for pattern in ("notebooks/*.ipynb", "*.md", "docs/*.md"):
        paths += sorted(root.glob(pattern))
    return paths


def find_slugs(text: str) -> set[str]:
    """Return the repositories that the badges and the install line of a text name.

    Example:
        >>> find_slugs("pip install -q --no-deps git+https://github.com/me/fast")
        {'me/fast'}
    """
    return set(_MARKS.findall(text))


def read_slug(root: Path) -> str:
    """Return the repository that the README's install line names, or the placeholder."""
    slugs = find_slugs((root / "README.md").read_text(encoding="utf-8"))
    return slugs.pop() if len(slugs) == 1 else PLACEHOLDER


def set_badges(root: Path, slug: str) -> list[Path]:
    """Replace the repository's name in every link to it; links to other repositories stay.

    Args:
        root: the checkout.
        slug: the repository, as ``owner/name``.

    Returns:
        The files that changed.

    Raises:
        ValueError: the name is not that of a repository on GitHub.
    """
    if not re.fullmatch(_SLUG, slug) or slug.endswith((".git", "/.", "/..")):
        raise ValueError(
            f"{slug!r} is no name of a repository on GitHub. Give owner/name: make badges "
            "REPO=owner/name"
        )
    texts = {path: path.read_text(encoding="utf-8") for path in list_files(root)}
    old = set().union(*map(find_slugs, texts.values()))
    changed = []
    for path, text in texts.items():
        new = _rename(text, old, slug)
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


def set_title(text: str, slug: str) -> str:
    """Return the text of a title cell with a badge of a repository, or without one where no
    repository is known yet.

    Args:
        text: of the cell.
        slug: the repository, as ``owner/name``, or the placeholder.
    """
    if slug == PLACEHOLDER:
        return _BADGE.sub("", text).rstrip()
    return _rename(text, find_slugs(text), slug)


def _rename(text: str, old: set[str], slug: str) -> str:
    if not old:
        return text
    names = "|".join(re.escape(name) for name in sorted(old, key=len, reverse=True))
    place = r"(github\.com/|colab\.research\.google\.com/github/)"
    return re.sub(rf"{place}(?:{names})(?![\w-]|\.(?!git\b)\w)", rf"\g<1>{slug}", text)


def main(arguments: list[str]) -> int:
    """Set the badges from a terminal; returns the exit status."""
    try:
        files = set_badges(ROOT, "".join(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_changes(files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
