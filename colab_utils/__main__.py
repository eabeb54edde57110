"""The command line: ``python -m colab_utils COMMAND``; each command calls one function of the
package.
"""

import argparse
import dataclasses
import inspect
import json
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any, Literal, NoReturn

import colab_utils
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, escape
from colab_utils.files import require_new, write_file
from colab_utils.require import require_local_path
from colab_utils.slow_drive import find_profile

_JSON_START = b'{\n "command": '


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 on bad input, 3 below --fail-below, 130 on
    Ctrl-C.
    """
    # the rest is passed on to the command's function
    options = vars(_make_parser().parse_args(arguments))
    command = options.pop("command")
    function = options.pop("function")
    target = options.pop("json")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", ColabUtilsWarning)
        try:
            _check_json(target)
            # torch announces a download there; standard output is the result's
            with redirect_stdout(sys.stderr):
                report = function(**options)
            return 0 if report is None else _finish(report, command, target)
        except ColabUtilsError as error:
            return _fail(error)
        except KeyboardInterrupt:
            print(
                "\nstopped: what was finished is safe, the same command continues there",
                file=sys.stderr,
            )
            return 130
        except OSError as error:
            return _fail(
                ColabUtilsError(
                    f"expected to read and write files, found: {error}. Check disk and Drive."
                )
            )


def _finish(report: Any, command: str, target: str) -> int:
    """Print the report, write its JSON, and name what is wrong in it."""
    content = {"command": command, **dataclasses.asdict(report)}
    if "stages" in content:  # the older name stays in the JSON
        content["layers"] = content.pop("stages")
    text = _to_json(content)
    if target not in ("", "-"):
        _check_json(target)  # by now --repair or --report may lie there
        write_file(Path(target), text.encode())
    _print(
        text if target == "-" else "".join(f"{escape(line)}\n" for line in str(report).split("\n"))
    )
    if getattr(getattr(report, "change", None), "fails", False):
        _fail(
            ColabUtilsError(
                "expected no slower loop than --fail-below allows, found one. See the last line."
            )
        )
        return 3
    if bad := getattr(report, "bad", ()):
        cure = (
            "Copy the named file again from a good folder, or delete it and run preprocess again."
        )
        raise ColabUtilsError(f"expected complete shards, found {bad[0].reason}. {cure}")
    if not getattr(report, "ok", True):
        first = next(
            problem for problem in report.problems if not problem.effect.startswith("note")
        )
        found = f"{first.count:,} x {first.kind} ({first.examples[0]}): {first.effect}"
        cure = "Write a repaired annotations file with --repair OUT.json, or repair the files."
        raise ColabUtilsError(f"expected a dataset without defects, found {found}. {cure}")
    return 0


def _check_json(target: str) -> None:
    """Refuse a place where the JSON cannot be written, or would lie over somebody's file."""
    if target not in ("", "-"):
        folder = Path(target).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ColabUtilsError(
                f"expected a folder to write --json into, found {folder}: make it first"
            )
        require_new(Path(target), _JSON_START)


def _to_json(content: dict[str, Any]) -> str:
    """As JSON knows it: null for a number that is none, and text for whatever else."""
    text = json.dumps(
        content, default=lambda value: value.item() if hasattr(value, "item") else str(value)
    )
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1) + "\n"


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except OSError as error:
        # nobody reads on, or the disk is full: Python would try once more at exit, with noise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _fail(error: ColabUtilsError) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, ColabUtilsWarning):
        print(f"note: {message}", file=sys.stderr)


def _check(
    images: str,
    annotations: str,
    repair: str = "",
    crowds: Any = "leave",
    val_images: str = "",
    val_annotations: str = "",
    report: str = "",
    deep: bool = False,
) -> Any:
    """Look over a COCO dataset: every defect by name."""
    from colab_utils.data.repair import repair_annotations
    from colab_utils.show.report import write_check

    if repair:
        found = repair_annotations(images, annotations, output=repair, crowds=crowds)
    else:
        validation = (val_images or images, val_annotations) if val_annotations else None
        found = colab_utils.check_dataset(images, annotations, deep=deep, validation=validation)
    if report:
        print(
            f"report: {write_check(found, images, annotations, report, repaired=repair)}",
            file=sys.stderr,
        )
    return found


def _diagnose(
    images: str = "",
    annotations: str = "",
    shards: str = "",
    step_ms: float = 100,
    batch_size: int = 4,
    workers: int | Literal["auto"] = "auto",
    verify: bool = False,
    against: str = "",
    fail_below: float | None = None,
) -> Any:
    """What is training waiting for, and which fix wins most?"""
    from colab_utils.diagnosis.diagnose import compare_runs, read_run
    from colab_utils.loading.emulated_step import EmulatedStep

    if fail_below is not None and not against:
        raise ColabUtilsError(
            "expected --against FILE beside --fail-below, found none. Name an earlier JSON."
        )
    before = read_run(against) if against else None  # before the work: a wrong file is said at once
    if shards and not (images or annotations):
        dataset: Any = colab_utils.ShardDataset(shards)
    elif images and annotations and not shards:
        dataset = colab_utils.CocoFolder(images, annotations)
    else:
        raise ColabUtilsError(
            "expected --images and --annotations, or --shards alone, found others. See --help."
        )
    with closing(
        colab_utils.make_loader(dataset, batch_size=batch_size, workers=workers)
    ) as loader:
        found = colab_utils.diagnose(loader, EmulatedStep(step_ms), verify=verify)
    if before is None:
        return found
    now = {
        "images_per_second": found.images_per_second,
        "wait_share": found.stall_share,
        "error": found.error,
    }
    return dataclasses.replace(
        found, change=compare_runs(before, now, fail_below=fail_below or 0.0)
    )


