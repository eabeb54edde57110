"""`colab_utils.compare` with other libraries among the strategies: `packed`, `webdataset`,
`litdata` and so on.

Each library that is named must be installed (benchmarks/requirements.txt); one that is missing gets
a row that says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import PEERS
from colab_utils.comparison.compare import compare
from colab_utils.comparison.strategies import STRATEGIES
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.show.report import check_receipt_folder, write_receipt

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and write the receipt; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--images", type=Path, metavar="DIR", required=True, help="image folder")
    parser.add_argument("--annotations", type=Path, metavar="FILE", required=True, help="COCO JSON")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", required=True, help="where the receipt goes"
    )
    parser.add_argument(
        "--strategies",
        metavar="A,B,C",
        default=",".join(("packed", *PEERS)),
        help=f"names of {', '.join((*STRATEGIES, *PEERS))}; default: %(default)s",
    )
    parser.add_argument(
        "--drive-profile", default="none", metavar="NAME", help="how slow Drive is made (none)"
    )
    parser.add_argument(
        "--step-ms", type=float, default=100.0, help="length of the emulated step (100)"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="images in a batch (4)")
    parser.add_argument("--batches", type=int, default=24, help="timed batches of each repeat (24)")
    parser.add_argument("--repeats", type=int, default=3, help="how often each is timed (3)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each cold run (30)")
    options = parser.parse_args(arguments)
    names = [name.strip() for name in options.strategies.split(",")]
    try:
        check_receipt_folder(options.report)
        comparison = compare(
            options.images,
            options.annotations,
            folder=options.report / "work",
            strategies=[PEERS.get(name, name) for name in names],
            drive_profile=options.drive_profile,
            step=EmulatedStep(options.step_ms),
            batch_size=options.batch_size,
            batches=options.batches,
            repeats=options.repeats,
            timeline_s=options.seconds,
        )
        print(comparison)
        print(f"receipt: {write_receipt(comparison, options.report)}", file=sys.stderr)
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
