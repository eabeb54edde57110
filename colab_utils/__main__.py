"""The command line: ``python -m colab_utils COMMAND``.

Each command calls one function of the package, and prints what the function returns.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, NoReturn

import colab_utils
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, escape
from colab_utils.files import name_temporary, require_new, write_file
from colab_utils.os_errors import explain_os_error
from colab_utils.places import open_place, require_local_path
from colab_utils.processes import explain_limits
from colab_utils.slow_drive import find_profile

_JSON_START = b'{\n "command": '
_SCRIPT = "colab-utils"
_STEP = "milliseconds of your training step for a batch; the step is emulated (100)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {escape(' '.join(message.split()))}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    The status is 0 after success, 2 after bad input, and 130 after Ctrl-C. Training also ends with
    143 after SIGTERM, and with 129 after SIGHUP.
    """
    # Three entries are for this function. All others are arguments of the command's function.
    options = vars(_make_parser().parse_args(arguments))
    command = options.pop("command")
    run = options.pop("run_command")
    target = options.pop("json")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", ColabUtilsWarning)
        try:
            _check_json(target)
            # Only the result belongs on standard output, and torch prints its downloads there.
            with redirect_stdout(sys.stderr), explain_limits():
                report = run(**options)
            return 0 if report is None else _finish(report, command, target)
        except ColabUtilsError as error:
            return _fail(error)
        except KeyboardInterrupt:
            print(
                "\nstopped: nothing half-done is left, and the same command uses what was finished",
                file=sys.stderr,
            )
            return 130
        except OSError as error:
            reason = explain_os_error(error, "Check disk and Drive.")
            return _fail(f"{error.filename or 'A file'} cannot be read or written: {reason}")


def _finish(report: Any, command: str, target: str) -> int:
    """Print the report, write its JSON, and name what is wrong in it."""
    content = {"command": command, **dataclasses.asdict(report)}
    # Programs that read the JSON know the stages under this older name.
    if "stages" in content:
        content["layers"] = content.pop("stages")
    text = _to_json(content)
    # The command itself may have written another file under this name: --repair or --report.
    _check_json(target)
    if target == "-":
        _print(text)
    else:
        if target:
            with _end_after_cleaning():
                write_file(Path(target), text.encode())
        _print("".join(f"{escape(line)}\n" for line in str(report).split("\n")))
    bad = getattr(report, "bad", ())
    if bad:
        raise ColabUtilsError(
            f"Shards are damaged or missing: {bad[0].reason}. Copy the named file again from a "
            "good folder, or delete it and run preprocess again."
        )
    if not getattr(report, "ok", True):
        problem = next(
            problem for problem in report.problems if not problem.effect.startswith("note")
        )
        cure = "Write a repaired annotations file with --repair OUT.json, or repair the files."
        # An effect with a colon says already what to do.
        if ": " in problem.effect:
            cure = ""
        raise ColabUtilsError(
            f"The dataset has defects, such as {problem.count:,} x {problem.kind} "
            f"({problem.examples[0]}): {problem.effect}. {cure}"
        )
    return 0


@contextmanager
def _end_after_cleaning() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in the block, so that the block can remove its files."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_json(target: str) -> None:
    """Refuse a file name where the JSON cannot be written, or would replace another file."""
    if target in ("", "-"):
        return
    folder = Path(target).parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ColabUtilsError(
            f"The folder {folder} of --json does not exist or cannot be written to. Make it first, "
            "or name another one."
        )
    path = require_new(Path(target), _JSON_START)
    # A name that is too long, or a full disk, must not end hours of work. The first bytes go to a
    # file without a name, of which nothing stays if this process is killed.
    with explain_write(folder), TemporaryFile(dir=folder) as file:
        name_temporary(path).unlink(missing_ok=True)
        file.write(_JSON_START)


