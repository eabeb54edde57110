"""The built-in dataset: photo-like pictures and exact COCO annotations, made by code on your machine."""

from __future__ import annotations

import colorsys
import json
import os
import shutil
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from pycocotools import mask as coco_mask

from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, fork_pool, format_bytes, show_progress

__all__ = [
    "CATEGORIES",
    "SHAPES",
    "BuiltinDataset",
    "Scene",
    "Thing",
    "add_sensor_noise",
    "encode_runs",
    "make_dataset",
    "make_noise",
    "paint_ground",
    "paint_scene",
    "trace_polygons",
]

_PALETTES = np.array(  # dark, middle, light and accent of a ground, RGB
    [
        [(92, 74, 50), (176, 148, 106), (224, 202, 162), (150, 120, 84)],  # sand
        [(28, 44, 20), (74, 104, 44), (150, 166, 84), (110, 96, 52)],  # grass
        [(52, 30, 18), (122, 78, 44), (186, 134, 84), (92, 54, 30)],  # wood
        [(54, 54, 58), (118, 118, 120), (180, 178, 174), (88, 92, 84)],  # stone
        [(18, 44, 62), (52, 102, 124), (156, 192, 200), (88, 140, 140)],  # water
        [(104, 108, 122), (176, 180, 190), (232, 234, 238), (140, 150, 160)],  # snow
        [(48, 26, 18), (134, 66, 28), (204, 146, 62), (90, 84, 38)],  # autumn leaves
        [(70, 54, 66), (140, 112, 124), (206, 184, 186), (112, 86, 110)],  # cloth
    ],
    np.float32,
)


