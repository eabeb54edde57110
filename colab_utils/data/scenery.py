"""What lies behind the objects of the built-in dataset, and the camera's noise over all: smooth noise, dyed."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

__all__ = ["add_sensor_noise", "make_noise", "paint_ground"]

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