def _preprocess(
    images: str,
    annotations: str,
    shards: str,
    plan: bool = False,
    storage: Any = "auto",
    **settings: Any,
) -> Any:
    """Write a COCO dataset as shards."""
    from colab_utils.shards.plan import plan_shards
    from colab_utils.shards.write import find_recipe

    if storage == "auto" and (begun := find_recipe(shards)):
        storage = begun["storage"]  # what is not asked for stays as it was begun
    if plan or storage == "auto":
        sizes = {
            name: settings[name] for name in settings.keys() & {"min_size", "max_size", "workers"}
        }
        found = plan_shards(images, annotations, storage=storage, **sizes)
        if plan:
            return found
        storage = found.storage
        print(f"note: {found}", file=sys.stderr)
    report = colab_utils.write_shards(
        images, annotations, shards=shards, storage=storage, **settings
    )
    for image in report.skipped:
        print(escape(f"skipped {image.file_name}: {image.reason}"), file=sys.stderr)
    return report


def _verify(shards: str) -> Any:
    """Check every shard against its checksum."""
    return colab_utils.verify_shards(shards)


def _copy(shards: str, to: str, **options: Any) -> Any:
    """Copy shards from Drive to the local SSD."""
    return colab_utils.copy_shards(shards, to, **options)


def _train(shards: str, run: str, **options: Any) -> Any:
    """Train a torchvision Mask R-CNN on shards; continues where it stopped."""
    log = None if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr)
    report = colab_utils.train(shards, run, **options, log=log)
    return None if os.environ.get("RANK", "0") != "0" else report  # of several processes one speaks