def paint_ground(rng: np.random.Generator, width: int, height: int, side: float) -> np.ndarray:
    """A ground a little out of focus: painted smaller and enlarged; uint8 [H, W, 3]."""
    soft = rng.uniform(1.4, 2.0)
    w, h, side = round(width / soft), round(height / soft), side / soft
    unit = side / 300
    kind = ("even", "grain", "paving", "weave", "horizon")[rng.integers(5)]
    palette = _PALETTES[rng.integers(len(_PALETTES))] * rng.uniform(0.75, 1.15)
    stretch = rng.uniform(5, 12) if kind == "grain" else 1.0
    cells = (side / 3, side / 6, side / 14, side / 35, side / 80, 2.0)
    tone = make_noise(rng, w, h, cells, stretch) * 0.42 + 0.5
    y, x = np.arange(h)[:, None], np.arange(w)
    if kind == "paving":
        pitch = int(side * rng.uniform(0.09, 0.2)) + 2
        row = y // pitch
        shifted = x + row % 2 * (pitch // 2)
        tone += rng.uniform(-0.15, 0.15, (h // pitch + 1, w // pitch + 2))[row, shifted // pitch]
        tone[(y % pitch < 1.6 * unit) | (shifted % pitch < 1.6 * unit)] *= 0.4
    elif kind == "weave":
        thread = rng.uniform(2.5, 6) * unit
        tone += 0.14 * (np.sin(x * (6.28 / thread)) * np.sin(y * (6.28 / thread))).astype(np.float32)
    tone *= _grow(rng.uniform(0.6, 1.25, (3, 4)).astype(np.float32), w, h)  # the light is uneven
    picture = _dye(tone, palette[:3])
    if kind == "horizon":
        far = _PALETTES[rng.integers(len(_PALETTES))][1:3]
        sky = make_noise(rng, w, max(int(h * rng.uniform(0.2, 0.5)), 1), (*cells[:3], 2.0)) * 0.4 + 0.5
        picture.paste(_dye(sky, far), (0, 0))
    _scatter(rng, ImageDraw.Draw(picture), palette, w, h, unit)
    return np.array(picture.resize((width, height), Image.Resampling.BICUBIC))


def _scatter(
    rng: np.random.Generator,
    draw: ImageDraw.ImageDraw,
    palette: np.ndarray,
    width: int,
    height: int,
    unit: float,
) -> None:
    """Things that belong to no category: straws, cracks and twigs, in the ground's own colours."""
    count = int(rng.integers(40, 220))
    spots = rng.uniform(0, 1, (count, 2)) * (width, height)
    ways = rng.normal(0, 1, (count, 2)) * rng.uniform(4, 14) * unit
    colours = palette[rng.integers(0, 4, count)] * rng.uniform(0.6, 1.3, (count, 1))
    inks = [tuple(ink) for ink in np.clip(colours, 0, 255).astype(int).tolist()]
    for (x, y), (dx, dy), ink in zip(spots.tolist(), ways.tolist(), inks, strict=True):
        bend = (x + 0.5 * dx - 0.2 * dy, y + 0.5 * dy + 0.2 * dx)
        draw.line([(x, y), bend, (x + dx, y + dy)], fill=ink, width=max(1, round(unit)))
    for ink in inks[: int(rng.integers(2, 9))]:
        track = np.cumsum(rng.normal(0, 10, (16, 2)), axis=0) * unit + rng.uniform(0, 1, 2) * (width, height)
        draw.line([(x, y) for x, y in track.tolist()], fill=ink, width=max(1, round(rng.uniform(0.6, 2) * unit)))


def add_sensor_noise(rng: np.random.Generator, canvas: np.ndarray, side: float) -> np.ndarray:
    """Grain in every pixel, so that the file weighs what a photo weighs; uint8 in and out."""
    # A small picture is noisy at every pixel; a large one has been smoothed by its camera.
    reach = max(2, round(rng.uniform(9, 17) * min(1.0, (1000 / side) ** 0.5)))
    shape = (*canvas.shape[:2], 1)
    grain = rng.integers(-reach, reach, shape, np.int8, endpoint=True)
    grain += rng.integers(-reach, reach, shape, np.int8, endpoint=True)  # two dice: nearly a bell
    noisy = np.add(canvas, grain, dtype=np.int16)
    return np.clip(noisy, 0, 255, out=noisy).astype(np.uint8)


def make_noise(
    rng: np.random.Generator, width: int, height: int, cells: tuple[float, ...], stretch: float = 1.0
) -> np.ndarray:
    """Smooth noise in about -1 to 1, float32 [H, W]: an octave per cell size in pixels, coarse first."""
    total, weight = np.zeros((2, 2), np.float32), 0.0
    for octave, cell in enumerate(cells):
        across, down = int(width / cell / stretch) + 2, int(height / cell) + 2
        share = 0.8**octave
        total = _grow(total, across, down)
        total = total + (rng.random((down, across), np.float32) - np.float32(0.5)) * np.float32(2 * share)
        weight += share * share
    return _grow(total, width, height) / np.float32(weight**0.5)


def _grow(grid: np.ndarray, width: int, height: int) -> np.ndarray:
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BILINEAR))


def _dye(tone: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Colours, dark to light, for a tone in 0 to 1."""
    steps = np.linspace(0, len(colours) - 1, 256)
    table = np.stack([np.interp(steps, np.arange(len(colours)), c) for c in colours.T], axis=1)
    picture = Image.fromarray(np.clip(tone * 255, 0, 255).astype(np.uint8))
    picture.putpalette(np.clip(table, 0, 255).astype(np.uint8).tobytes())
    return picture.convert("RGB")


_TOLERANCE_PX = 0.7  # how far a polygon may stray from the pixels' edges: about what an annotator does


_SLIVER_PX = 10  # parts and holes smaller than this are left out, as annotators leave them out


def trace_polygons(mask: np.ndarray, x0: int = 0, y0: int = 0) -> list[list[float]]:
    """Trace a mask as COCO polygons ``[x, y, x, y, ...]`` in pixels, clockwise on the screen.

    Every part that hangs together (by its sides) is one polygon. COCO polygons have no holes, so a part
    with a hole is cut in two at the hole's middle. Parts under 10 pixels are dropped beside larger ones.

    Args:
        mask: bool [H, W].
        x0: column of the mask's left edge in the picture.
        y0: row of the mask's top edge in the picture.

    Example:
        >>> trace_polygons(np.ones((2, 3), bool), x0=10)
        [[10.0, 0.0, 13.0, 0.0, 13.0, 2.0, 10.0, 2.0]]
    """
    loops = [(loop, _measure_area(loop)) for loop in _follow_edges(mask)]
    hole = next((loop for loop, area in loops if area <= -_SLIVER_PX), None)
    if hole is not None:
        cut = int(hole[:, 0].min() + hole[:, 0].max() + 1) // 2
        return trace_polygons(mask[:, :cut], x0, y0) + trace_polygons(mask[:, cut:], x0 + cut, y0)
    largest = max((area for _, area in loops), default=0.0)
    kept = [loop for loop, area in loops if area >= min(_SLIVER_PX, largest)]
    shift = np.array([x0, y0])
    return [(_simplify(loop) + shift).ravel().tolist() for loop in kept]


def encode_runs(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask as uncompressed COCO RLE, the form of crowd regions.

    Args:
        mask: bool [H, W], of the whole picture.

    Returns:
        ``counts``: lengths of the runs of 0 and 1 by turns, column by column, 0 first; ``size``: [H, W].

    Example:
        >>> encode_runs(np.array([[1, 0], [1, 0]], bool))
        {'counts': [0, 2, 2], 'size': [2, 2]}
    """
    flat = mask.ravel(order="F")
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], ends, [flat.size]])).tolist()
    return {"counts": [0, *counts] if flat[0] else counts, "size": list(mask.shape)}


