"""Paint one picture of the built-in dataset: objects of six shapes that overlap, and the truth about them."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from colab_utils.data.scenery import add_sensor_noise, make_noise, paint_ground

__all__ = ["SHAPES", "Scene", "Thing", "paint_scene"]

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
