"""Read the text of a JSON file value by value through a window, so that memory holds only a part of
the text.
"""

import codecs
import json
import re
from typing import Any, Protocol

import xxhash

_MARK = re.compile(r"[ \t\n\r]*([][{},:])?[ \t\n\r]*")
# Bytes that one read of the file asks for.
_PIECE_BYTES = 1 << 22
_HEAD_BYTES = 1 << 12
# A value of more characters than this is refused.
_LONGEST_VALUE = 1 << 30
# At the end of the window, a value or an error may change when more text is read: 1.5 may go on as
# 1.5e+7, and -Inf as -Infinity. So it is final only if at least this many characters follow it in
# the window, or if the file has ended.
_TAIL = 16
_decode = json.JSONDecoder().raw_decode


class Readable(Protocol):
    """An open binary file of any kind."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; none at the end of the file."""


class JsonWindow:
    """Hold the part of a JSON file that is being read: text in UTF-8, UTF-16 or UTF-32.

    Args:
        file: an open binary file. Reading begins at its present position.

    Attributes:
        head: the first bytes of the file, which show its format.

    Raises:
        UnicodeDecodeError: the bytes are no text. Any method that reads may raise it.

    Example:
        >>> import io
        >>> window = JsonWindow(io.BytesIO(b'[1, "a"]'))
        >>> window.read_mark("["), window.read_value(), window.read_mark(",")
        ('[', (1, '1'), ',')
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._text = ""
        self._position = 0
        # Number of characters before `_text`, which were read and dropped.
        self._dropped = 0
        self._is_complete = False
        # Bytes that were read and are not decoded yet.
        self._pending = file.read(_PIECE_BYTES)
        self.head = self._pending[:_HEAD_BYTES]
        make_decoder = codecs.getincrementaldecoder(json.detect_encoding(self.head))
        self._decoder = make_decoder()

    @property
    def position(self) -> int:
        """Return the place of the next character in the whole text."""
        return self._dropped + self._position

    @property
    def length(self) -> int:
        """Return the number of characters that were read so far."""
        return self._dropped + len(self._text)

    @property
    def fingerprint(self) -> str:
        """Return the XXH3-128 of the bytes that were read so far, in hexadecimal."""
        return self._digest.hexdigest()

    def peek(self) -> str:
        """Return the next character.

        Raises:
            IndexError: the text has ended.
        """
        return self._text[self._position]

    def read_mark(self, expected: str) -> str:
        """Read a mark (one of ``[]{},:``) and the white space around it; return the mark.

        Args:
            expected: the marks that are allowed here.

        Raises:
            json.JSONDecodeError: something else is there.
        """
        match = _MARK.match(self._text, self._position)
        while match and match.end() == len(self._text) and self._fill():
            match = _MARK.match(self._text, self._position)
        if match is None or match[1] is None or match[1] not in expected:
            raise json.JSONDecodeError(f"expected {expected}", "", self.position)
        self._position = match.end()
        return match[1]

    def read_value(self) -> tuple[Any, str]:
        """Read a value; return it and its text.

        Raises:
            json.JSONDecodeError: the text is no JSON.
            ValueError: the value is too long, or a number has too many digits.
            RecursionError: it is nested too deeply.
        """
        while True:
            try:
                value, end = _decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._is_fault(error) or not self._fill():
                    raise json.JSONDecodeError(error.msg, "", self._dropped + error.pos) from None
                continue
            if len(self._text) - end >= _TAIL or not self._fill():
                text = self._text[self._position : end]
                self._position = end
                return value, text

    def read_rest(self) -> None:
        """Read to the end of the file without keeping the text, to complete the fingerprint."""
        self._position = len(self._text)
        while self._fill():
            self._position = len(self._text)

    def is_at_end(self) -> bool:
        """Return whether the text has ended."""
        return self._position == len(self._text) and not self._fill()

    def _is_fault(self, error: json.JSONDecodeError) -> bool:
        """Return whether the error remains, whatever text is read next."""
        if error.msg.startswith("Unterminated string"):
            return False
        return error.pos < len(self._text) - _TAIL

    def _fill(self) -> bool:
        """Read the next piece into the window; return False if the file has ended.

        The window doubles while a value does not fit into it.
        """
        if self._is_complete:
            return False
        rest = self._text[self._position :]
        if len(rest) > _LONGEST_VALUE:
            raise ValueError("a value that is too long")
        self._dropped += self._position
        self._position = 0
        piece = self._pending or self._file.read(max(_PIECE_BYTES, len(rest)))
        self._pending = b""
        self._digest.update(piece)
        self._is_complete = not piece
        self._text = rest + self._decoder.decode(piece, final=not piece)
        return True
