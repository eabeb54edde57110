"""The badges: which repository they name, and the script that publishes what they open."""

import json
import os
import re
import shutil
import subprocess

import pytest

from colab_utils.errors import ColabUtilsError
from tools.cells import ROOT, build_wheel, find_slugs, list_files, read_slug, set_badges
from tools.publish_notebooks import main, publish_notebooks

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BADGE = (
    "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{}/blob/colab/notebooks/01_a.ipynb)"
)
MAIN = "refs/heads/main"


def test_readme_and_notebooks_name_one_repository():
    names = {path.name: find_slugs(path.read_text(encoding="utf-8")) for path in list_files(ROOT)}
    for name in ("README.md", *(path.name for path in NOTEBOOKS)):
        assert len(names[name]) == 1, f"{name} names {names[name] or 'no repository'}"
    assert set().union(*names.values()) == {read_slug(ROOT)}


def test_the_readme_has_a_badge_for_each_notebook():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    addresses = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE))
    rows = re.findall(
        r"^\| \[.*\]\((notebooks/\w+\.ipynb)\) .*\[!\[Open In Colab\]\[badge\]\]\[([\w-]+)\] \|$",
        text,
        re.MULTILINE,
    )
    assert [path for path, _ in rows] == [f"notebooks/{path.name}" for path in NOTEBOOKS]
    for path, label in rows:
        site = "https://colab.research.google.com/github"
        assert addresses[label] == f"{site}/{read_slug(ROOT)}/blob/colab/{path}"


def test_set_badges_changes_ours_and_leaves_others(tmp_path):
    (tmp_path / "notebooks").mkdir()
    notebook = tmp_path / "notebooks" / "01_a.ipynb"
    readme = tmp_path / "README.md"
    notebook.write_text(json.dumps({"source": [BADGE.format("OWNER/REPO")]}))
    texts = (
        "[open](https://colab.research.google.com/github/{0}/blob/colab/a.ipynb) git clone "
        "https://github.com/{0}.git, https://github.com/OWNER/REPO-old, "
        "https://github.com/googlecolab/colabtools, `pip install git+https://github.com/{0}`"
    )
    readme.write_text(texts.format("OWNER/REPO"))
    for slug in ("me-2/fast.data", "you/next"):
        assert set_badges(tmp_path, slug) == [notebook, readme]
        assert json.loads(notebook.read_text())["source"] == [BADGE.format(slug)]
        assert readme.read_text() == texts.format(slug)
        assert set_badges(tmp_path, slug) == []


@pytest.mark.parametrize(
    "slug",
    [
        # Somebody forgot REPO.
        "",
        # The owner is missing.
        "fast",
        # This is an address.
        "https://github.com/me/fast",
        # The clone address ends like this.
        "me/fast.git",
        # This is a path.
        "me/..",
        # A regular expression would replace the end of this.
        "me/fast\\1",
    ],
)
def test_a_slug_that_is_none_is_refused(tmp_path, slug):
    with pytest.raises(ColabUtilsError, match="is no name of a repository"):
        set_badges(tmp_path, slug)