def _to_json(content: dict[str, Any]) -> str:
    text = json.dumps(content, default=_to_plain)
    # JSON knows no infinity and no NaN: they become null.
    content = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(content, indent=1) + "\n"


def _to_plain(value: Any) -> Any:
    """Return a numpy number as a Python number, and any other value as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
    except OSError as error:
        # The reader has closed the pipe, or the disk is full. At its exit Python would write again,
        # and print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def _fail(error: ColabUtilsError | str) -> int:
    print("error: " + escape(" ".join(str(error).split())), file=sys.stderr)
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
    exif: Any = "auto",
) -> Any:
    """Look over a COCO dataset: every defect by name."""
    from colab_utils.data.coco import CocoDataset, read_coco
    from colab_utils.data.repair import repair_annotations
    from colab_utils.show.report import write_check

    if val_images and not val_annotations:
        raise ColabUtilsError(
            "--val-images is given without --val-annotations. Name its JSON, too."
        )
    validation = (val_images or images, val_annotations) if val_annotations else None
    source: str | CocoDataset = annotations
    settings: Any = {"deep": deep, "validation": validation, "exif": exif}
    if repair:
        checked = repair_annotations(images, annotations, output=repair, crowds=crowds, **settings)
        source = repair
    else:
        source = read_coco(annotations)
        checked = colab_utils.check_dataset(images, source, **settings)
    if report:
        page = write_check(checked, images, source, report)
        print(f"report: {page}", file=sys.stderr)
    return checked


def _add_check_options(command: _Parser) -> None:
    _add_dataset(command, required=True)
    command.add_argument(
        "--deep", action="store_true", help="decode each whole image, not only its header"
    )
    _add_path(command, "--repair", "OUT.json", "write a repaired copy of the annotations")
    _add_path(
        command,
        "--report",
        "FILE.html",
        "write a page: what to do, the worst images, the data in numbers",
    )
    command.add_argument(
        "--crowds",
        choices=("leave", "objects"),
        help="with --repair: make objects of crowds, such as CVAT's masks (leave)",
    )
    _add_exif(command)
    _add_place(
        command, "--val-images", "DIR", "image folder of the validation set (that of --images)"
    )
    _add_place(
        command,
        "--val-annotations",
        "FILE",
        "JSON of the validation set (finds images that are in both sets)",
    )


def _diagnose(
    images: str = "",
    annotations: str = "",
    shards: str = "",
    step_ms: float = 100,
    batch_size: int = 4,
    workers: int | Literal["auto"] = "auto",
    verify: bool = False,
) -> Any:
    """Find what training waits for, and which fix wins most."""
    from colab_utils.loading.emulated_step import EmulatedStep

    if shards and not (images or annotations):
        dataset: Any = colab_utils.ShardDataset(shards)
    elif images and annotations and not shards:
        dataset = colab_utils.CocoFolder(images, annotations)
    else:
        raise ColabUtilsError(
            "The data are either --images and --annotations, or --shards alone. See --help."
        )
    loader = colab_utils.make_loader(dataset, batch_size=batch_size, workers=workers)
    with closing(loader):
        return colab_utils.diagnose(loader, EmulatedStep(step_ms), verify=verify)


def _add_diagnose_options(command: _Parser) -> None:
    _add_dataset(command)
    _add_place(command, "--shards", "DIR", "folder of shards")
    _add_count(command, "--batch-size", "images in a batch (4)")
    _add_count(command, "--workers", "worker processes (auto)", kind=number_or_auto)
    _add_number(command, "--step-ms", _STEP)
    command.add_argument(
        "--verify",
        action="store_true",
        help="apply the fixes that can be applied here, and measure",
    )


def _preprocess(
    images: str,
    annotations: str,
    shards: str,
    plan: bool = False,
    part: tuple[int, int] | None = None,
    finish: bool = False,
    storage: Any = "auto",
    **settings: Any,
) -> Any:
    """Write a COCO dataset as shards."""
    from colab_utils.shards.folder_state import inspect_folder
    from colab_utils.shards.plan import Annotations, open_annotations, plan_shards

    if finish:
        max_bad = {name: settings[name] for name in settings.keys() & {"max_bad"}}
        report = colab_utils.finish_shards(images, annotations, shards=shards, **max_bad)
        return _name_skipped(report)
    begun = inspect_folder(shards).recipe if storage == "auto" else {}
    if begun:
        # Some shards are written already: without --storage, the others are stored the same way.
        storage = begun["storage"]
    opened: Annotations = annotations
    if plan or storage == "auto":
        names = settings.keys() & {"min_size", "max_size", "workers"}
        sizes = {name: settings[name] for name in names}
        opened = open_annotations(images, annotations)
        planned = plan_shards(images, opened, storage=storage, **sizes)
        if plan:
            return planned
        storage = planned.storage
        print(f"note: {planned}", file=sys.stderr)
    settings |= {"shards": shards, "storage": storage, "part": part}
    report = _name_skipped(colab_utils.write_shards(images, opened, **settings))
    if part is None:
        return report
    number, count = part
    print(
        f"note: part {number} of {count} is written. When all parts are written, run preprocess "
        "with --finish in place of --part.",
        file=sys.stderr,
    )
    return report


def _name_skipped(report: Any) -> Any:
    """Print the name of each image that was left out, and return the report."""
    for image in report.skipped:
        print(escape(f"skipped {image.file_name}: {image.reason}"), file=sys.stderr)
    return report


def _add_preprocess_options(command: _Parser) -> None:
    _add_dataset(command, required=True)
    _add_place(command, "--shards", "DIR", "folder of shards", required=True)
    modes = command.add_mutually_exclusive_group()
    modes.add_argument(
        "--plan", action="store_true", help="print the plan with its estimate, and write nothing"
    )
    modes.add_argument(
        "--part",
        metavar="I/N",
        type=part_of_all,
        help="write only part I of N; machines write the parts in any order, and may repeat them",
    )
    modes.add_argument(
        "--finish",
        action="store_true",
        help="write the index if all parts are written; otherwise name the missing ones",
    )
    _add_count(command, "--workers", "worker processes (auto)", kind=number_or_auto)
    _add_count(
        command, "--streams", "files that each process reads at once (auto)", kind=number_or_auto
    )
    _add_count(command, "--min-size", "shorter side in training, px (800)")
    _add_count(command, "--max-size", "limit of the longer side, px (1333)")
    command.add_argument(
        "--storage",
        choices=("auto", "keep", "shrink", "pixels"),
        help="shrink: make images smaller that are larger than training needs; keep: keep every "
        "file's bytes; pixels: shrink, and store raw pixels (auto: shrink if any image is larger)",
    )
    _add_exif(command)
    _add_number(command, "--shard-mb", "approximate size of a shard, MB (128)")
    command.add_argument(
        "--max-bad",
        metavar="X",
        type=share_or_count,
        help="bad images or objects to allow: a share such as 0.05, or a number such as 5 (0.01)",
    )


def _verify(shards: str) -> Any:
    """Check every shard against its checksum."""
    return colab_utils.verify_shards(shards)


def _add_verify_options(command: _Parser) -> None:
    _add_place(command, "--shards", "DIR", "folder of shards", required=True)


def _copy(shards: str, to: str, **options: Any) -> Any:
    """Copy shards from Drive to the local SSD."""
    return colab_utils.copy_shards(shards, to, **options)


def _add_copy_options(command: _Parser) -> None:
    _add_place(command, "--shards", "DIR", "folder of shards", required=True)
    _add_place(command, "--to", "DIR", "folder to copy to", required=True)
    _add_number(command, "--limit-gb", "copy only the first shards that fit into X GB")


def _train(run: str, **options: Any) -> Any:
    """Train a torchvision Mask R-CNN on shards or images; continues where it stopped."""
    log = None if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr)
    report = colab_utils.train(run=run, **options, log=log)
    # With several processes, only the first one prints the report.
    return report if os.environ.get("RANK", "0") == "0" else None


def _add_train_options(command: _Parser) -> None:
    _add_place(command, "--shards", "DIR", "folder of shards")
    _add_dataset(command)
    _add_place(command, "--drive", "DIR", "folder on Drive for the shards of --images")
    _add_place(command, "--run", "DIR", "folder for checkpoints", required=True)
    command.add_argument(
        "--ssd",
        metavar="DIR",
        type=local_path,
        help="folder on the SSD: copy or write the shards there while it trains",
    )
    _add_place(command, "--val-shards", "DIR", "shards to evaluate on: box and mask AP")
    _add_count(command, "--steps", "train for N steps in all")
    _add_count(command, "--epochs", "or for N epochs in all (1)")
    command.add_argument(
        "--model", metavar="NAME", help="model by torchvision's name (depends on the device)"
    )
    _add_count(command, "--batch-size", "images in a batch (auto)", kind=number_or_auto)
    _add_count(command, "--min-size", "shorter side in training, px (800)")
    _add_count(command, "--max-size", "limit of the longer side, px (5/3 of --min-size)")
    _add_number(command, "--learning-rate", "highest learning rate (depends on the batch size)")
    command.add_argument(
        "--resume", choices=("auto", "never"), help="continue a run, or begin anew (auto)"
    )
    _add_count(command, "--seed", "seed of the order and of random weights (0)")
    _add_count(
        command,
        "--checkpoint-steps",
        "steps between checkpoints (one a minute, and at an epoch's end)",
    )


def _compare(
    report: str,
    images: str = "",
    annotations: str = "",
    strategies: str = "",
    drive_profile: Any = None,
    step_ms: float = 100,
    against: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Time every way of loading, side by side, and write a receipt."""
    from colab_utils.loading.emulated_step import EmulatedStep
    from colab_utils.show.questions import plot_guesses
    from colab_utils.show.receipts import plot_receipts, read_receipts
    from colab_utils.show.report import check_receipt_folder, write_receipt
    from colab_utils.show.table import make_table

    if against:
        figure = plot_receipts(against)
        Path(report).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(report, "receipts.png"))
        guesses = plot_guesses(against)
        if guesses is not None:
            guesses.savefig(Path(report, "guesses.png"))
        return make_table(read_receipts(against))
    if not (images and annotations):
        raise ColabUtilsError("compare needs --images and --annotations, or --against. See --help.")
    check_receipt_folder(report)
    comparison = colab_utils.compare(
        images,
        annotations,
        folder=Path(report, "work"),
        strategies=strategies.split(",") if strategies else None,
        drive_profile=drive_profile or find_profile(images) or "typical",
        step=EmulatedStep(step_ms),
        **options,
    )
    print(f"receipt: {write_receipt(comparison, report)}", file=sys.stderr)
    return comparison


