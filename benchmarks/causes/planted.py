"""The planted causes by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.causes import machine, reading, stepping, working
from benchmarks.causes.loop import Loop

__all__ = ["CAUSES", "PlantedCause"]


class PlantedCause(NamedTuple):
    """A loop with a cause of a stall, and what a diagnosis should say of it."""

    make_loop: Callable[..., Loop]
    """Writes its files into a folder, and gives the loader, the step, and what follows each step.
    """
    expected: str
    """The cause that should be named."""
    advice: str
    """A regular expression that the advice should match."""


CAUSES = {
    "read": PlantedCause(
        reading.make_read,
        "read",
        r"(?i)shards|local (SSD|disk)|more workers",
    ),
    "bandwidth": PlantedCause(
        reading.make_bandwidth, "read", r"(?i)local (SSD|disk)|smaller|shrink|resize"
    ),
    "transform": PlantedCause(
        working.make_transform,
        "work",
        r"(?is)transform.*(cheaper|faster|GPU|device)|(cheaper|faster|GPU|device).*transform",
    ),
    "masks": PlantedCause(
        working.make_masks,
        "masks",
        r"(?i)packed|shards|make_loader",
    ),
    "collate": PlantedCause(
        working.make_collate,
        "collate",
        r"(?is)collate(_fn)?.*(cheaper|faster)|(cheaper|faster).*collate",
    ),
    "handoff": PlantedCause(
        working.make_handoff,
        "hand-off",
        r"(?i)(batches|tensors) smaller|smaller (batches|tensors)|uint8|make_loader",
    ),
    "too_many_workers": PlantedCause(
        machine.make_too_many_workers, "too_many_workers", r"(?i)fewer workers"
    ),
    "restarts": PlantedCause(
        machine.make_restarts,
        "restarts",
        r"persistent_workers",
    ),
    "slow_sample": PlantedCause(reading.make_slow_sample, "slow_sample", r"\b37\b"),
    "memory": PlantedCause(
        machine.make_memory, "memory", r"(?i)keep no|stop keeping|keeps? .* sample"
    ),
    "hang": PlantedCause(
        reading.make_hang,
        "hang",
        r"(?i)leave .*out|local disk|mount",
    ),
    "between": PlantedCause(
        stepping.make_between, "between", r"(?i)log less often|every .* steps|thread"
    ),
    "periodic": PlantedCause(
        stepping.make_periodic, "periodic", r"(?i)checkpoints?\b.*(less often|thread|background)"
    ),
    "step": PlantedCause(
        stepping.make_step, "step", r"(?i)loader is fine|nothing to win|faster (step|model|GPU)"
    ),
    "contention": PlantedCause(
        machine.make_contention, "contention", r"(?i)num_threads|fewer (workers|threads)"
    ),
    "lock": PlantedCause(
        working.make_lock,
        "lock",
        r"(?i)more workers would not help.*lock",
    ),
    "sampler": PlantedCause(
        stepping.make_sampler,
        "main_process",
        r"(?i)that line cheaper",
    ),
    "accumulation": PlantedCause(
        stepping.make_accumulation, "between", r"(?i)log .*less often|thread"
    ),
    "first_samples": PlantedCause(
        reading.make_first_samples,
        "sleep",
        r"(?i)what sleeps",
    ),
    "helper_threads": PlantedCause(working.make_helper_threads, "work", r"(?i)cheaper"),
    "other_process": PlantedCause(
        working.make_other_process, "other_process", r"(?i)ask .*for less|keep (it|its answers) in"
    ),
    "batched": PlantedCause(working.make_batched, "work", r"(?i)cheaper"),
    "copy_on_access": PlantedCause(
        machine.make_copy_on_access, "memory", r"(?i)numpy arrays in place of lists"
    ),
    "two_loaders": PlantedCause(
        stepping.make_two_loaders,
        "other_loader",
        r"(?i)watch\(it\)",
    ),
    "cut_file": PlantedCause(reading.make_cut_file, "hang", r"A mapped file .*became shorter"),
    "spawned_hang": PlantedCause(
        reading.make_spawned_hang,
        "hang",
        r"(?i)needs a timeout",
    ),
    "database": PlantedCause(reading.make_database, "sleep", r"(?i)database"),
}
