"""Publish the notebooks that the badges open. The workflow `.github/workflows/notebooks.yml` calls
this at each push to `main` and at each tag; with your own access to the remote it works by hand.

Usage: python -m tools.publish_notebooks OWNER/NAME refs/heads/main | refs/tags/TAG
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from colab_utils.errors import ColabUtilsError
from tools.cells import ROOT, set_badges, write_workshop
from tools.command import print_result

__all__ = ["main", "publish_notebooks"]

_BRANCH = "colab"
_REF = re.compile(r"refs/(?:heads/main|tags/(\w[\w.-]{0,98}))", re.ASCII)
_SUBJECT = "Notebooks that carry the package"
_README = """\
# Open a notebook on Colab

| notebook | open |
|---|---|
{rows}

Each notebook carries the package, and asks for nothing. A workflow makes these files: change those
of the branch `main`.
"""


def publish_notebooks(root: Path, slug: str, ref: str) -> list[str]:
    """Name the repository on ``main``, and push a branch of notebooks that carry the package:
    ``colab``, or ``colab-TAG`` for a tag. What is the same already is not pushed.

    The work is done in a checkout of its own: yours stays as it is.

    Args:
        root: the checkout, with a remote ``origin``. What the branch holds is left in its folder
            ``runs/published``.
        slug: the repository, as ``owner/name``.
        ref: ``refs/heads/main``, or ``refs/tags/`` and the name of a tag.

    Returns:
        A line on each thing that was done, or refused.

    Raises:
        ColabUtilsError: the repository's name or the ref is none, the wheel cannot be built, or the
            branch cannot be pushed.
    """
    match = _REF.fullmatch(ref)
    if match is None:
        raise ColabUtilsError(
            f"{ref!r} is no ref to publish. Give refs/heads/main, or refs/tags/ and a tag, such as "
            "v1.0."
        )
    tag = match[1]
    branch = f"{_BRANCH}-{tag}" if tag else _BRANCH
    content = root / "runs" / "published"
    shutil.rmtree(content, ignore_errors=True)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        _run_git(root, "worktree", "add", "--quiet", "--detach", str(checkout), ref)
        commit = _run_git(checkout, "rev-parse", "HEAD")
        if set_badges(checkout, slug) and not tag:
            lines.append(_push_name(checkout, slug))
        _write_content(content, checkout, branch)
        lines.append(_push_content(checkout, content, branch, f"of {ref} at {commit}"))
    _run_git(root, "worktree", "prune")
    return lines


def _push_name(checkout: Path, slug: str) -> str:
    """Commit the repository's name and push it to ``main``, which may be protected."""
    _run_git(checkout, "commit", "--quiet", "--all", "-m", f"Name this repository: {slug}")
    try:
        _run_git(checkout, "push", "--quiet", "origin", "HEAD:refs/heads/main")
    except ColabUtilsError as error:
        return (
            f"main keeps its old badges, because {error} By hand: make badges REPO={slug}, then "
            "commit and push."
        )
    return f"main names {slug}"


def _write_content(content: Path, checkout: Path, branch: str) -> None:
    """Write what the branch holds: the notebooks, and a page with their badges."""
    rows = []
    for path in sorted(checkout.glob("notebooks/*.ipynb")):
        text = path.read_text(encoding="utf-8").replace(
            f"/blob/{_BRANCH}/notebooks/", f"/blob/{branch}/notebooks/"
        )
        path.write_text(text, encoding="utf-8")
        heading, *_, badges = "".join(json.loads(text)["cells"][0]["source"]).splitlines()
        rows.append(f"| {heading.lstrip('# ')} | {badges} |")
    write_workshop(content / "notebooks", root=checkout)
    page = _README.format(rows="\n".join(rows))
    (content / "README.md").write_text(page, encoding="utf-8")


def _push_content(checkout: Path, content: Path, branch: str, origin: str) -> str:
    """Push a folder as a branch of one commit, so that its history does not grow by two megabytes
    at each push. A branch of that name that this tool has not made is left alone.
    """
    name = f"refs/heads/{branch}"
    tree = _write_tree(checkout, content)
    listed = _run_git(checkout, "ls-remote", "origin", name).split()
    old = listed[0] if listed else ""
    if old:
        _run_git(checkout, "fetch", "--quiet", "origin", name)
        if not _run_git(checkout, "log", "-1", "--format=%s", old).startswith(_SUBJECT):
            raise ColabUtilsError(
                f"The branch {branch} holds somebody's own work. Rename it, then publish again."
            )
        if _run_git(checkout, "rev-parse", f"{old}^{{tree}}") == tree:
            return f"{branch} has these notebooks already"
    commit = _run_git(checkout, "commit-tree", tree, "-m", f"{_SUBJECT}, {origin}")
    lease = f"--force-with-lease={name}:{old}"
    _run_git(checkout, "push", "--quiet", lease, "origin", f"{commit}:{name}")
    return f"{branch} has new notebooks"


def _write_tree(checkout: Path, content: Path) -> str:
    """Put a folder into the repository's objects; returns the name of its tree."""
    command = ("--git-dir", str(checkout / ".git"), "--work-tree", ".")
    _run_git(content, *command, "read-tree", "--empty")
    _run_git(content, *command, "add", "--all", "--force", ".")
    return _run_git(content, *command, "write-tree")


def _run_git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reasons = re.findall(r"^(?:.*! |fatal: |error: )(.*)", done.stderr, re.MULTILINE)
        # An address may hold a token.
        reason = re.sub(r"//[^/@\s]*@", "//", (reasons or ["it gave no reason"])[0])
        raise ColabUtilsError(f"git {arguments[0]} failed: {reason.rstrip('.')}.")
    return done.stdout.strip()


def main(arguments: Sequence[str]) -> int:
    """Publish from a terminal; returns the exit status."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return print_result(lambda: "\n".join(publish_notebooks(ROOT, *arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
