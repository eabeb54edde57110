"""docs/errors.md: every error of the package, from the code; and the record of those that the tests raise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.list_errors import PACKAGE, PAGE, WHYS, Site, find_sites, find_unraised, list_all, make_page

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def find_messages(tmp_path):
    """The messages of the sites in a module."""

    def find(code: str, name: str = "module.py") -> list[str]:
        (tmp_path / name).write_text(code)
        return [site.message for site in find_sites(tmp_path) if site.module == name]

    return find


def test_the_page_is_what_the_code_gives():
    page = make_page(list_all(), WHYS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page, "run make errors"


def test_every_line_that_makes_an_error_is_found():
    lines = {(site.module, line) for site in find_sites() for line in site.lines}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("raise ColabUtilsError("):
                assert (module, number) in lines


@pytest.mark.parametrize(
    ("code", "messages"),
    [
        ("raise ColabUtilsError('expected a, found b. Do c.')", ["expected a, found b. Do c."]),
        # names, attributes, calls and constants in a message
        ("raise ColabUtilsError(f'{path}: {error.strerror}, {len(x)} of {INDEX}')\nINDEX, X = 'index.json', 1",
         ["PATH: REASON, NUMBER of index.json"]),
        ("raise ColabUtilsError(f'{type(model).__name__}, {format_bytes(free)}, {chr(10).join(names)}')",
         ["TYPE, SIZE, NAMES"]),
        # what a name stands for: all that it may be
        ("def f():\n if a:\n  found = 'one'\n else:\n  found = f'{b} more'\n raise ColabUtilsError(f'found {found}')",
         ["found one", "found B more"]),
        ("def f():\n found = 'no'\n found = 'one'\n raise ColabUtilsError(found)\n found = 'two'", ["one"]),
        ("raise ColabUtilsError('no ' + ('image' if a else 'record'))", ["no image", "no record"]),
        # a kind of the error, a name for kinds, and a function that makes one
        ("class LostError(ColabUtilsError): ...\nclass GoneError(LostError): ...\nraise GoneError('gone')",
         ["gone"]),
        ("def f():\n kind = ValueError if a else ColabUtilsError\n raise kind('gone')", ["gone"]),
        ("def _expect(found: str) -> ColabUtilsError:\n return ColabUtilsError(f'expected a, found {found}')\n"
         "def f():\n if a: raise _expect('b')\n raise _expect(c)",
         ["expected a, found b", "expected a, found C"]),
        # what explains itself
        ("class Stall:\n def __str__(self): return f'found {self.what}'\n"
         "def f(stall): raise ColabUtilsError(str(stall))",
         ["found WHAT"]),
        ("raise ValueError('expected a, found b')", []),
    ],
)  # fmt: skip
def test_messages_are_read_from_the_code(find_messages, code, messages):
    assert find_messages(code) == messages


def test_a_helper_of_another_module_with_the_same_name_is_another_one(find_messages, tmp_path):
    (tmp_path / "other.py").write_text("def _expect(a: str) -> ColabUtilsError:\n return ColabUtilsError(f'no {a}')")
    assert find_messages("def _expect(a, b) -> str: ...\n_expect(1, 2)") == []


WHY = "Introduction.\n\n# Area | Do it.\nmodule.py | found b | Because of c."


def make_row(*messages: str, whys: str = WHY) -> str:
    return make_page([Site("module.py", range(7, 8), one) for one in messages], whys).splitlines()[-1]


@pytest.mark.parametrize(
    ("message", "row"),
    [
        ("expected a, found b. Do c.", "| `expected a, found b` | Because of c. | Do c. |"),
        ("expected a, found b: do c; or d", "| `expected a, found b` | Because of c. | Do c; or d. |"),
        ("expected a, found b: REASON. Do c.", "| `expected a, found b: REASON` | Because of c. | Do c. |"),
        ("expected a: b, found b", "| `expected a: b, found b` | Because of c. | Do it. |"),
        ("found b|c. See `check`.", r"| `found b\|c` | Because of c. | See `check`. |"),
        ("found b. `check` says it.", "| `found b` | Because of c. | `check` says it. |"),
    ],
)
def test_a_message_is_split_into_what_was_found_and_what_to_do(message, row):
    assert make_row(message) == row


def test_messages_with_the_same_cure_share_a_row_and_a_why_may_say_what_to_do():
    assert make_row("found b here. Do c.", "found b there. Do c.") == (
        "| `found b here`<br>`found b there` | Because of c. | Do c. |"
    )
    assert make_row("found b. Do c.", whys=f"{WHY} | Do d.") == "| `found b` | Because of c. | Do d. |"


@pytest.mark.parametrize(
    ("message", "whys", "fault"),
    [
        ("found x. Do c.", f"{WHY}\nmodule.py | found x | Because.", "no error of module.py says: found b"),
        ("found x. Do c.", "Introduction.\n# Area", "no why for module.py:7: found x"),
        ("found b", WHY.replace(" | Do it.", ""), "not said what to do: module.py: found b"),
        ("found b. Do c.", WHY.replace("module.py", "other.py"), "no why for module.py:7: found b"),
    ],
)
def test_an_error_without_a_why_and_a_why_without_an_error_are_refused(message, whys, fault):
    with pytest.raises(ValueError, match=fault):
        make_row(message, whys=whys)


def test_an_error_that_no_test_raised_is_named(tmp_path):
    sites = [Site("data/coco.py", range(7, 10), "one"), Site("drive.py", range(7, 8), "two")]
    (tmp_path / "data+coco.py:9").touch()
    (tmp_path / "drive.py:8").touch()
    assert find_unraised(sites, tmp_path) == sites[1:]
    told = subprocess.run(
        [sys.executable, "-m", "tools.list_errors", "--raised", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert told.returncode == 1
    assert told.stderr.startswith("error: expected a test for each error of the package, found ")
    assert "\ndrive.py:" in told.stderr
    assert "Traceback" not in told.stderr


def test_errors_are_recorded_where_they_are_made_in_forked_processes_too(tmp_path):
    code = """if True:
        import os, sys
        from pathlib import Path
        from tests.conftest import _record_errors
        from colab_utils.drive import get_profile
        _record_errors(Path(sys.argv[1]))
        if os.fork() == 0:
            get_profile("no such profile")
        os.wait()
    """
    subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    site = next(site for site in find_sites() if "expected a Drive profile" in site.message)
    assert find_unraised([site], tmp_path) == []
