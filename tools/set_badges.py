"""Point the badges and install lines of the notebooks and texts at another GitHub repository, and
at one tag. Until a repository is set, words stand where its badges would lead nowhere.

Usage: python tools/set_badges.py [OWNER/NAME [TAG]]; without a name, that of the git remote
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "OWNER/REPO"
SLUG = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}/[A-Za-z0-9._-]{1,100}"
REF = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
END = r"(?=/blob/|@|\.git\b|[\s\"'`\\)])"
MARKS = re.compile(
    rf"(?:colab\.research\.google\.com/github/|git\+https://github\.com/)({SLUG}?){END}"
)
"""The two places that name our repository: a badge, and an install line."""

UPLOAD = "On Colab, *File > Upload notebook* opens the file that `make workshop` writes."
BADGE = re.compile(
    rf"^(?:\[!\[Open In Colab\].*|{re.escape(UPLOAD)})$",
    re.MULTILINE,
)
"""The line below a notebook's title: badges, or words until there is a repository."""
_ROW = re.compile(r"^(\| \[[^\]|]*\]\(notebooks/(\w+)\.ipynb\) \|.*\| )([^|]*)( \|)$", re.MULTILINE)
_TITLE_LINE = re.compile(
    rf'"((?:\[!\[Open In Colab\]|{re.escape(UPLOAD)})[^"\n]*?)((?:\\n)?")',
)
_REMOTE = re.compile(rf"github\.com[:/]({SLUG}?)(?:\.git)?/?")


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


def write_badges(name: str, slug: str, ref: str = "main") -> str:
    """Return the badges that open a notebook on Colab and on Kaggle, or words where no repository
    is set.

    Args:
        name: of the notebook's file, without ending.
        slug: the repository, as ``owner/name``, or the placeholder.
        ref: the branch or tag.
    """
    if slug == PLACEHOLDER:
        return UPLOAD
    path = f"{slug}/blob/{ref}/notebooks/{name}.ipynb"
    colab = "https://colab.research.google.com/"
    kaggle = "https://kaggle.com/"
    return (
        f"[![Open In Colab]({colab}assets/colab-badge.svg)]({colab}github/{path}) "
        f"[![Open in Kaggle]({kaggle}static/images/open-in-kaggle.svg)]"
        f"({kaggle}kernels/welcome?src=https://github.com/{path})"
    )


def read_slug(root: Path) -> str:
    """Return the repository that the README's install line names, or the placeholder."""
    slugs = find_slugs((root / "README.md").read_text(encoding="utf-8"))
    return slugs.pop() if len(slugs) == 1 else PLACEHOLDER


def read_remote(root: Path) -> str:
    """Return the repository of the git remote ``origin``, as ``owner/name``.

    Raises:
        ValueError: there is no such remote, or it is not on GitHub.
    """
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        raise ValueError(
            "There is no git. Name your repository: make badges REPO=owner/name"
        ) from None
    if done.returncode:
        raise ValueError(
            "This checkout has no git remote called origin. "
            "Name your repository: make badges REPO=owner/name"
        )
    address = done.stdout.strip()
    match = re.search(rf"{_REMOTE.pattern}$", address)
    if match is None:
        raise ValueError(
            f"The git remote origin is {address}, which is not on GitHub. "
            "Name a repository there: make badges REPO=owner/name"
        )
    return match[1]


def set_badges(root: Path, slug: str, ref: str = "") -> list[Path]:
    """Replace the repository's name in every link to it; links to other repositories stay.

    Args:
        root: the checkout.
        slug: the repository, as ``owner/name``.
        ref: the tag that badges open and that is installed; empty leaves both as they are.
    """
    if not re.fullmatch(SLUG, slug) or slug.endswith((".git", "/.", "/..")):
        raise ValueError(
            f"{slug!r} is no name of a repository on GitHub. Give owner/name: make badges "
            "REPO=owner/name"
        )
    if ref and not re.fullmatch(REF, ref):
        raise ValueError(
            f"{ref!r} is no tag, such as v1.0. Give one: make badges REPO=owner/name REF=v1.0"
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
        new = _set_rows(new, path.stem, slug, ref)
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


def _set_rows(text: str, name: str, slug: str, ref: str) -> str:
    """Write the badges below the title of a notebook, and in the last column of the README's
    table.
    """

    def choose_ref(old: str) -> str:
        match = re.search(rf"/blob/({REF})/", old)
        return ref or (match[1] if match else "main")

    def write_row(row: re.Match[str]) -> str:
        badges = write_badges(row[2], slug, choose_ref(row[3]))
        if slug == PLACEHOLDER:
            badges = f"[read it](notebooks/{row[2]}.ipynb), or upload it: `make workshop`"
        return f"{row[1]}{badges}{row[4]}"

    def write_line(line: re.Match[str]) -> str:
        return f'"{write_badges(name, slug, choose_ref(line[1]))}{line[2]}'

    return _TITLE_LINE.sub(write_line, _ROW.sub(write_row, text))


def main(arguments: list[str]) -> int:
    """Set the badges from a terminal; returns the exit status."""
    slug = arguments[0] if arguments else ""
    ref = arguments[1] if len(arguments) > 1 else ""
    try:
        files = set_badges(ROOT, slug or read_remote(ROOT), ref)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [f"changed {path.relative_to(ROOT)}" for path in files]
    print("\n".join(lines) or "nothing to change")
    if ref:
        print("Now commit, and push the commit with its tag:")
        print(f"git tag {ref}; git push origin HEAD {ref}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
