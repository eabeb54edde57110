"""The main process logs for 60 ms after each step."""

from __future__ import annotations

from pathlib import Path

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

EXPECTED = "between"
NEXT = r"(?i)log less often|every .* steps|thread"
EPOCHS = 1


def make_loop(folder: Path) -> Loop:
    """Loading and the step are fast, the logging is slow."""

    def log(number: int) -> None:
        burn(60)
        with (folder / "log.txt").open("a") as file:
            file.write(f"step {number}\n")

    return make_plain_loader(Photos(folder)), Step(), log