def run_git(folder, command):
    done = subprocess.run(
        ["git", "-C", str(folder), *command.split()], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def read_refs(remote):
    lines = run_git(remote, "for-each-ref --format=%(objectname)=%(refname)").splitlines()
    return {ref: commit for commit, ref in (line.split("=") for line in lines)}


def read_badges(remote, branch, path="README.md"):
    text = run_git(remote, f"show {branch}:{path}")
    return set(re.findall(r"colab\.research\.google\.com/github/([^)\s]*)/notebooks/", text))


@pytest.fixture
def remote(tmp_path):
    run_git(tmp_path, "init --quiet --bare remote.git")
    return tmp_path / "remote.git"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def checkout(remote, wheel, tmp_path, monkeypatch):
    """A copy of this repository with a tag; its remote lies beside it and holds main. Its wheel is
    built already.
    """
    monkeypatch.setattr("tools.cells.build_wheel", lambda folder, *, root: wheel)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "me")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "me@example.org")
    folder = tmp_path / "checkout"
    for name in ("colab_utils", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", "*checkpoints")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("README.md", "LICENSE", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    set_badges(folder, "OWNER/REPO")
    for command in (
        "init --quiet --initial-branch=main",
        f"remote add origin {remote}",
        "add .",
        "commit --quiet -m Begin",
        "tag v1.0",
        "push --quiet origin main v1.0",
    ):
        run_git(folder, command)
    return folder


def test_a_wheel_is_the_same_again(wheel, tmp_path):
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_a_push_names_the_repository_the_next_changes_nothing_and_a_fork_follows(checkout, remote):
    lines = publish_notebooks(checkout, "me/fast", MAIN)
    assert lines == ["main names me/fast", "colab has new notebooks"]
    assert run_git(remote, "rev-list --count main") == "2"
    assert run_git(remote, "rev-list --count colab") == "1"
    held = run_git(remote, "ls-tree -r --name-only colab").split()
    assert held == ["README.md", *(f"notebooks/{path.name}" for path in NOTEBOOKS)]
    for path in held:
        assert read_badges(remote, "colab", path) == {"me/fast/blob/colab"}
    assert read_badges(remote, "main") == {"me/fast/blob/colab"}
    for path in held[1:]:
        cells = json.loads(run_git(remote, f"show colab:{path}"))["cells"]
        setup = next(cell for cell in cells if cell["id"] == "setup")
        assert "WHEEL = '''" in "".join(setup["source"])
    # The checkout itself is as it was.
    assert run_git(checkout, "status --porcelain") == "?? runs/"
    assert run_git(checkout, "worktree list").count("\n") == 0

    run_git(checkout, "pull --quiet origin main")
    before = read_refs(remote)
    lines = publish_notebooks(checkout, "me/fast", MAIN)
    assert lines == ["colab has these notebooks already"]
    assert read_refs(remote) == before

    lines = publish_notebooks(checkout, "you/next", MAIN)
    assert lines == ["main names you/next", "colab has new notebooks"]
    for branch in ("main", "colab"):
        assert read_badges(remote, branch) == {"you/next/blob/colab"}
    assert "me/fast" not in run_git(remote, "show main:README.md")
    # The name stands in few lines, so that the fork can take what comes from upstream.
    changed = run_git(remote, "diff --numstat main~1 main").splitlines()
    assert sum(int(line.split()[0]) for line in changed) <= 12


def test_where_main_takes_no_push_the_notebooks_are_pushed_all_the_same(checkout, remote):
    hook = remote / "hooks" / "update"
    hook.write_text('#!/bin/sh\ntest "$1" != refs/heads/main\n')
    hook.chmod(0o755)
    refused, pushed = publish_notebooks(checkout, "me/fast", MAIN)
    assert refused.startswith("main keeps its old badges, because git push failed: ")
    assert "hook declined" in refused
    assert "make badges REPO=me/fast" in refused
    assert "\n" not in refused
    assert pushed == "colab has new notebooks"
    assert run_git(remote, "rev-list --count main") == "1"
    assert read_badges(remote, "colab") == {"me/fast/blob/colab"}


def test_a_branch_of_somebody_else_is_left_alone(checkout, remote):
    run_git(checkout, "push --quiet origin main:colab")
    with pytest.raises(ColabUtilsError, match="The branch colab holds somebody's own work"):
        publish_notebooks(checkout, "me/fast", MAIN)
    assert run_git(remote, "log -1 --format=%s colab") == "Begin"


@pytest.mark.parametrize("ref", ["main", "refs/heads/feature", "refs/tags/v1 0", "refs/tags/-v1"])
def test_a_ref_that_is_none_is_refused_in_one_line(capsys, ref):
    assert main(["me/fast", ref]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {ref!r} is no ref to publish")
    assert printed.count("\n") == 1


def test_a_token_in_an_address_is_not_printed(checkout):
    run_git(checkout, "remote set-url origin https://secret@localhost:9/me/fast")
    with pytest.raises(ColabUtilsError, match="git ls-remote failed") as caught:
        publish_notebooks(checkout, "me/fast", "refs/tags/v1.0")
    assert "secret" not in str(caught.value)


@pytest.fixture(scope="module")
def workflow():
    yaml = pytest.importorskip("yaml")
    path = ROOT / ".github" / "workflows" / "notebooks.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_workflow_calls_the_script_by_an_argument_list(workflow):
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "write"}
    assert workflow["permissions"] == {}
    commands = [step["run"] for step in job["steps"] if "run" in step]
    # What others may name, such as a tag, comes from the environment and is quoted.
    assert not any("${{" in command for command in commands)
    assert 'python -m tools.publish_notebooks "$GITHUB_REPOSITORY" "$GITHUB_REF"' in commands
    for step in job["steps"]:
        assert re.fullmatch(r"actions/[a-z-]+@v[0-9]+", step.get("uses", "actions/checkout@v4"))


def test_a_tag_has_a_branch_and_a_release_of_its_own(workflow, checkout, remote, tmp_path):
    """The release's own commands, with a `gh` that notes its arguments."""
    before = read_refs(remote)
    lines = publish_notebooks(checkout, "me/fast", "refs/tags/v1.0")
    assert lines == ["colab-v1.0 has new notebooks"]
    after = read_refs(remote)
    assert after.pop("refs/heads/colab-v1.0")
    assert after == before
    for path in ("README.md", f"notebooks/{NOTEBOOKS[0].name}"):
        assert read_badges(remote, "colab-v1.0", path) == {"me/fast/blob/colab-v1.0"}
    (job,) = workflow["jobs"].values()
    log = tmp_path / "log"
    tool = tmp_path / "bin" / "gh"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {log}\ntest "$2" != view\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-e", "-c", job["steps"][-1]["run"]],
        cwd=checkout,
        check=True,
        env={**os.environ, "PATH": path, "GITHUB_REF_NAME": "v1.0"},
    )
    names = " ".join(f"runs/published/notebooks/{path.name}" for path in NOTEBOOKS)
    assert log.read_text().splitlines() == [
        "release view v1.0",
        "release create v1.0 --verify-tag --notes-file runs/published/README.md",
        f"release upload v1.0 --clobber {names}",
    ]
    # These files hang on the release.
    assert (checkout / "runs" / "published" / "README.md").is_file()
    published = checkout / "runs" / "published" / "notebooks"
    assert sorted(path.name for path in published.iterdir()) == [path.name for path in NOTEBOOKS]