def _add_compare_options(command: _Parser) -> None:
    _add_path(command, "--images", "DIR", "image folder")
    _add_path(command, "--annotations", "FILE", "COCO instance JSON")
    _add_count(command, "--batch-size", "images in a batch (4)")
    _add_number(command, "--step-ms", _STEP)
    command.add_argument("--strategies", metavar="A,B,C", help="names, separated by commas (all)")
    command.add_argument(
        "--drive-profile",
        metavar="NAME",
        help="how slow Drive is (as the slowed folder of --images, else typical)",
    )
    _add_count(command, "--repeats", "how often each strategy is timed (3)")
    _add_number(
        command, "--seconds", "how long each strategy runs cold, in seconds (30)", dest="timeline_s"
    )
    _add_path(command, "--report", "DIR", "folder for the receipt", required=True)
    _add_path(
        command,
        "--against",
        "JSON",
        "draw these receipts of many machines, time nothing",
        nargs="+",
    )


def positive_number(text: str) -> float:
    """Return a number above 0.

    The name of this function appears in argparse's message: "invalid positive_number value: ...".
    """
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


def number_or_auto(text: str) -> int | str:
    """Return a whole number or "auto". The name appears in argparse's message, too."""
    return text if text == "auto" else int(text)


def share_or_count(text: str) -> float:
    """Return a whole number as an ``int``, and any other number as a ``float``."""
    return int(text) if text.isdecimal() else float(text)


