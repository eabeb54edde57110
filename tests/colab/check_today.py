"""Whether all still works with the packages that Colab has today, by the lists that it publishes.

A workflow runs this each week. Where it fails, it opens an issue, unless one is open from before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from colab_utils.errors import ColabUtilsError
from tests.colab.environments import ROOT
from tests.colab.runtimes import parse_list, read_runtimes

__all__ = ["fetch_list", "list_changes", "main", "open_issue"]

ADDRESS = "https://raw.githubusercontent.com/googlecolab/backend-info/main"
TITLE = "The packages that Colab has today fail"
CHECKS = ("tests.colab.run_overlay", "tests.colab.run_scenarios")
_LAST_LINES = 60


def fetch_list(address: str) -> str:
    """Return today's list of packages, followed by that of the system, which names Python.

    Args:
        address: of the folder that has both.

    Raises:
        ColabUtilsError: one cannot be had.
    """
    texts = []
    for name in ("pip-freeze.txt", "os-info.txt"):
        try:
            with urllib.request.urlopen(f"{address}/{name}", timeout=60) as answer:
                texts.append(answer.read().decode())
        except OSError as error:
            raise ColabUtilsError(
                f"Colab's list {address}/{name} cannot be had: {error}. Nothing was tested; run "
                "this again later, or look for the list's new address."
            ) from None
    return "\n".join(texts)


def list_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a line for each package whose version is another one now."""
    return [
        f"{name}: {old.get(name, 'none')} before, {version} now"
        for name, version in sorted(new.items())
        if old.get(name) != version
    ]


def run_checks(path: Path) -> list[str]:
    """Run the checks with a list; return what the failed ones printed last.

    Args:
        path: of the list.
    """
    reports = []
    for module in CHECKS:
        command = [sys.executable, "-m", module, "--runtime", str(path)]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout, flush=True)
        if done.returncode:
            lines = done.stdout.splitlines()[-_LAST_LINES:]
            title = f"`python -m {module}` ended with status {done.returncode}:"
            reports.append("\n".join([title, "```", *lines, "```"]))
    return reports


def open_issue(body: str) -> str:
    """Open an issue by GitHub's command ``gh``, unless one of this title is open; return what was
    done.

    Args:
        body: its text.

    Raises:
        ColabUtilsError: ``gh`` is missing or fails.
    """
    listed = _run_gh("list", "--state", "open", "--limit", "500", "--json", "number,title")
    for issue in json.loads(listed):
        if issue["title"] == TITLE:
            return f"Issue {issue['number']} is open from before."
    return _run_gh("create", "--title", TITLE, "--body", body).strip()


def _run_gh(*arguments: str) -> str:
    try:
        done = subprocess.run(["gh", "issue", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise ColabUtilsError(
            "No issue was opened: GitHub's command gh is missing. Install it, or open one by hand."
        ) from None
    if done.returncode:
        raise ColabUtilsError(
            f"No issue was opened: gh issue {arguments[0]} failed: {done.stderr.strip()}. Open one "
            "by hand."
        )
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Check from a terminal; returns 0 where all passed, 1 where something failed, and 2 where
    nothing could be tested or no issue could be opened.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.colab.check_today", description=__doc__)
    parser.add_argument("--lists", metavar="URL", default=ADDRESS, help="folder of Colab's lists")
    parser.add_argument("--work", metavar="DIR", type=Path, default=ROOT / "runs" / "today")
    parser.add_argument("--issue", action="store_true", help="open an issue where it fails")
    options = parser.parse_args(arguments)
    try:
        text = fetch_list(options.lists)
        changes = list_changes(read_runtimes()["now"], parse_list(text))
        print("\n".join(changes) or "Colab has the versions that runtimes.txt names.")
        options.work.mkdir(parents=True, exist_ok=True)
        path = options.work / "today.txt"
        path.write_text(text, encoding="utf-8")
        reports = run_checks(path)
        if reports and options.issue:
            print(open_issue("\n\n".join(["Changed since runtimes.txt:", *changes, *reports])))
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
