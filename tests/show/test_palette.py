"""Colours that stand in one figure are told apart, also by eyes that lack one kind of cones."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from colab_utils.show.charts import plot_bars, plot_first_seconds
from colab_utils.show.comparison_charts import plot_comparison
from colab_utils.show.pictures import PALETTE

# The matrices are those of Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
SIGHT = {
    "all cones": np.eye(3),
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = (0.9505, 1.0, 1.089)
# These are the least distances in CIELAB. Objects may be closer, as they have outlines and names.
CHARTS = 20
OBJECTS = 15


def find_lab(colour, sight):
    """[L, a, b] of a colour as these eyes see it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(
        rgb <= 0.04045,
        rgb / 12.92,
        ((rgb + 0.055) / 1.055) ** 2.4,
    )
    xyz = np.array(TO_XYZ) @ (np.array(SIGHT[sight]) @ linear).clip(0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def find_closest(colours, sight):
    """The two colours that look most alike: (distance, both)."""
    lab = {colour: find_lab(colour, sight) for colour in colours}
    return min(
        (
            float(np.linalg.norm(lab[a] - lab[b])),
            a,
            b,
        )
        for a, b in combinations(sorted(colours), 2)
    )


def list_colours(figure):
    """What bars, steps and curves are filled or drawn with, and the page; not thin edges and not
    letters.
    """
    (axis,) = figure.axes
    colours = [patch.get_facecolor() for patch in axis.patches] + [
        line.get_color() for line in axis.lines
    ]
    colours += [colour for collection in axis.collections for colour in collection.get_facecolor()]
    return {to_hex(colour) for colour in colours} | {"#ffffff"}


@pytest.fixture
def figures(course, make_comparison):
    comparison = make_comparison(*course)
    return {
        "bars": plot_bars(
            {"a": 1.0, "b": 2.0},
            title="",
            unit="",
            limit=(3, "limit"),
        ),
        "points": plot_bars(
            {"a": 1.0, "b": 2.0},
            title="",
            unit="",
            log=True,
        ),
        "first seconds": plot_first_seconds({"copy": [(0, 1)], "step": [(1, 2)]}),
        "comparison": plot_comparison(comparison),
    }


@pytest.mark.parametrize("sight", SIGHT)
def test_the_colours_of_each_chart_are_told_apart(figures, sight):
    for name, figure in figures.items():
        distance, *alike = find_closest(list_colours(figure), sight)
        assert distance >= CHARTS, f"{name}: {alike} are {distance:.0f} apart with {sight}"


@pytest.mark.parametrize("sight", SIGHT)
def test_neighbouring_objects_are_told_apart(sight):
    distance, *alike = find_closest(PALETTE, sight)
    assert distance >= OBJECTS, f"{alike} are {distance:.0f} apart with {sight}"


def test_the_measure_sees_what_the_eyes_see():
    assert find_lab("#ffffff", "all cones") == pytest.approx([100, 0, 0], abs=0.1)
    assert find_lab("#ff0000", "all cones") == pytest.approx([53.2, 80.1, 67.2], abs=0.2)
    # This green and this grey were once in the same chart.
    for sight, grey in (("deuteranopia", "#777777"), ("protanopia", "#777777")):
        assert (
            find_closest(["#009E73", grey], sight)[0]
            < 22
            < find_closest(["#009E73", grey], "all cones")[0]
        )
