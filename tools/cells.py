"""What is written into cells of the notebooks: the setup cell, whose text is in ``setup_cell.txt``;
the drawings of ``docs/drawings``; the repository that badges and addresses name; and, for a class,
the package itself.

Usage: python -m tools.cells setup | badges OWNER/NAME | workshop [DIR]
"""

from __future__ import annotations

import base64
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from colab_utils.errors import ColabUtilsError
from tools.command import print_result

__all__ = [
    "PLACEHOLDER",
    "ROOT",
    "build_wheel",
    "carry_wheel",
    "embed_drawings",
    "find_slugs",
    "list_files",
    "main",
    "read_setup_cell",
    "read_slug",
    "set_badges",
    "set_title",
    "write_setup_cells",
    "write_workshop",
]

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "OWNER/REPO"
_TEXT = Path(__file__).with_name("setup_cell.txt")
_SLUG = r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}/[A-Za-z0-9._-]{1,100}"
_END = r"(?=/blob/|\.git\b|[\s\"'`\\)])"
_MARKS = re.compile(
    rf"(?:colab\.research\.google\.com/github/|git\+https://github\.com/)({_SLUG}?){_END}"
)
"""The two places that name our repository: a badge, and the install line."""
_BADGE = re.compile(r"^\[!\[Open In Colab\].*\n?", re.MULTILINE)
_SOURCE = re.compile(r"^SOURCE = .*$", re.MULTILINE)
_DRAWING = re.compile(r"\((?:data:image/svg\+xml;base64,\S*|\S*\.svg) \"(\w+)\"\)")
"""The address of a drawing in a cell, with its name as the title."""
_PARTS = ("pyproject.toml", "README.md", "LICENSE", "requirements.txt")


def read_setup_cell() -> str:
    """Return the text of the cell that starts every notebook."""
    return _TEXT.read_text(encoding="utf-8").rstrip("\n")


def _write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook the one way that leaves no difference where nothing changed."""
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def embed_drawings(text: str, root: Path) -> str:
    """Return the text of a cell with its drawings inside, since Colab opens a notebook alone.

    Args:
        text: of a Markdown cell; ``![what is drawn](queue.svg "queue")`` names a drawing.
        root: the checkout, with the folder ``docs/drawings``.
    """

    def encode(match: re.Match[str]) -> str:
        drawing = (root / "docs" / "drawings" / f"{match[1]}.svg").read_bytes()
        return f'(data:image/svg+xml;base64,{base64.b64encode(drawing).decode()} "{match[1]}")'

    return _DRAWING.sub(encode, text)


def write_setup_cells(root: Path) -> list[Path]:
    """Put the text into the cell ``setup`` of each notebook, and drawings into the others; return
    the notebooks that changed.

    Args:
        root: the checkout, with the folders ``notebooks`` and ``docs/drawings``.
    """
    changed = []
    for path in sorted(root.glob("notebooks/*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        before = [cell["source"] for cell in notebook["cells"]]
        for cell in notebook["cells"]:
            text = embed_drawings("".join(cell["source"]), root)
            if cell["id"] == "setup":
                text = read_setup_cell()
            cell["source"] = text.splitlines(keepends=True)
        if [cell["source"] for cell in notebook["cells"]] != before:
            _write_notebook(path, notebook)
            changed.append(path)
    return changed


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
        ColabUtilsError: the name is not that of a repository on GitHub.
    """
    if not re.fullmatch(_SLUG, slug) or slug.endswith((".git", "/.", "/..")):
        raise ColabUtilsError(
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


def build_wheel(folder: Path, *, root: Path = ROOT) -> Path:
    """Build the package's wheel with what this environment has, without a network.

    The build runs in a copy: in the checkout it would leave folders behind, whose old files the
    next wheel would hold.

    Args:
        folder: where the wheel is put.
        root: the checkout.

    Raises:
        ColabUtilsError: setuptools is missing or too old.
    """
    with tempfile.TemporaryDirectory() as copy:
        for name in _PARTS:
            shutil.copy(root / name, copy)
        shutil.copytree(
            root / "colab_utils",
            Path(copy, "colab_utils"),
            ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
        )
        offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", *offline]
        done = subprocess.run(
            [*pip, "--wheel-dir", str(folder), copy],
            capture_output=True,
            text=True,
            env={**os.environ, "SOURCE_DATE_EPOCH": "1600000000"},
        )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "rror" in line]
        reason = lines[-1] if lines else "pip failed"
        raise ColabUtilsError(
            f"The wheel cannot be built without pip and setuptools 77 or newer: {reason}. Install "
            "them: pip install pip 'setuptools>=77'"
        )
    return next(iter(folder.glob("colab_utils-*.whl")))


