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
    "dense_float": "ours:DenseFloat",
    "packed_files": "ours:PackedFiles",
    "bare_decode": "hand_made:BareDecode",
    "ceiling": "hand_made:Ceiling",
    "references": "references:References",
    "references_800": "references:References800",
    "pt_files": "plain:PtFiles",
    "memmap": "plain:Memmap",
    "webdataset": "streaming:WebDataset",
    "litdata": "streaming:LitData",
    "mosaicml": "streaming:MosaicML",
    "spdl": "pipelines:SPDL",
    "spdl_files": "pipelines:SPDLFiles",
    "tf_data": "pipelines:TFData",
}
"""Name: module and class. The first six are ours or made by hand, the others are peers."""


def get_system(name: str) -> type[System]:
    """The class of a system."""
    module, _, kind = SYSTEMS[name].partition(":")
    system: type[System] = getattr(import_module(f"benchmarks.systems.{module}"), kind)
    return system