def _follow_edges(mask: np.ndarray) -> list[np.ndarray]:
    """Corners along every border of a mask, one pixel apart, int64 [K, 2] x, y; the mask lies on the right."""
    wide = np.pad(mask, 1)
    outside = (wide[:-2, 1:-1], wide[1:-1, 2:], wide[2:, 1:-1], wide[1:-1, :-2])  # above, right, below, left
    corner = ((0, 0), (0, 1), (1, 1), (1, 0))  # where that side of a pixel starts: row, column
    pitch = mask.shape[1] + 1
    codes = []  # an edge is its first corner and its way (0 east, 1 south, 2 west, 3 north) in one number
    for way, (beyond, (down, right)) in enumerate(zip(outside, corner, strict=True)):
        rows, columns = np.nonzero(mask & ~beyond)
        codes.append((((rows + down) * pitch + columns + right) * 4 + way).tolist())
    edges = {code for side in codes for code in side}
    step = (4, 4 * pitch, -4, -4 * pitch)
    loops = []
    for start in codes[0]:  # every border has an edge that goes east
        if start not in edges:
            continue
        code, path = start, []
        while code in edges:
            edges.discard(code)
            path.append(code >> 2)
            way = code & 3
            here = code - way + step[way]
            # To the right first: pixels that touch at a corner only are two parts.
            code = here + (way + 1 & 3)
            if code not in edges:
                code = here + way if here + way in edges else here + (way + 3 & 3)
        corners = np.array(path)
        loops.append(np.stack([corners % pitch, corners // pitch], axis=1))
    return loops


def _measure_area(loop: np.ndarray) -> float:
    """Shoelace formula: positive for a part, negative for a hole."""
    x, y = loop.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _simplify(loop: np.ndarray) -> np.ndarray:
    """Douglas and Peucker (1973) on a closed loop, float64 [K, 2]."""
    points, tolerance = loop[:, 0] + 1j * loop[:, 1], 0.01  # x + iy: one number per corner
    area = _measure_area(loop)
    if area >= 32:  # large enough to smooth: edge midpoints take the stairs out of a slope
        points = (points + np.roll(points, -1)) / 2
        tolerance = min(_TOLERANCE_PX, 0.03 * area**0.5)  # a small part would lose too large a share
    points = np.roll(points, -int(np.abs(points - points.mean()).argmax()))
    far = int(np.abs(points - points[0]).argmax())
    closed = np.append(points, points[0])
    keep = np.zeros(len(closed), bool)
    keep[[0, far]] = True
    spans = [(0, far), (far, len(points))]
    while spans:
        start, end = spans.pop()
        if end - start < 2:
            continue
        chord = complex(closed[end] - closed[start])
        distance = np.abs(((closed[start + 1 : end] - closed[start]) * chord.conjugate()).imag)
        middle = int(distance.argmax())
        if distance[middle] > tolerance * abs(chord):
            middle += start + 1
            keep[middle] = True
            spans += [(start, middle), (middle, end)]
    kept = closed[:-1][keep[:-1]]
    return np.stack([kept.real, kept.imag], axis=1)


# name -> (hue that most of them have, textures they may wear): a hint for the learner, no giveaway
SHAPES: dict[str, tuple[float, tuple[str, ...]]] = {
    "ball": (0.00, ("stripes", "plain", "dots")),
    "tile": (0.58, ("checks", "stripes", "plain")),
    "pennant": (0.08, ("stripes", "plain", "checks")),
    "starfish": (0.90, ("dots", "speckle")),
    "moon": (0.15, ("speckle", "plain")),
    "pebble": (0.38, ("speckle", "plain", "dots")),
}


_NAMES = tuple(SHAPES)


_MIN_SEEN = 0.4  # no object may cover others so far that less than this share of them is seen


class Thing(NamedTuple):
    """One object or one crowd in a scene; all of it lies in ``window`` (x0, y0, x1, y1, half open)."""

    name: str
    window: tuple[int, int, int, int]
    crowd: bool


@dataclass(frozen=True)
class Scene:
    """A painted picture and the truth about it.

    Attributes:
        pixels: uint8 [H, W, 3], RGB.
        ids: int32 [H, W]: 0 where the ground is seen, k where ``things[k - 1]`` is seen.
        things: the objects and crowds, back to front.
    """

    pixels: np.ndarray
    ids: np.ndarray
    things: list[Thing]


def paint_scene(rng: np.random.Generator, width: int, height: int, *, objects: int, crowd: bool) -> Scene:
    """Paint one picture, back to front.

    Objects are 8 to 35 % of the picture's side (the root of its area) while they are few, and smaller
    the more there are. At least two fifths of every object stay in sight.

    Args:
        rng: all that is drawn by chance comes from here.
        width: pixels.
        height: pixels.
        objects: how many single objects; one that finds no room is left out, unpainted.
        crowd: whether a heap of small objects lies behind them.

    Example:
        >>> scene = paint_scene(np.random.default_rng(0), 96, 64, objects=3, crowd=False)
        >>> scene.pixels.shape, int(scene.ids.max())
        ((64, 96, 3), 3)
    """
    side = (width * height) ** 0.5
    canvas = paint_ground(rng, width, height, side)
    painter = _Painter(rng, canvas, rng.uniform(0, 2 * np.pi))
    things: list[Thing] = []
    if crowd:
        things.append(_paint_crowd(rng, painter, side))
    shrink = min(1.0, (10 / max(objects, 1)) ** 0.5)
    for _ in range(objects):
        name = _NAMES[rng.integers(len(_NAMES))]
        size = side * shrink * float(np.exp(rng.uniform(np.log(0.08), np.log(0.35))))
        for _ in range(200):
            x, y = rng.uniform(0.03, 0.97) * width, rng.uniform(0.03, 0.97) * height
            if things and rng.random() < 0.35:  # beside or upon another one
                x0, y0, x1, y1 = things[rng.integers(len(things))].window
                x, y = rng.uniform(x0, x1), rng.uniform(y0, y1)
            window = painter.paint(len(things) + 1, name, max(size, 7.0), x, y)
            if window:
                things.append(Thing(name, window, crowd=False))
                break
            size *= 0.96  # no room here: somewhere else, a little smaller
    return Scene(add_sensor_noise(rng, canvas, side), painter.ids, things)


def _paint_crowd(rng: np.random.Generator, painter: _Painter, side: float) -> Thing:
    height, width = painter.ids.shape
    extent = np.array([width, height])
    name = ("ball", "pebble", "starfish")[rng.integers(3)]
    middle = rng.uniform(0.25, 0.75, 2) * extent
    windows = []
    for spot in middle + rng.normal(0, 0.07, (int(rng.integers(18, 40)), 2)) * extent:
        x, y = np.clip(spot, 1, extent - 1).tolist()
        window = painter.paint(1, name, max(side * rng.uniform(0.03, 0.055), 7.0), x, y)
        windows += [window] if window else []
    low, high = np.min(windows, axis=0).tolist(), np.max(windows, axis=0).tolist()
    return Thing(name, (low[0], low[1], high[2], high[3]), crowd=True)


class _Painter:
    """Puts objects on a canvas (uint8 [H, W, 3], changed in place) and counts what is seen of each."""

    def __init__(self, rng: np.random.Generator, canvas: np.ndarray, light: float) -> None:
        self.rng, self.canvas = rng, canvas
        self.ids: np.ndarray = np.zeros(canvas.shape[:2], np.int32)
        self.light = float(np.cos(light)), float(np.sin(light))  # the way it shines
        self.whole: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def paint(self, number: int, name: str, size: float, x: float, y: float) -> tuple[int, int, int, int] | None:
        """Paint one object and return its window; None, and nothing painted, where it would hide too much."""
        height, width = self.ids.shape
        turn = self.rng.uniform(0, 2 * np.pi)
        outline = _outline(self.rng, name) @ _rotation(turn) * (size / 2) + np.array([x, y])
        pad = 0.25 * size + 2  # room for the shadow
        left, top = np.floor(outline.min(axis=0) - pad).astype(int).tolist()
        right, bottom = np.ceil(outline.max(axis=0) + pad).astype(int).tolist()
        stencil = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(stencil).polygon([(px - left, py - top) for px, py in outline.tolist()], fill=255)
        x0, y0, x1, y1 = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
        cut = np.s_[y0 - top : y1 - top, x0 - left : x1 - left]
        inside = np.asarray(stencil)[cut] > 0
        ids = self.ids[y0:y1, x0:x1]
        counts = np.bincount(ids[inside], minlength=number + 1)
        hidden = {k: int(counts[k]) for k in np.flatnonzero(counts).tolist() if k not in (0, number)}
        area = int(counts.sum())
        if area < 12 or any(self.seen[k] - c < _MIN_SEEN * self.whole[k] for k, c in hidden.items()):
            return None
        for k, count in hidden.items():
            self.seen[k] -= count
        new = area - int(counts[number])
        self.whole[number] = self.whole.get(number, 0) + new
        self.seen[number] = self.seen.get(number, 0) + new
        ids[inside] = number

        soft = _blur(stencil, 0.07 * size + 0.5)
        fall = [round(way * size * 0.1) for way in self.light]
        shadow = np.roll(soft, (fall[1], fall[0]), (0, 1))[cut]
        across = np.arange(x0, x1, dtype=np.float32) - x
        down = np.arange(y0, y1, dtype=np.float32)[:, None] - y
        colour = self._texture(name, *_rotate(across, down, turn, size), size)
        colour *= self._shade(name, across * (2 / size), down * (2 / size), soft[cut])[..., None]
        edge = np.asarray(stencil.filter(ImageFilter.BoxBlur(0.5)))[cut]  # as soft as a lens makes it
        alpha = edge[..., None] * np.float32(1 / 255)
        patch = self.canvas[y0:y1, x0:x1]
        ground = patch * (1 - 0.65 * shadow)[..., None]
        ground += (colour - ground) * alpha
        patch[:] = np.clip(ground, 0, 255, out=ground)
        rows, columns = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
        return x0 + int(columns[0]), y0 + int(rows[0]), x0 + int(columns[-1]) + 1, y0 + int(rows[-1]) + 1

    def _texture(self, name: str, u: np.ndarray, v: np.ndarray, size: float) -> np.ndarray:
        rng = self.rng
        usual, wear = SHAPES[name]
        hue = rng.normal(usual, 0.05) if rng.random() < 0.75 else rng.random()
        first = _colour(hue, rng.uniform(0.3, 0.8), rng.uniform(0.5, 0.95))
        second = _colour(hue + rng.normal(0, 0.12), rng.uniform(0.1, 0.7), rng.uniform(0.25, 0.95))
        kind = wear[rng.integers(len(wear))]
        beat = rng.uniform(4, 11)
        height, width = u.shape
        if kind == "stripes":
            mix = np.sin(u * beat) * 2
        elif kind == "checks":
            mix = np.sin(u * beat) * np.sin(v * beat) * 4
        elif kind == "dots":
            mix = np.sin(u * beat * 1.4) * np.sin(v * beat * 1.4) * 6 - 2.7
        else:
            mix = np.zeros((1, 1), np.float32)
        grain = (max(size / 12, 3.0), max(size / 40, 1.7))
        if kind == "speckle":
            mix = make_noise(rng, width, height, (size / 4, size / 9, *grain)) * 2.5
        else:
            mix = mix + make_noise(rng, width, height, grain) * np.float32(0.4)
        return first + (second - first) * np.clip(mix + 0.4, -0.15, 1.15)[..., None]

    def _shade(self, name: str, x: np.ndarray, y: np.ndarray, soft: np.ndarray) -> np.ndarray:
        facing = -(x * self.light[0] + y * self.light[1])
        if name == "ball":
            up = np.sqrt(np.clip(1.05 - x * x - y * y, 0.0, 1.0))
            gleam = 0.7 * np.exp(-22 * ((x + 0.4 * self.light[0]) ** 2 + (y + 0.4 * self.light[1]) ** 2))
            return np.clip(0.3 + 0.5 * up + 0.35 * facing, 0.15, 1.2) + gleam
        flat = name in ("tile", "pennant")
        rim = 0.2 if flat else 0.8  # round things are darker towards the rim
        return np.clip(1.05 - rim + rim * soft + 0.22 * facing, 0.2, 1.3)


def _outline(rng: np.random.Generator, name: str) -> np.ndarray:
    """Corners of a shape, float64 [K, 2], about 1 from its middle."""
    turn = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    if name == "ball":
        return circle
    if name == "tile":
        box = np.sign(circle) * np.abs(circle) ** 0.16  # a superellipse: a box with rounded corners
        return box * (0.95, rng.uniform(0.45, 0.8))
    if name == "pennant":
        half = rng.uniform(0.4, 0.62)
        return np.array([(-0.85, -half), (1.1, rng.uniform(-0.15, 0.15)), (-0.85, half)])
    if name == "starfish":
        arm = np.abs(np.cos(2.5 * turn)) ** rng.uniform(1.6, 2.6)
        return circle * (rng.uniform(0.34, 0.44) + 0.68 * arm)[:, None]
    if name == "moon":
        tip = rng.uniform(1.8, 2.3)  # how far round the rim goes to either side, radians
        rim, hollow = np.linspace(-tip, tip, 40), np.linspace(np.pi / 2, -np.pi / 2, 32)
        outer = np.stack([np.cos(rim), np.sin(rim)], axis=1)
        depth = rng.uniform(0.2, 0.45) - np.cos(tip)
        inner = np.stack([np.cos(tip) + depth * np.cos(hollow), np.sin(tip) * np.sin(hollow)], axis=1)
        return np.concatenate([outer, inner[1:-1]])
    waves = np.zeros(72)
    for k in (2, 3, 4):
        waves += rng.normal(0, 0.16 / k) * np.cos(k * turn + rng.uniform(0, 6.3))
    return circle * (0.85 + waves)[:, None] * (1.0, rng.uniform(0.65, 0.95))


def _blur(stencil: Image.Image, radius: float) -> np.ndarray:
    return np.asarray(stencil.filter(ImageFilter.GaussianBlur(radius)), np.float32) * np.float32(1 / 255)


def _rotation(turn: float) -> np.ndarray:
    return np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])


def _rotate(x: np.ndarray, y: np.ndarray, turn: float, size: float) -> tuple[np.ndarray, np.ndarray]:
    """Pixels from the middle of an object, in its own axes, in halves of its size."""
    cos, sin = np.float32(np.cos(turn) * 2 / size), np.float32(np.sin(turn) * 2 / size)
    return x * cos + y * sin, y * cos - x * sin


def _colour(hue: float, saturation: float, value: float) -> np.ndarray:
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value), np.float32) * 255


