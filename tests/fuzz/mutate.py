"""Changes of bytes, of JSON values, and of the parts of PNG, JPEG and zip files, drawn from a
seeded generator.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from tests.pictures import make_chunk

# The fields have what tools write into those of COCO entries, well or badly.
_VALUES = json.loads(Path(__file__).with_name("values.json").read_text())
NUMBERS: list[Any] = _VALUES["numbers"]
TEXTS: list[str] = _VALUES["texts"]
TEXTS[21:21] = ["a" * 300, "x/" * 2000]
FIELDS: dict[str, list[Any]] = _VALUES["fields"]
FIELDS["file_name"] = TEXTS
# The word stands for lists in lists, which Python's own json does not write.
_NEST = "many brackets"


def change_bytes(rng: Random, data: bytes, changes: int = 3) -> bytes:
    """Flip, overwrite, cut, repeat, insert and swap some bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, changes)):
        place = rng.randrange(len(changed) + 1)
        length = min(len(changed), int(2 ** rng.uniform(0, 9)))
        other = rng.randrange(len(changed) + 1)
        end = place + length
        piece = changed[other : other + length]
        match rng.randrange(9):
            case 0 | 1 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 2 if place < len(changed):
                changed[place] = rng.randrange(256)
            case 3:
                kind = rng.choice(["B", ">H", "<H", ">I", "<I"])
                size = struct.calcsize(kind)
                number = int(rng.choice(NUMBERS[:12])) % 256**size
                changed[place : place + size] = struct.pack(kind, number)
            case 4:
                del changed[place:end]
            case 5:
                changed[place:place] = piece
            case 6:
                changed[place:end] = piece
            case 7:
                changed[place:place] = rng.randbytes(length)
            case 8:
                del changed[place:]
        if not changed:
            changed = bytearray(1)
    return bytes(changed)


def change_digit(rng: Random, data: bytes) -> bytes:
    """Another digit in place of one: what stays plausible."""
    places = [place for place, byte in enumerate(data) if 48 <= byte < 58]
    changed = bytearray(data)
    if places:
        place = rng.choice(places)
        changed[place] = 48 + (changed[place] - 48 + rng.randint(1, 9)) % 10
    return bytes(changed)


def draw_value(rng: Random) -> Any:
    """A value that does not belong there."""
    return deepcopy(
        rng.choice(
            [
                *NUMBERS,
                *TEXTS,
                _NEST,
                None,
                True,
                False,
                [],
                {},
                [[]],
                [0] * 4,
            ]
        )
    )


def change_tree(rng: Random, tree: Any, changes: int = 2) -> Any:
    """Replace, remove, repeat or swap some values of a JSON document; keys as likely as the many
    numbers of a list.
    """
    root = {"": deepcopy(tree)}
    for _ in range(rng.randint(1, changes)):
        places = _list_places(root)
        names = sorted(places)
        holder, key = rng.choice(places[rng.choice(names)])
        other_holder, other_key = rng.choice(places[rng.choice(names)])
        value = holder[key]
        match rng.randrange(8):
            case 0 | 1:
                holder[key] = draw_value(rng)
            case 2 if holder is not root:
                del holder[key]
            case 3 if isinstance(holder, list):
                holder.insert(rng.randrange(len(holder) + 1), deepcopy(value))
            case 4:
                holder[key] = deepcopy(other_holder[other_key])
            case 5 if isinstance(value, int | float):
                holder[key] = rng.choice(
                    [
                        str(value),
                        value + 1,
                        -value,
                        value * 1000,
                        value + 0.5,
                        bool(value),
                        [value],
                    ]
                )
            case 6 if isinstance(holder, dict):
                holder[rng.choice(TEXTS)] = holder.pop(key)
            case _:
                holder[key] = rng.choice([[value], {"a": value}, str(value)])
    return root.get("")


def dump_json(rng: Random, tree: Any) -> bytes:
    """JSON text in one of the encodings that tools write."""
    text = json.dumps(
        tree,
        ensure_ascii=rng.random() < 0.7,
        indent=rng.choice([None, 1]),
    )
    depth = rng.choice([50, 960, 990, 100_000])
    text = text.replace(f'"{_NEST}"', "[" * depth + "]" * depth)
    return text.encode(
        rng.choice(["utf-8"] * 7 + ["utf-8-sig", "utf-16", "utf-32"]), "surrogatepass"
    )


def change_png(rng: Random, data: bytes) -> bytes:
    """Change the chunks of a PNG: order, number, kind, content, sizes; every checksum is right
    again.
    """
    chunks = _list_chunks(data)
    for _ in range(rng.randint(1, 2)):
        _change_chunk(rng, chunks)
    return data[:8] + b"".join(make_chunk(*chunk) for chunk in chunks)


def _list_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """List kind and content of each chunk of a PNG."""
    chunks = []
    place = 8
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        kind = data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        chunks.append((kind, body))
        place += 12 + length
    return chunks


