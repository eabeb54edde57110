"""The window over a JSON file gives what json.loads gives, wherever a piece of the file ends."""

import io
import json

import pytest
import xxhash

from colab_utils.data import json_window
from colab_utils.data.json_window import JsonWindow

VALUES = [
    1,
    -1.5e-7,
    1.5e300,
    True,
    None,
    float("inf"),
    float("-inf"),
    "",
    'quotes " and \\ and \u00e4\u65e5\U0001f600',
    "a" * 100,
    [],
    {},
    [[1, 2], {"a": [3.25, None]}],
    {"key": "value", "b": {"c": []}},
]


def make_window(monkeypatch, content: bytes, piece_bytes: int) -> JsonWindow:
    monkeypatch.setattr(json_window, "_PIECE_BYTES", piece_bytes)
    return JsonWindow(io.BytesIO(content))


def read_list(window: JsonWindow) -> list:
    mark = window.read_mark("[")
    values = []
    while mark != "]":
        values.append(window.read_value()[0])
        mark = window.read_mark(",]")
    assert window.is_at_end()
    return values


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("piece_bytes", [4, 5, 7, 64, 10_000])
@pytest.mark.parametrize("indent", [None, 3])
def test_values_are_those_of_json(monkeypatch, encoding, piece_bytes, indent):
    content = json.dumps(VALUES, indent=indent, ensure_ascii=False).encode(encoding)
    window = make_window(monkeypatch, content, piece_bytes)
    assert read_list(window) == VALUES
    assert window.fingerprint == xxhash.xxh3_128_hexdigest(content)
    assert window.length == len(content.decode(encoding))


@pytest.mark.parametrize("space", range(40))
def test_a_number_may_end_at_any_place_of_a_piece(monkeypatch, space):
    content = b"[" + b" " * space + b"-123.5e+10, -Infinity, 1.25E-3 ]"
    window = make_window(monkeypatch, content, 4)
    assert read_list(window) == [-123.5e10, float("-inf"), 1.25e-3]


def test_the_text_of_a_value_is_that_of_the_file(monkeypatch):
    window = make_window(monkeypatch, b'[ {"a" :  1.50} , "\\u00e4" ]', 4)
    window.read_mark("[")
    assert window.read_value() == ({"a": 1.5}, '{"a" :  1.50}')
    window.read_mark(",")
    assert window.read_value() == ("\u00e4", '"\\u00e4"')


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"[1, x" + b" " * 5000, 4),
        (b'[1, {"a": 1,, "b": 2}' + b" " * 5000, 12),
        (b'[1, "never ends' + b" " * 5000, 4),
    ],
)
@pytest.mark.parametrize("piece_bytes", [4, 64])
def test_an_error_names_its_place_in_the_file(monkeypatch, content, place, piece_bytes):
    window = make_window(monkeypatch, content, piece_bytes)
    window.read_mark("[")
    window.read_value()
    window.read_mark(",")
    with pytest.raises(json.JSONDecodeError) as error:
        window.read_value()
    assert error.value.pos == place


def test_a_fault_is_told_without_reading_on(monkeypatch):
    content = b"[1, x" + b" " * 1_000_000
    window = make_window(monkeypatch, content, 64)
    window.read_mark("[")
    window.read_value()
    window.read_mark(",")
    with pytest.raises(json.JSONDecodeError):
        window.read_value()
    assert window.length < 200


def test_a_value_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(json_window, "_LONGEST_VALUE", 1000)
    window = make_window(monkeypatch, b'["' + b"a" * 5000 + b'"]', 64)
    window.read_mark("[")
    with pytest.raises(ValueError, match="too long"):
        window.read_value()
