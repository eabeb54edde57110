"""Point the Colab badges and install lines of the notebooks and texts at another GitHub repository,
and at one tag.

Usage: python tools/set_badges.py OWNER/NAME [TAG]
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLUG = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}/[A-Za-z0-9._-]{1,100}"
REF = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
END = r"(?=/blob/|@|\.git\b|[\s\"'`\\)])"
MARKS = re.compile(
    rf"(?:colab\.research\.google\.com/github/|git\+https://github\.com/)({SLUG}?){END}"
)
"""The two places that name our repository: a badge, and an install line."""


def list_files(root: Path) -> list[Path]:
    """Return the files that name the repository."""
    paths = []
    for pattern in ("notebooks/*.ipynb", "tools/setup_cell.txt", "*.md", "docs/*.md"):
        paths += sorted(root.glob(pattern))
    return paths


def find_slugs(text: str) -> set[str]:
    """Return the repositories that the badges and install lines of a text name.

    Example:
        >>> find_slugs("pip install -q --no-deps git+https://github.com/me/fast.git@v1")
        {'me/fast'}
    """
    return set(MARKS.findall(text))


def set_badges(root: Path, slug: str, ref: str = "") -> list[Path]:
    """Replace the repository's name in every link to it; links to other repositories stay.

    Args:
        root: the checkout.
        slug: the repository, as ``owner/name``.
        ref: the tag that badges open and that is installed; empty leaves both as they are.
    """
    if not re.fullmatch(SLUG, slug) or slug.endswith((".git", "/.", "/..")):
        raise ValueError(
            f"expected REPO=owner/name as on GitHub, found {slug!r}: make badges REPO=owner/name"
        )
    if ref and not re.fullmatch(REF, ref):
        raise ValueError(
            f"expected REF=tag, such as v1.0, found {ref!r}: make badges REPO=owner/name REF=v1.0"
        )
    texts = {path: path.read_text(encoding="utf-8") for path in list_files(root)}
    old = set().union(*map(find_slugs, texts.values()))
    names = "|".join(re.escape(name) for name in sorted(old, key=len, reverse=True))
    link = re.compile(
        rf"(github\.com/|colab\.research\.google\.com/github/)(?:{names})(?![\w-]|\.(?!git\b)\w)"
    )
    changed = []
    for path, text in texts.items():
        new = link.sub(rf"\g<1>{slug}", text) if old else text
        new = _set_ref(new, slug, ref)
        if new != text:
            temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
            temporary.write_text(new, encoding="utf-8")
            os.replace(temporary, path)
            changed.append(path)
    return changed


def _set_ref(text: str, slug: str, ref: str) -> str:
    if not ref:
        return text
    name = re.escape(slug)
    text = re.sub(
        rf"(colab\.research\.google\.com/github/{name}/blob/){REF}(?=/)", rf"\g<1>{ref}", text
    )
    return re.sub(
        rf"(git\+https://github\.com/{name}(?:\.git)?)(?:@{REF}|(?=[\s\"'`\\)]))",
        rf"\g<1>@{ref}",
        text,
    )


if __name__ == "__main__":
    try:
        files = set_badges(ROOT, *(sys.argv[1:3] or [""]))
    except ValueError as error:
        sys.exit(f"error: {error}")
    lines = [f"changed {path.relative_to(ROOT)}" for path in files]
    print("\n".join(lines) or "nothing to change")
    tag = sys.argv[2] if len(sys.argv) > 2 else ""
    if tag:
        print("Now commit, and push the commit with its tag:")
        print(f"git tag {tag}; git push origin HEAD {tag}")
