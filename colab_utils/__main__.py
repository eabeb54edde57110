"""The command line: ``python -m colab_utils COMMAND``; each command wraps one function of the package."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from colab_utils import __version__
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import write_file

__all__ = ["main"]

_JSON_START = b'{\n "command": '


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 on bad input, 130 on Ctrl-C."""
    options = _make_parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", ColabUtilsWarning)
        try:
            _check_json(options.json)
            with redirect_stdout(sys.stderr):  # torch announces a download there; standard output is the result's
                report = options.run(options)
            return 0 if report is None else _finish(report, options)
        except ColabUtilsError as error:
            return _fail(str(error))
        except KeyboardInterrupt:
            print("\nstopped: what was finished is safe, the same command continues there", file=sys.stderr)
            return 130
        except OSError as error:
            return _fail(f"expected to read and write files, found: {error}. Check the disk, or mount Drive again.")
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):  # torch says so wherever the program is
                raise
            from colab_utils.loading.workers import explain_death

            return _fail(str(explain_death(str(error))))


def _finish(report: Any, options: argparse.Namespace) -> int:
    """Print the report, write its JSON, and name what is wrong in it."""
    content = {"command": options.command, **_to_plain(dataclasses.asdict(report))}
    if "stages" in content:  # the older name stays in the JSON
        content["layers"] = content.pop("stages")
    text = json.dumps(content, indent=1) + "\n"
    if options.json == "-":
        _print(text)
    else:
        if options.json:
            write_file(Path(options.json), text.encode())
        _print(f"{report}\n")
    bad = getattr(report, "bad", ())
    if bad:
        more = f" ({len(bad)} bad shards in all)" if len(bad) > 1 else ""
        return _fail(
            f"expected whole shards, found {bad[0].reason}{more}. Copy the named file again from a good folder, "
            "or delete it and run preprocess again: it makes what is missing."
        )
    if getattr(report, "ok", True) is False:
        first = next((problem for problem in report.problems if not problem.effect.startswith("note")), None)
        found = f"{first.count:,} x {first.kind} ({first.examples[0]})" if first else "no image"
        return _fail(
            f"expected a dataset without defects, found {found}. "
            "Write a repaired annotations file with --repair OUT.json, or mend the files."
        )
    return 0


def _check_json(target: str | None) -> None:
    """Before the work: can the JSON be written where it is to go, and is it no file of somebody's?"""
    if not target or target == "-":
        return
    path = Path(target)
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ColabUtilsError(f"expected a folder to write to for --json, found none at {path.parent}. Make it first.")
    if path.exists() and not (path.is_file() and path.read_bytes()[: len(_JSON_START)] in (b"", _JSON_START)):
        raise ColabUtilsError(
            f"expected a new file for --json or an earlier result, found something else at {path}. Name another: "
            "nothing of yours is overwritten."
        )


