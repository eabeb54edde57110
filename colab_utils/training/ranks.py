"""The processes that ``torchrun`` starts to train together: how they join, and how they agree.

If one process loads other images, or stops at an error, the others would wait for it in the middle
of a step. So all processes compare their data and settings before the first step. If these differ,
all end with the same message.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.ranks import Ranks, find_ranks

# How long the other processes wait for the first one, for example while it evaluates.
_PATIENCE = timedelta(minutes=30)


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started: by NCCL on GPUs, by gloo on CPUs.

    Without ``torchrun``, this process is alone.

    Example:
        >>> with join_ranks(torch.device("cpu")) as ranks:
        ...     ranks.count
        1
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    # If the user has made a process group, it is used, and not destroyed afterwards.
    joins = not distributed.is_initialized()
    if joins:
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE
        )
    try:
        yield find_ranks()
    finally:
        if joins:
            distributed.destroy_process_group()


@contextmanager
def share_errors(ranks: Ranks) -> Iterator[None]:
    """Raise an error in every process if one process has an error in the block.

    So no process waits for one that has stopped. The block must not wait for another process.

    Raises:
        ColabUtilsError: Another process had an error. The message has that error and its rank.

    Example:
        >>> with share_errors(Ranks()):
        ...     raise ColabUtilsError("There are no shards. Copy them first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There are no shards. Copy them first.
    """
    try:
        yield
    except Exception as error:
        ranks.gather(describe_error(error))
        raise
    for rank, text in enumerate(ranks.gather(None)):
        if text is not None:
            raise ColabUtilsError(
                f"Rank {rank} stopped before the first step, and so did all others. It says: {text}"
            )


def require_same(ranks: Ranks, facts: Mapping[str, Any]) -> None:
    """Raise an error in every process if a fact is not the same in all processes.

    Args:
        ranks: The processes that train together.
        facts: What this process has: texts, numbers or None. The keys are names for the message,
            which calls what is empty or 0 the default.

    Raises:
        ColabUtilsError: Some facts differ. The message lists their values, from rank 0 on.

    Example:
        >>> require_same(Ranks(), {"seed": 0})
    """
    others = ranks.gather(facts)
    values = {
        name: dict.fromkeys(str(other.get(name) or "default") for other in others) for name in facts
    }
    differences = [f"{name} ({', '.join(few)})" for name, few in values.items() if len(few) > 1]
    if differences:
        raise ColabUtilsError(
            f"The processes that train together differ in {'; '.join(differences)}. "
            "Start all of them with the same version, the same settings and complete copies "
            "of the same shards."
        )
