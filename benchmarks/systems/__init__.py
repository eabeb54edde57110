"""The systems by name; importing one needs its own environment, so each is imported when it is
asked for.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.systems.base import System

__all__ = ["SYSTEMS", "get_system"]

SYSTEMS = {
    "packed": "ours:Packed",
    "dense": "ours:Dense",
    "packed_files": "ours:PackedFiles",
    "bare_decode": "hand_made:BareDecode",
    "references": "references:References",
    "references_800": "references:References800",
    "memmap": "plain:Memmap",
    "webdataset": "streaming:WebDataset",
    "litdata": "streaming:LitData",
    "mosaicml": "streaming:MosaicML",
    "spdl": "pipelines:SPDL",
    "spdl_files": "pipelines:SPDLFiles",
}
"""Name: module and class. The first four are ours or made by hand, the others are peers."""


def get_system(name: str) -> type[System]:
    """The class of a system."""
    module, _, kind = SYSTEMS[name].partition(":")
    system: type[System] = getattr(import_module(f"benchmarks.systems.{module}"), kind)
    return system