def part_of_all(text: str) -> tuple[int, int]:
    """Return the number of a part, and the number of all parts: (3, 16) for "3/16"."""
    match = re.fullmatch(r"([1-9]\d*)/(\d+)", text, re.ASCII)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a part: name one of 1/N to N/N, such as 3/16"
        )
    return int(match[1]), int(match[2])


def local_path(text: str) -> str:
    """Return the path of a folder or a file with its "~" expanded, and refuse a URL."""
    return _accept(text, require_local_path)


def place(text: str) -> str:
    """Return the path or the URL of a folder or a file.

    A URL whose protocol cannot be read on this machine is refused.
    """
    return _accept(text, open_place)


def _accept(text: str, check: Callable[[str], object]) -> str:
    """Check a text before any work begins. Argparse prints the error in its own form."""
    try:
        check(text)
    except ColabUtilsError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
    return os.path.expanduser(text)


def _add_path(command: _Parser, option: str, metavar: str, meaning: str, **settings: Any) -> None:
    command.add_argument(option, metavar=metavar, type=local_path, help=meaning, **settings)


def _add_place(command: _Parser, option: str, metavar: str, meaning: str, **settings: Any) -> None:
    """Add an option that takes a path, or a URL that fsspec knows."""
    command.add_argument(
        option, metavar=metavar, type=place, help=f"{meaning}, or its URL", **settings
    )