def _change_chunk(rng: Random, chunks: list[tuple[bytes, bytes]]) -> None:
    row = rng.randrange(len(chunks))
    kind, body = chunks[row]
    first, head = chunks[0]
    match rng.randrange(7):
        case 0:
            chunks[row] = (kind, change_bytes(rng, body, 1))
        case 1:
            del chunks[row]
            if not chunks:
                chunks.append((b"IEND", b""))
        case 2:
            chunks.insert(rng.randrange(len(chunks) + 1), (kind, body))
        case 3:
            chunks.insert(1, rng.choice(_CHUNKS))
        case 4:
            sides = rng.choice(
                [
                    (60_000, 60_000),
                    (0, 24),
                    (32, 25),
                    (2**31 - 1, 1),
                    (24, 32),
                ]
            )
            chunks[0] = (first, struct.pack(">II", *sides) + head[8:])
        case 5:
            kinds = [b"tRNS", b"PLTE", b"IDAT", b"gAMA", b"acTL", b"fcTL"]
            chunks[row] = (rng.choice(kinds), body)
        case 6:
            # The byte is that of depth, colours, compression, filter or interlace.
            place = rng.randrange(8, 13)
            changed = bytearray(head.ljust(13, b"\0"))
            changed[place] = rng.choice([0, 1, 2, 3, 4, 6, 8, 16])
            chunks[0] = (first, bytes(changed))


def change_jpeg(rng: Random, data: bytes) -> bytes:
    """Change the segments of a JPEG: size, orientation, order, number."""
    segments = []
    place = 2
    while place + 4 < len(data) and data[place] == 0xFF and data[place + 1] != 0xDA:
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        segments.append(data[place:end])
        place = end
    row = rng.randrange(len(segments))
    segment = segments[row]
    match rng.randrange(6):
        case 0:
            segments[row] = segment[:4] + change_bytes(rng, segment[4:], 1)
        case 1:
            del segments[row]
        case 2:
            segments.insert(row, segments[rng.randrange(len(segments))])
        case 3:
            sides = rng.choice([(24, 32), (32, 24), (65_500, 65_500), (0, 32), (25, 32)])
            kinds = [segment[1] for segment in segments]
            # The kind of a frame says how it is coded: in one pass or in several.
            frame = kinds.index(0xC0) if 0xC0 in kinds else kinds.index(0xC2)
            old = segments[frame]
            segments[frame] = old[:5] + struct.pack(">HH", *sides) + old[9:]
        case 4:
            segments.insert(0, _draw_exif(rng))
        case 5:
            rng.shuffle(segments)
    return data[:2] + b"".join(segments) + data[place:]


def _draw_exif(rng: Random) -> bytes:
    """Draw a segment that tells how a photo is turned; 3 is the right type, others are damage."""
    orientation = rng.choice([0, 1, 2, 3, 6, 8, 9, 65_535])
    kind = rng.choice([3, 3, 3, 2, 4, 12])
    entry = struct.pack(">HHIHH", 0x0112, kind, 1, orientation, 0)
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\1" + entry + bytes(4)
    return b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif


def change_zip(rng: Random, data: bytes, edit: Callable[[Random, bytes], bytes]) -> bytes:
    """Change the members of a zip: names, order, number, kinds, or content by ``edit``. Its
    checksums are right.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    row = rng.randrange(len(members))
    other = rng.randrange(len(members))
    info, content = members[row]
    match rng.randrange(9):
        case 0:
            names = [text for text in TEXTS if "\ud800" not in text]
            info.filename = rng.choice([members[other][0].filename, *names])
        case 1:
            if rng.random() >= 0.5:
                content = members[other][1]
            members.insert(other, (info, content))
        case 2:
            del members[row]
        case 3:
            info.external_attr = rng.choice([0o120777, 0o010777, 0o040777]) << 16
            members[row] = info, b"../../../outside/secret.png"
        case _:
            members[row] = info, edit(rng, content)
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        # A name may be there twice.
        warnings.simplefilter("ignore")
        for info, content in members:
            archive.writestr(info, content)
    return file.getvalue()


def _list_places(root: Any) -> dict[str, list[tuple[Any, Any]]]:
    """Where values lie, by their key; places in lists under the key of the list."""
    places = dict[str, list[tuple[Any, Any]]]()
    waiting = [(root, "")]
    while waiting:
        holder, name = waiting.pop()
        keys = list(holder)
        if isinstance(holder, list):
            keys = list(range(len(holder)))
        for key in keys:
            value = holder[key]
            under = key if isinstance(key, str) else f"{name}[]"
            places.setdefault(under, []).append((holder, key))
            if isinstance(value, dict | list) and len(under) < 60:
                waiting.append((value, under))
    return places


_CHUNKS = [
    (b"eXIf", b"MM\0*\0\0\0\x08\0\1\x01\x12\0\2\0\0\0\2ab\0\0"),
    (b"eXIf", b"not a TIFF"),
    (b"iCCP", b"profile\0\0not deflated"),
    (b"zTXt", b"key\0\1" + zlib.compress(b"x")),
    (b"tRNS", b"\0\0\0\0\0\0"),
    (b"tIME", b""),
    (b"acTL", b"\0\0\0\2\0\0\0\0"),
]
