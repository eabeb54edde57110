"""What reaches a terminal: one line, and no character that steers it."""

import ast
import errno
import os
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from colab_utils import errors
from colab_utils.__main__ import main
from colab_utils.errors import (
    ColabUtilsError,
    ColabUtilsWarning,
    describe_error,
    escape,
    explain_os_error,
)

ROOT = Path(__file__).parents[1]
HOSTILE = "a\x1b[2J\x07\r\nerror: b\u202egpj.exe\u2066\x85\u2028\x9bc\udc80\x7f\u200f\u061c\x00.jpg"
# The joiners hold emoji together.
KEPT = "café cafe\u0301 猫 ねこ 👩\u200d👧 🇫🇷 ☀\ufe0f Ελ.jpg"


def is_safe(text):
    return not any(
        unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}
        or unicodedata.bidirectional(char)
        in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
        for char in text
    )


class Hostile:
    def __len__(self):
        return 4

    def __getitem__(self, _):
        raise ColabUtilsError(f"expected an image in {HOSTILE}, found none")


def test_every_control_character_is_escaped_and_all_letters_stay():
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        assert is_safe(escape(char)), hex(code)
        if unicodedata.category(char)[0] in "LMNPS" or char in "\u200c\u200d\ufe0f ":
            assert escape(char) == char
    assert escape(KEPT) == KEPT
    assert escape("a\nb\u202ec") == r"a\nb\u202ec"
    # This space looks like the usual one, and is another character of a name.
    assert escape("a\xa0b") == r"a\xa0b"
    assert escape(escape(HOSTILE)) == escape(HOSTILE)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HTTP://u:p@h/a.zip?k=v cannot be read.", "HTTP://h/a.zip cannot be read."),
        ("url='https://h/a?X-Sig=b%2Fc&d=e', tries", "url='https://h/a', tries"),
        # A password may hold the sign itself.
        ("sftp://u:p@ss@h:22/x and smb://u@h/y", "sftp://h:22/x and smb://h/y"),
        # A key in a bucket may hold both signs.
        ("s3://bucket/a@b/scan?1.jpg", "s3://bucket/a@b/scan?1.jpg"),
        ("me@h.org asks: C:/a@b?c", "me@h.org asks: C:/a@b?c"),
    ],
)
def test_of_a_url_only_host_and_path_are_shown(text, shown):
    assert escape(text) == str(ColabUtilsError(text)) == str(ColabUtilsWarning(text)) == shown
    assert describe_error(ValueError(text)) == f"ValueError: {shown}"


def test_notebooks_and_reports_show_one_line():
    assert is_safe("".join(ColabUtilsError(HOSTILE)._render_traceback_()))
    assert is_safe(describe_error(ValueError("\x1b[31m\u202ebad")))


def test_the_error_of_a_workers_dataset_keeps_the_lines_of_torch():
    with pytest.raises(ColabUtilsError) as caught:
        next(iter(DataLoader(Hostile(), num_workers=1)))
    lines = str(caught.value).split("\n")
    assert len(lines) > 3
    assert all(map(is_safe, lines))
    assert describe_error(caught.value) == escape(f"expected an image in {HOSTILE}, found none")


def test_the_command_line_shows_no_control_character(tmp_path, capsys, tiny_dataset):
    name = "no\x1b[2J\u202e.json\n"
    for words in (
        ["verify", "--shards", tmp_path / name],
        ["verify", "--shards", tmp_path, name],
        ["check" + name],
    ):
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit_:
            status = exit_.code
        shown = capsys.readouterr().err
        assert status == 2
        assert shown.count("\n") == 1
        assert is_safe(shown.rstrip("\n"))


def list_texts():
    """Yield the texts of each module of the package, joined."""
    for path in (ROOT / "colab_utils").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
        yield "\n".join(value for value in constants if isinstance(value, str))


def test_the_page_about_errors_quotes_messages_as_they_are_printed():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `([^`]+)`", page, re.MULTILINE)
    assert len(headings) == 10
    texts = list(list_texts())
    for quote in headings + re.findall(r"(?:the message is|says) `([^`]+)`", page):
        parts = [part.strip() for part in quote.split("...")]
        assert max(map(len, parts)) >= 15, f"{quote!r} could be any message"
        assert any(all(part in text for part in parts) for text in texts), (
            f"no message says {quote!r}: docs/errors.md is out of date"
        )


@pytest.mark.parametrize("name", list(errors._CURES))
def test_every_cure_is_of_a_real_error_and_follows_what_the_system_says(name):
    number = getattr(errno, name)
    text = explain_os_error(OSError(number, os.strerror(number)), "Ask somebody.")
    assert text.startswith(f"{os.strerror(number)}. ")
    assert text.endswith(".")
    assert "Ask somebody" not in text