def _compare(
    report: str,
    images: str = "",
    annotations: str = "",
    strategies: str = "",
    step_ms: float = 100,
    against: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Time every way of loading, side by side, and write a receipt."""
    from colab_utils.loading.emulated_step import EmulatedStep
    from colab_utils.show.charts import plot_receipts, read_receipts
    from colab_utils.show.report import check_receipt_folder, write_receipt
    from colab_utils.show.table import make_table

    if against:
        figure = plot_receipts(against)
        Path(report).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(report, "receipts.png"))
        return make_table(read_receipts(against))
    if not (images and annotations):
        raise ColabUtilsError(
            "expected --images and --annotations, or --against, found neither. See --help."
        )
    check_receipt_folder(report)
    options.setdefault("drive_profile", find_profile(images) or "typical")
    options |= {
        "strategies": strategies.split(",") if strategies else None,
        "step": EmulatedStep(step_ms),
    }
    found = colab_utils.compare(images, annotations, **options, folder=Path(report) / "work")
    print(f"receipt: {write_receipt(found, Path(report))}", file=sys.stderr)
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {escape(' '.join(message.split()))}. See {self.prog} --help.\n")


def positive_number(text: str) -> float:
    """In argparse's messages: "invalid positive_number value: ..."."""
    if not 0 < (value := float(text)) < float("inf"):
        raise ValueError(text)
    return value


def number_or_auto(text: str) -> int | str:
    """The same, for what may be chosen here."""
    return text if text == "auto" else int(text)


def local_path(text: str) -> str:
    """Return the path of a folder or a file as it was given; a URL is told before any work
    begins.
    """
    try:
        require_local_path(text)
    except ColabUtilsError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
    return text


_DIR: dict[str, Any] = {"metavar": "DIR", "type": local_path}
_FILE: dict[str, Any] = {"metavar": "FILE", "type": local_path}
_JSON: dict[str, Any] = {**_FILE, "metavar": "JSON"}
_COUNT = {"metavar": "N", "type": int}
_NUMBER: dict[str, Any] = {"metavar": "X", "type": positive_number}
_AUTO = {"metavar": "N", "type": number_or_auto}
_COMMANDS = (_check, _diagnose, _preprocess, _verify, _copy, _train, _compare)
# the commands that take it, the option, its kind, what it is and its default
_OPTIONS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("check diagnose preprocess compare", "--images", _DIR, "image folder"),
    ("check diagnose preprocess compare", "--annotations", _FILE, "COCO instance JSON"),
    ("check", "--deep", {"action": "store_true"}, "decode each image, in place of its header"),
    (
        "check",
        "--repair",
        {**_FILE, "metavar": "OUT.json"},
        "write a repaired copy of the annotations",
    ),
    (
        "check",
        "--report",
        {**_FILE, "metavar": "FILE.html"},
        "write a page: what to do, the worst images, the data in numbers",
    ),
    (
        "check",
        "--crowds",
        {"choices": ("leave", "objects")},
        "with --repair: take crowds as objects, as CVAT's masks",
    ),
    ("check", "--val-images", _DIR, "image folder of the validation set (that of --images)"),
    ("check", "--val-annotations", _FILE, "its JSON: is a picture in both?"),
    ("diagnose preprocess verify copy train", "--shards", _DIR, "folder of shards"),
    ("copy", "--to", _DIR, "folder to copy to"),
    ("train", "--run", _DIR, "folder for checkpoints"),
    ("train", "--local", _DIR, "folder on the SSD: copy the shards there while it trains"),
    (
        "copy train",
        "--limit-gb",
        _NUMBER,
        "most to hold there, GB: copy takes the first that fit, train takes turns",
    ),
    ("train", "--val-shards", _DIR, "shards to evaluate on: box and mask AP"),
    ("train", "--steps", _COUNT, "train for N steps in all"),
    ("train", "--epochs", _COUNT, "or for N epochs in all (1)"),
    (
        "train",
        "--model",
        {"metavar": "NAME"},
        "model by torchvision's name (depends on the device)",
    ),
    ("train", "--batch-size", _AUTO, "images in a batch (auto)"),
    ("diagnose compare", "--batch-size", _COUNT, "images in a batch (4)"),
    ("diagnose preprocess", "--workers", _AUTO, "worker processes (auto)"),
    (
        "diagnose preprocess compare",
        "--step-ms",
        _NUMBER,
        "training step, ms a batch of 4: emulated (100), or yours",
    ),
    (
        "diagnose",
        "--verify",
        {"action": "store_true"},
        "apply the fixes that can be applied here, and measure",
    ),
    ("diagnose", "--against", _JSON, "say what changed since this earlier result"),
    (
        "diagnose",
        "--fail-below",
        {"metavar": "RATIO", "type": float},
        "exit status 3 if images/s fall below it: 0.9",
    ),
    ("preprocess train", "--min-size", _COUNT, "shorter side in training, px (800)"),
    (
        "preprocess train",
        "--max-size",
        _COUNT,
        "limit of the longer side, px (1333; train: 5/3 of --min-size)",
    ),
    (
        "preprocess",
        "--storage",
        {"choices": ("auto", "keep", "shrink", "pixels")},
        "shrink larger images, keep every file's bytes, or raw pixels (auto: shrink, if any is "
        "larger)",
    ),
    (
        "preprocess",
        "--plan",
        {"action": "store_true"},
        "print the plan with its estimate, and write nothing",
    ),
    ("preprocess", "--shard-mb", _NUMBER, "size of a shard to aim at, MB (128)"),
    (
        "preprocess",
        "--max-bad",
        {"metavar": "SHARE", "type": float},
        "share of bad images or objects to allow (0.01)",
    ),
    ("train", "--learning-rate", _NUMBER, "the highest (follows the batch size)"),
    ("train", "--resume", {"choices": ("auto", "never")}, "continue a run, or begin anew (auto)"),
    ("train", "--seed", _COUNT, "of the order and of random weights (0)"),
    (
        "train",
        "--checkpoint-steps",
        _COUNT,
        "steps between checkpoints (one a minute, and at an epoch's end)",
    ),
    ("compare", "--strategies", {"metavar": "A,B,C"}, "names, separated by commas (13 of them)"),
    (
        "compare",
        "--drive-profile",
        {"metavar": "NAME"},
        "speed of Drive (that of a slowed folder, else typical)",
    ),
    ("compare", "--repeats", _COUNT, "how often each is timed, in turns (3)"),
    (
        "compare",
        "--seconds",
        {**_NUMBER, "dest": "timeline_s"},
        "that each runs cold, for its timeline (30)",
    ),
    ("compare", "--report", _DIR, "folder for the receipt"),
    (
        "compare",
        "--against",
        {**_JSON, "nargs": "+"},
        "draw these receipts of many machines, time nothing",
    ),
)


def _make_parser() -> argparse.ArgumentParser:
    """An option that is not given is left to the default of the command's function; one without a
    default is needed.
    """
    parser = _Parser(
        prog="python -m colab_utils", description="Find and cure data-loading stalls of Mask R-CNN."
    )
    parser.add_argument("--version", action="version", version=colab_utils.__version__)
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for function in _COMMANDS:
        name = function.__name__.removeprefix("_")
        text = function.__doc__
        command = commands.add_parser(
            name, help=text, description=text, argument_default=argparse.SUPPRESS
        )
        needed = {
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty
        }
        command.set_defaults(function=function)
        command.add_argument(
            "--json", **_FILE, default="", help="write the result as JSON (-: standard output)"
        )
        for names, flag, kind, meaning in _OPTIONS:
            if name in names.split():
                command.add_argument(
                    flag, **kind, required=flag.removeprefix("--") in needed, help=meaning
                )
    return parser


if __name__ == "__main__":
    sys.exit(main())