def _to_plain(value: Any) -> Any:
    """What JSON knows: nothing for a number that is none, and text for whatever else."""
    if isinstance(value, dict):
        return {str(key): _to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(part) for part in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # nobody reads on, or the disk is full: Python would try once more at exit, with noise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, ColabUtilsWarning):
        print(f"note: {message}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}. See {self.prog} --help.\n")


def _run_check(options: argparse.Namespace) -> Any:
    from colab_utils.data.checks import check_dataset, repair_annotations

    if options.repair:
        return repair_annotations(options.images, options.annotations, output=options.repair)
    return check_dataset(options.images, options.annotations)


def _run_diagnose(options: argparse.Namespace) -> Any:
    from colab_utils.diagnosis.diagnose import diagnose
    from colab_utils.diagnosis.timing import EmulatedStep
    from colab_utils.loading.dataset import CocoFolder, ShardDataset
    from colab_utils.loading.loader import make_loader

    if options.shards and not (options.images or options.annotations):
        dataset: Any = ShardDataset(options.shards)
    elif options.images and options.annotations and not options.shards:
        dataset = CocoFolder(options.images, options.annotations)
    else:
        raise ColabUtilsError("expected --images and --annotations together, or --shards alone. See --help.")
    loader = make_loader(dataset, batch_size=options.batch_size, workers=options.workers)
    try:
        return diagnose(loader, EmulatedStep(options.step_ms), verify=options.verify)
    finally:
        loader.close()


def _run_preprocess(options: argparse.Namespace) -> Any:
    from colab_utils.shards.write import find_recipe, write_shards

    names = ("shards", "min_size", "max_size", "workers", "storage", "jpeg_quality")
    settings = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    begun = None if options.plan else find_recipe(options.shards)
    if begun is not None:  # what is not asked for stays as it was begun
        settings["storage"] = begun["storage"] if options.storage == "auto" else options.storage
        settings = {"jpeg_quality": begun["jpeg_quality"], **settings}
    if options.plan or settings["storage"] == "auto":
        from colab_utils.shards.plan import plan_shards

        plan = plan_shards(options.images, options.annotations, step_ms=options.step_ms, **settings)
        if options.plan:
            return plan
        settings["storage"] = plan.picked.storage
        if options.json != "-":
            print("\n".join(f"note: {line}" for line in str(plan).splitlines()), file=sys.stderr)
    report = write_shards(
        options.images,
        options.annotations,
        shard_mb=options.shard_mb,
        max_bad=options.max_bad,
        **settings,
    )
    for image in report.skipped:
        print(f"skipped {image.file_name}: {image.reason}", file=sys.stderr)
    return report


def _run_verify(options: argparse.Namespace) -> Any:
    from colab_utils.shards.verify import verify_shards

    return verify_shards(options.shards)


def _run_copy(options: argparse.Namespace) -> Any:
    from colab_utils.shards.copy import copy_shards

    return copy_shards(options.shards, options.to, limit_gb=options.limit_gb)


def _run_train(options: argparse.Namespace) -> Any:
    from colab_utils.training.train import train

    names = (
        "local", "limit_gb", "val_shards", "steps", "epochs", "model", "batch_size", "min_size", "max_size",
        "learning_rate", "augment", "ema", "resume", "seed", "checkpoint_steps",
    )  # fmt: skip
    report = train(
        options.shards,
        options.run_folder,
        **{name: getattr(options, name) for name in names},
        log=None if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr),
    )
    return None if os.environ.get("RANK", "0") != "0" else report  # of several processes one speaks


