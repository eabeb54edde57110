"""Write the setup cell, whose text is in ``setup_cell.txt``, into the five notebooks: `make
setup-cells`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["print_changes", "read_setup_cell", "write_notebook", "write_setup_cells"]

ROOT = Path(__file__).resolve().parents[1]
TEXT = Path(__file__).with_suffix(".txt")


def read_setup_cell() -> str:
    """Return the text of the cell that starts every notebook."""
    return TEXT.read_text(encoding="utf-8").rstrip("\n")


def write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook the one way that leaves no difference where nothing changed."""
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def write_setup_cells(root: Path) -> list[Path]:
    """Put the text into the cell ``setup`` of each notebook; return the notebooks that changed.

    Args:
        root: the checkout, with the folder ``notebooks``.
    """
    changed = []
    for path in sorted(root.glob("notebooks/*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cell = next(cell for cell in notebook["cells"] if cell["id"] == "setup")
        lines = read_setup_cell().splitlines(keepends=True)
        if cell["source"] != lines:
            cell["source"] = lines
            write_notebook(path, notebook)
            changed.append(path)
    return changed


def print_changes(paths: Sequence[Path]) -> None:
    """Print which files changed."""
    for path in paths:
        print(f"changed {path.relative_to(ROOT)}")
    if not paths:
        print("nothing to change")


if __name__ == "__main__":
    print_changes(write_setup_cells(ROOT))