CATEGORIES = tuple(
    {"id": number, "name": name, "supercategory": "toy"}
    for number, name in zip((1, 3, 7, 18, 44, 62), SHAPES, strict=True)  # with gaps, as in COCO
)


_RECIPE = 1  # goes up when the same arguments would give other files


_FOLDER_HOLDS = 1000  # more images than this go to numbered sub-folders


_EVERY = 50  # one image in 50 shows a crowd, another one no object at all: 2 % each


@dataclass(frozen=True)
class BuiltinDataset:
    """Where a built-in dataset lies, and how large it is.

    Attributes:
        images: the image folder.
        annotations: the COCO JSON file.
        n: images.
        objects: annotations, crowd regions included.
        bytes: size of all images.
        seconds: what this call took; next to nothing where the dataset was there already.
    """

    images: Path
    annotations: Path
    n: int
    objects: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.n} images, {self.objects} objects, {format_bytes(self.bytes)} in {self.images.parent} "
            f"({self.seconds:.1f} s)"
        )


def make_dataset(
    folder: str | Path,
    *,
    n: int = 500,
    width: int = 640,
    height: int = 480,
    objects: tuple[int, int] = (1, 15),
    seed: int = 0,
    workers: int | str = "auto",
) -> BuiltinDataset:
    """Make a dataset with code, without a download: ``folder/images`` and ``folder/annotations.json``.

    The pictures cost what photos cost to read and decode (640x480: 100 to 200 kB). They show six kinds of
    object that overlap; shape tells the category, colour and texture only hint at it. Polygons outline
    what is *seen* of an object, as in COCO: they are traced from the painted pixels, within half a pixel
    or so, and a hidden middle makes two polygons. ``area`` and ``bbox`` are those of the polygons' mask.
    Of every 50 images one has a crowd region (``iscrowd`` 1, uncompressed RLE) and one shows no object.

    The same arguments give the same bytes on one machine, whatever ``workers`` is. A folder that holds
    this very dataset already is returned as it is. Nothing is ever overwritten: the images are made under
    a temporary name, and ``annotations.json`` appears last.

    Args:
        folder: made where it does not exist.
        n: images.
        width: pixels.
        height: pixels.
        objects: fewest and most objects in an image; their sizes shrink as they become many.
        seed: another seed gives other pictures.
        workers: processes; "auto" means one per core, 0 or 1 (and anywhere but on Linux) this one alone.

    Raises:
        ColabUtilsError: a parameter makes no sense, or ``folder`` holds something else.

    Example:
        >>> import tempfile
        >>> made = make_dataset(tempfile.mkdtemp(), n=2, width=64, height=48, workers=1)
        >>> made.n, made.annotations.name, len(list(made.images.iterdir()))
        (2, 'annotations.json', 2)
    """
    start = time.perf_counter()
    folder = Path(folder)
    bounds = list(objects) if isinstance(objects, (tuple, list)) else [objects]
    arguments: dict[str, Any] = {"n": n, "width": width, "height": height, "objects": bounds, "seed": seed}
    _check_arguments(**arguments, workers=workers)
    images, annotations = folder / "images", folder / "annotations.json"
    if annotations.exists():
        return _reuse(images, annotations, arguments, start)
    if images.exists() and not (images.is_dir() and not any(images.iterdir())):
        raise ColabUtilsError(
            f"expected an empty folder, found {images} without annotations.json. "
            "Choose another folder, or remove it yourself."
        )
    mark = f"partial-{os.getpid()}-{time.time_ns():x}"
    staging, draft = folder / f"images.{mark}", folder / f"annotations.json.{mark}"
    try:
        staging.mkdir(parents=True)
        records = _make_images(staging, arguments, count_cores() if workers == "auto" else int(workers))
        content = _build_json(records, arguments)
        draft.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        os.replace(staging, images)
        os.replace(draft, annotations)
    except OSError as error:
        raise ColabUtilsError(
            f"expected a folder to write to, found {error.strerror or error} at {error.filename or folder}. "
            "Free some space or choose another folder."
        ) from error
    except BrokenProcessPool as error:
        raise ColabUtilsError(
            f"expected every worker to finish, found one killed while it painted {width}x{height} images for "
            f"{folder}: memory is short. Pass workers=1."
        ) from error
    finally:  # both are our own, and gone already where all went well
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):
            draft.unlink()
    size = content["info"]["image_bytes"]
    return BuiltinDataset(images, annotations, n, len(content["annotations"]), size, time.perf_counter() - start)


