"""Write what ``--help`` prints into ``docs/COMMANDS.md``: ``python -m tools.write_commands``."""

import os
import re
import subprocess
import sys

from tools.cells import ROOT

__all__ = ["PAGE", "main", "write_page"]

PAGE = ROOT / "docs" / "COMMANDS.md"
_SECTION = re.compile(r"(?<=^## )(\w+)\n\n```\n.*?^```$", re.MULTILINE | re.DOTALL)


def write_page(page: str) -> str:
    """Return the page with the help of each command under the heading of its name."""
    return _SECTION.sub(_write_section, page)


def _write_section(section: re.Match[str]) -> str:
    name = section[1]
    shown = subprocess.run(
        [sys.executable, "-m", "colab_utils", name, "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        check=True,
        text=True,
    )
    return f"{name}\n\n```\n{shown.stdout}```"


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(write_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