def _add_dataset(command: _Parser, *, required: bool = False) -> None:
    _add_place(command, "--images", "DIR", "image folder", required=required)
    _add_place(command, "--annotations", "FILE", "COCO instance JSON", required=required)


def _add_exif(command: _Parser) -> None:
    command.add_argument(
        "--exif",
        choices=("auto", "turn", "keep"),
        help="turn or keep photos that EXIF turns while their size does not tell how they were "
        "annotated (auto: as the other photos)",
    )


def _add_count(command: _Parser, option: str, meaning: str, *, kind: Any = int) -> None:
    command.add_argument(option, metavar="N", type=kind, help=meaning)


def _add_number(command: _Parser, option: str, meaning: str, **settings: Any) -> None:
    command.add_argument(option, metavar="X", type=positive_number, help=meaning, **settings)


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands.

    An option that you leave out takes the default of the command's function.
    """
    # The help names the command that you used. If you used the script colab-utils, `python` may be
    # another Python than the script's.
    script = Path(sys.argv[0]).name
    parser = _Parser(
        prog=script if script == _SCRIPT else "python -m colab_utils",
        description="Find and cure data-loading stalls of Mask R-CNN.",
    )
    parser.add_argument("--version", action="version", version=colab_utils.__version__)
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, run, add_options in (
        ("check", _check, _add_check_options),
        ("diagnose", _diagnose, _add_diagnose_options),
        ("preprocess", _preprocess, _add_preprocess_options),
        ("verify", _verify, _add_verify_options),
        ("copy", _copy, _add_copy_options),
        ("train", _train, _add_train_options),
        ("compare", _compare, _add_compare_options),
    ):
        meaning = run.__doc__
        command = commands.add_parser(
            name, help=meaning, description=meaning, argument_default=argparse.SUPPRESS
        )
        command.set_defaults(run_command=run)
        _add_path(
            command, "--json", "FILE", "write the result as JSON (-: standard output)", default=""
        )
        add_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