def _check_arguments(*, n: int, width: int, height: int, objects: list[int], seed: int, workers: int | str) -> None:
    for name, value, low, high in (
        ("n", n, 1, 10_000_000),
        ("width", width, 32, 65_500),  # JPEG ends at 65,500
        ("height", height, 32, 65_500),
        ("seed", seed, 0, 2**63),
        ("workers", 1 if workers == "auto" else workers, 0, 1024),
    ):
        if not isinstance(value, int) or not low <= value <= high:
            raise ColabUtilsError(
                f"expected {name} to be a whole number from {low} to {high}, found {value!r}. Change {name}."
            )
    most = width * height // 64
    if len(objects) != 2 or not all(isinstance(k, int) for k in objects) or not 0 <= objects[0] <= objects[1]:
        raise ColabUtilsError(
            f"expected objects=(fewest, most), whole numbers from 0 up, found {tuple(objects)!r}. Change objects."
        )
    if objects[1] > most:
        raise ColabUtilsError(
            f"expected at most {most} objects in a {width}x{height} image, found objects={tuple(objects)!r}. "
            "Ask for fewer objects or larger images."
        )


def _reuse(images: Path, annotations: Path, arguments: dict[str, Any], start: float) -> BuiltinDataset:
    """The dataset that is there already, where it is the one asked for and complete."""
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        made_with, image_bytes = content["info"]["made_with"], content["info"]["image_bytes"]
        paths = [images / record["file_name"] for record in content["images"]]
        objects = len(content["annotations"])
    except (OSError, ValueError, KeyError, TypeError):
        made_with = None
    if made_with != {**arguments, "recipe": _RECIPE}:
        found = f"one made with {made_with}" if made_with else "another file of that name"
        raise ColabUtilsError(
            f"expected no annotations.json, or one made with the same arguments, found {found}: {annotations}. "
            "Choose another folder; nothing was changed."
        )
    missing = [path for path in paths if not path.is_file()]
    size = 0 if missing else sum(path.stat().st_size for path in paths)
    if missing or size != image_bytes:
        found = f"{len(missing)} missing, first {missing[0]}" if missing else "other sizes than it was made with"
        raise ColabUtilsError(
            f"expected all {len(paths)} images of {annotations}, found {found}. "
            "Choose another folder, or remove this one and make it again."
        )
    return BuiltinDataset(images, annotations, len(paths), objects, size, time.perf_counter() - start)