def carry_wheel(source: str, wheel: Path) -> str:
    """Return the setup cell with a wheel inside.

    Args:
        source: the text of the setup cell.
        wheel: the package, as `build_wheel` makes it.

    Raises:
        ColabUtilsError: the cell has no line ``SOURCE = ...``.
    """
    text = base64.b64encode(_squeeze(wheel)).decode()
    lines = "\n".join(text[at : at + 1000] for at in range(0, len(text), 1000))
    carried = (
        f"import base64\nimport lzma\nimport tempfile\n\nWHEEL = '''\n{lines}\n'''\n"
        f'SOURCE = str(Path(tempfile.mkdtemp(), "{wheel.name}"))\n'
        "Path(SOURCE).write_bytes(lzma.decompress(base64.b64decode(WHEEL)))"
    )
    carrying, count = _SOURCE.subn(lambda _: carried, source)
    if count != 1:
        raise ColabUtilsError(
            f"The setup cell has {count} lines SOURCE = ..., and needs one. Run make setup-cells."
        )
    return carrying


@cache
def _squeeze(wheel: Path) -> bytes:
    """Return the wheel with its files as they are, compressed as a whole: a quarter less than file
    by file.
    """
    plain = io.BytesIO()
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(plain, "w") as stored:
        for info in packed.infolist():
            stored.writestr(zipfile.ZipInfo(info.filename, info.date_time), packed.read(info))
    return lzma.compress(plain.getvalue(), preset=9)


def write_workshop(output: Path, *, root: Path = ROOT) -> list[Path]:
    """Write the notebooks with the package inside; those of an earlier call are replaced.

    Args:
        output: the folder for them; made where it is not.
        root: the checkout.

    Raises:
        ColabUtilsError: the wheel cannot be built.
    """
    written = []
    slug = read_slug(root)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder), root=root)
        for path in sorted(root.glob("notebooks/*.ipynb")):
            notebook = json.loads(path.read_text(encoding="utf-8"))
            title = notebook["cells"][0]
            setup = next(cell for cell in notebook["cells"] if cell["id"] == "setup")
            title["source"] = set_title("".join(title["source"]), slug).splitlines(keepends=True)
            setup["source"] = carry_wheel("".join(setup["source"]), wheel).splitlines(keepends=True)
            # Colab folds the cell, and Jupyter hides it.
            setup["metadata"]["jupyter"] = {"source_hidden": True}
            _write_notebook(output / path.name, notebook)
            written.append(output / path.name)
    return written


def main(arguments: Sequence[str]) -> int:
    """Write cells from a terminal; returns the exit status."""
    return print_result(lambda: _run(list(arguments)))


def _run(arguments: list[str]) -> str:
    match arguments:
        case ["setup"]:
            changed = write_setup_cells(ROOT)
        case ["badges", slug]:
            changed = set_badges(ROOT, slug)
        case ["workshop", *folder]:
            paths = write_workshop(Path(*folder or ("runs/workshop",)))
            sizes = [f"{path} ({path.stat().st_size / 1000:.0f} kB)\n" for path in paths]
            return (
                f"{''.join(sizes)}Hand these out. Colab opens one with File > Upload notebook; "
                "Jupyter opens it as it is."
            )
        case _:
            raise ColabUtilsError(
                f"{' '.join(arguments)!r} is no command. Give setup, badges OWNER/NAME, or "
                "workshop [DIR]."
            )
    lines = [f"changed {path.relative_to(ROOT)}" for path in changed]
    return "\n".join(lines) or "nothing to change"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