def _run_compare(options: argparse.Namespace) -> Any:
    from colab_utils.comparison.compare import compare
    from colab_utils.show.report import check_receipt_folder, read_receipt, write_receipt

    check_receipt_folder(options.report)
    against = [read_receipt(path) for path in options.against]
    report = compare(
        options.images,
        options.annotations,
        folder=Path(options.report) / "work",
        strategies=[name.strip() for name in options.strategies.split(",")] if options.strategies else None,
        drive_profile=options.drive_profile,
        step_ms=options.step_ms,
        batch_size=options.batch_size,
        repeats=options.repeats,
        timeline_s=options.seconds,
        forecast_s=min(20.0, options.seconds),
    )
    page = write_receipt(report, Path(options.report), against=against)
    print(f"receipt: {page}", file=sys.stderr)
    return report


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m colab_utils", description="Find and cure data-loading stalls of Mask R-CNN.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", dest="command", required=True, parser_class=_Parser)

    def add(name: str, run: Callable[[argparse.Namespace], Any], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", metavar="FILE", help="write the result as JSON (- for standard output)")
        command.set_defaults(run=run)
        return command

    def add_coco(command: argparse.ArgumentParser, *, required: bool = True) -> None:
        command.add_argument("--images", metavar="DIR", required=required, help="image folder")
        command.add_argument("--annotations", metavar="FILE", required=required, help="COCO instance JSON")

    check = add("check", _run_check, "Look over a COCO dataset: every defect by name.")
    add_coco(check)
    check.add_argument("--repair", metavar="OUT.json", help="write annotations without what is defective")

    diagnose = add("diagnose", _run_diagnose, "What is training waiting for, and which fix wins most?")
    add_coco(diagnose, required=False)
    diagnose.add_argument("--shards", metavar="DIR", help="folder of shards, in place of images and annotations")
    diagnose.add_argument("--step-ms", type=_positive, default=100, help="emulated step, in ms a batch (100)")
    diagnose.add_argument("--batch-size", type=int, default=4, help="images in a batch (4)")
    diagnose.add_argument("--workers", type=_number_or_auto, default="auto", help="worker processes (auto)")
    diagnose.add_argument("--verify", action="store_true", help="apply the fixes that can be applied here, and measure")

    preprocess = add("preprocess", _run_preprocess, "Write a COCO dataset as shards.")
    add_coco(preprocess)
    preprocess.add_argument("--shards", metavar="DIR", required=True, help="folder to write to")
    preprocess.add_argument("--min-size", type=int, default=800, help="shorter side that training needs, px (800)")
    preprocess.add_argument("--max-size", type=int, default=1333, help="longer side that training needs, px (1333)")
    preprocess.add_argument(
        "--storage", choices=("auto", "keep", "shrink", "pixels"), default="auto",
        help="shrink larger images, keep every file's bytes, or raw pixels (auto: what a short trial here picks)",
    )  # fmt: skip
    preprocess.add_argument("--jpeg-quality", type=int, metavar="Q", help="of images that are shrunk, 1 to 100 (95)")
    preprocess.add_argument("--step-ms", type=_positive, metavar="MS", help="your training step for a batch of 4")
    preprocess.add_argument("--plan", action="store_true", help="print the plan with its estimate, and write nothing")
    preprocess.add_argument("--shard-mb", type=_number, default=128, help="size of a shard to aim at, MB (128)")
    preprocess.add_argument(
        "--workers", type=_number_or_auto, default="auto", help="processes (auto: one for each core)"
    )
    preprocess.add_argument("--max-bad", type=_share, default=0.01, help="share of bad images to allow: 0.01 or 1%%")

    verify = add("verify", _run_verify, "Check every shard against its checksum.")
    verify.add_argument("--shards", metavar="DIR", required=True, help="folder of shards")

    copy = add("copy", _run_copy, "Copy shards from Drive to the local SSD.")
    copy.add_argument("--shards", metavar="DIR", required=True, help="folder of shards to copy from")
    copy.add_argument("--to", metavar="DIR", required=True, help="folder to copy to")
    copy.add_argument("--limit-gb", type=_positive, metavar="G", help="copy only the first shards that fit, GB")

    train = add("train", _run_train, "Train a torchvision Mask R-CNN on shards; continues where it stopped.")
    train.add_argument("--shards", metavar="DIR", required=True, help="shards to train on")
    train.add_argument("--run", dest="run_folder", metavar="DIR", required=True, help="folder for checkpoints")
    train.add_argument("--local", metavar="DIR", help="folder on the SSD: copy the shards there while it trains")
    train.add_argument("--limit-gb", type=_positive, metavar="G", help="most that --local may hold: shards take turns")
    train.add_argument("--val-shards", metavar="DIR", help="shards to evaluate on: box and mask AP")
    length = train.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="train for N steps in all")
    length.add_argument("--epochs", type=int, metavar="N", help="train for N epochs in all (1)")
    train.add_argument("--model", metavar="NAME", help="model by torchvision's name (depends on the device)")
    train.add_argument(
        "--batch-size", type=_number_or_auto, default="auto", metavar="B", help="images in a batch (auto)"
    )
    train.add_argument("--min-size", type=int, metavar="PX", help="shorter side that images are resized to (800)")
    train.add_argument("--max-size", type=int, metavar="PX", help="limit of the longer side (5/3 of --min-size)")
    train.add_argument("--learning-rate", type=_positive, metavar="R", help="the highest (follows the batch size)")
    train.add_argument("--augment", choices=("none", "flip", "multiscale"), help="how images are varied (flip)")
    train.add_argument("--ema", type=float, metavar="DECAY", help="average the weights, say 0.999, and evaluate those")
    train.add_argument("--resume", choices=("auto", "never"), default="auto", help="continue a run, or begin anew")
    train.add_argument("--seed", type=_seed, default=0, help="of the order and of random weights (0)")
    train.add_argument(
        "--checkpoint-steps", type=int, metavar="N", help="steps between checkpoints (one in 1 to 5 minutes)"
    )

    compare = add("compare", _run_compare, "Time every way of loading, side by side, and write a receipt.")
    add_coco(compare)
    compare.add_argument("--strategies", metavar="A,B,C", help="names, separated by commas (13 of them)")
    compare.add_argument("--drive-profile", default="typical", metavar="NAME", help="speed of the slowed Drive folder")
    compare.add_argument("--step-ms", type=_positive, default=100, help="emulated step, in ms a batch (100)")
    compare.add_argument("--batch-size", type=int, default=4, help="images in a batch (4)")
    compare.add_argument("--repeats", type=int, default=3, help="how often each is timed, in turns (3)")
    compare.add_argument("--seconds", type=_positive, default=30, help="that each runs cold, for its timeline (30)")
    compare.add_argument(
        "--against", metavar="JSON", action="append", default=[], help="comparison.json of another machine; repeatable"
    )
    compare.add_argument("--report", metavar="DIR", required=True, help="folder for the receipt")

    return parser


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return value


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number or auto, found {text!r}") from None


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of 0 or more, found {text!r}")
    return int(text)


def _share(text: str) -> float:
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, or a percentage such as 5%, found {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