def _make_images(folder: Path, arguments: dict[str, Any], workers: int) -> list[dict[str, Any]]:
    """Paint and save every image; records in the order of the images."""
    n = arguments["n"]
    ids = np.cumsum(np.random.default_rng(arguments["seed"]).integers(1, 1000, n)).tolist()  # with gaps
    names = [f"{k:012d}.jpg" for k in ids]
    if n > _FOLDER_HOLDS:
        names = [f"{k // _FOLDER_HOLDS:02d}/{name}" for k, name in enumerate(names)]
    for parent in {(folder / name).parent for name in names}:
        parent.mkdir(exist_ok=True)
    paint = partial(_make_image, folder, arguments)
    records = []
    with show_progress("making images", total=n, unit="img") as bar:
        if workers <= 1 or sys.platform != "linux":  # elsewhere fork is missing or not safe
            for record in map(paint, range(n), ids, names):
                records.append(record)
                bar.update(1)
            return records
        pool = fork_pool(min(workers, n))
        try:
            for record in pool.map(paint, range(n), ids, names, chunksize=max(1, min(4, n // (8 * workers)))):
                records.append(record)
                bar.update(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return records


def _make_image(folder: Path, arguments: dict[str, Any], index: int, image_id: int, file_name: str) -> dict[str, Any]:
    rng = np.random.default_rng([arguments["seed"], index])  # one stream per image: workers do not matter
    fewest, most = arguments["objects"]
    count = int(rng.integers(fewest, most, endpoint=True)) if index % _EVERY != 9 else 0
    crowd = index % _EVERY == 4 and most > 0
    scene = paint_scene(rng, arguments["width"], arguments["height"], objects=count, crowd=crowd)
    path = folder / file_name
    Image.fromarray(scene.pixels).save(path, "JPEG", quality=int(rng.integers(88, 94)))
    return {
        "image": {
            "id": image_id,
            "file_name": file_name,
            "width": arguments["width"],
            "height": arguments["height"],
            "license": 1,
        },
        "annotations": [{"image_id": image_id, **annotation} for annotation in _annotate(scene)],
        "bytes": path.stat().st_size,
    }


def _annotate(scene: Scene) -> list[dict[str, Any]]:
    height, width = scene.ids.shape
    category_ids = {category["name"]: category["id"] for category in CATEGORIES}
    annotations = []
    for number, thing in enumerate(scene.things, start=1):
        x0, y0, x1, y1 = thing.window
        segmentation: dict[str, Any] | list[list[float]]
        if thing.crowd:
            segmentation = encode_runs(scene.ids == number)
            rle = coco_mask.frPyObjects(segmentation, height, width)
        else:
            segmentation = trace_polygons(scene.ids[y0:y1, x0:x1] == number, x0, y0)
            rle = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
        annotations.append(
            {
                "category_id": category_ids[thing.name],
                "segmentation": segmentation,
                "area": int(coco_mask.area(rle)),
                "bbox": coco_mask.toBbox(rle).tolist(),
                "iscrowd": int(thing.crowd),
            }
        )
    return annotations


def _build_json(records: list[dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
    annotations = [annotation for record in records for annotation in record["annotations"]]
    return {
        "info": {
            "description": "colab_utils built-in dataset",
            "version": str(_RECIPE),
            "made_with": {**arguments, "recipe": _RECIPE},
            "image_bytes": sum(record["bytes"] for record in records),
        },
        "licenses": [{"id": 1, "name": "Public Domain", "url": "https://creativecommons.org/publicdomain/zero/1.0/"}],
        "images": [record["image"] for record in records],
        "annotations": [{"id": number, **a} for number, a in enumerate(annotations, start=1)],
        "categories": list(CATEGORIES),
    }
