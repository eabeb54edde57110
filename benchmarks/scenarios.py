"""The scenarios: which systems do which work, and what ours is to reach beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["SCENARIOS", "Scenario", "Target", "judge"]

Measure = Literal["images_per_second", "cpu_ms_per_image", "wait_share"]
_UNITS = {
    "images_per_second": "images/s",
    "cpu_ms_per_image": "CPU-ms an image",
    "wait_share": "share of waiting",
}


class Target(NamedTuple):
    """What a figure of ``system`` is to be, as a ratio to the best of ``over``, or by itself."""

    system: str
    measure: Measure
    over: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Scenario:
    """Systems on one dataset (see `benchmarks.data.DATA`); ``step_ms``: of an emulated step after
    each batch.
    """

    name: str
    idea: str
    data: str
    systems: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    step_ms: float | None = None


_PEERS = ("spdl", "memmap", "litdata", "mosaicml", "webdataset")


def _step(step_ms: float, largest_share: float) -> Scenario:
    return Scenario(
        f"step_{step_ms:g}",
        f"training with an emulated step of {step_ms:g} ms a batch of 4, 0.9 of a core busy",
        "kept",
        ("packed", "references"),
        (Target("packed", "wait_share", at_most=largest_share),),
        step_ms,
    )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "kept_jpeg",
            "JPEGs as they are, resized by the device; bare_decode: two threads that only decode",
            "kept",
            ("packed", "bare_decode", "references", "references_800", "spdl_files"),
            (
                Target("packed", "images_per_second", ("references",), at_least=4.5),
                Target("packed", "images_per_second", ("bare_decode",), at_least=0.85),
                Target("packed", "cpu_ms_per_image", ("references",), at_most=0.25),
            ),
        ),
        Scenario(
            "dense_jpeg_800",
            "JPEGs of quality 95 at 800/1333, as dense uint8 images and masks",
            "jpg_800",
            ("dense", *_PEERS),
            (Target("dense", "images_per_second", _PEERS, at_least=1.5),),
        ),
        Scenario(
            "photos_12mp",
            "photos of 12 megapixels; ours were shrunk once, when the shards were written",
            "photos_12mp",
            ("packed", "references"),
            (Target("packed", "images_per_second", ("references",), at_least=50),),
        ),
        Scenario(
            "objects_300",
            "300 objects in each image",
            "objects_300",
            ("packed", "references"),
            (Target("packed", "images_per_second", ("references",), at_least=30),),
        ),
        _step(20, 0.05),
        _step(100, 0.01),
        _step(180, 0.01),
        Scenario(
            "ssd_files_vs_shards",
            "loose files on the SSD against shards on the SSD, same loader: shards win nothing "
            "but the polygons that are drawn already",
            "kept",
            ("packed", "packed_files"),
        ),
    )
}
"""By name, in the order in which they run."""


def judge(target: Target, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a target beside what was measured: ``figures`` of the systems that are comparable.

    Example:
        >>> figures = {"ours": {"images_per_second": 480.0}, "peer": {"images_per_second": 100.0}}
        >>> judge(Target("ours", "images_per_second", ("peer",), at_least=4.5), figures)["reached"]
        True
    """
    choose = min if target.measure == "cpu_ms_per_image" else max
    others = [(figures[name][target.measure], name) for name in target.over if name in figures]
    best, best_name = choose(others) if others else (1.0, ", ".join(target.over))
    if target.at_least is not None:
        wanted = f"at least {target.at_least:.3g}"
    else:
        wanted = f"at most {target.at_most:.3g}"
    text = f"{_UNITS[target.measure]} of {target.system}"
    value = None
    if target.over:
        text += f" over {best_name}"
    if target.system in figures and (others or not target.over):
        value = figures[target.system][target.measure] / best
    reached = None
    if value is not None:
        is_high_enough = target.at_least is None or value >= target.at_least
        is_low_enough = target.at_most is None or value <= target.at_most
        reached = is_high_enough and is_low_enough
    return {"text": text, "wanted": wanted, "value": value, "reached": reached}
