"""The command line: ``python -m colab_utils COMMAND``.

Each command calls one function of the package, and prints what the function returns.
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import colab_utils
from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, escape
from colab_utils.files import name_temporary, require_new, write_file
from colab_utils.os_errors import explain_os_error
from colab_utils.places import open_place, require_local_path
from colab_utils.processes import explain_limits
from colab_utils.require import require_part
from colab_utils.slow_drive import find_profile

_JSON_START = b'{\n "command": '
_SCRIPT = "colab-utils"
# An argument of a docstring: its name, the word for its value in brackets, and its meaning.
_ARGUMENT = re.compile(r"^ {8}(\w+)(?: \((.+?)\))?: (.+(?:\n {12}.+)*)", re.MULTILINE)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {escape(' '.join(message.split()))}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    The status is 0 after success, 2 after bad input, and 130 after Ctrl-C. Training also ends with
    143 after SIGTERM, and with 129 after SIGHUP.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", ColabUtilsWarning)
        try:
            # Three entries are for this function. All others are arguments of the command's.
            options = vars(_make_parser().parse_args(arguments))
            command = options.pop("command")
            run = options.pop("run_command")
            target = options.pop("json")
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
    for image in getattr(report, "skipped", ()):
        print(escape(f"skipped {image.file_name}: {image.reason}"), file=sys.stderr)
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
    path = require_new(Path(target), _JSON_START)
    # A name that is too long, or a full disk, must not end hours of work. The first bytes go to a
    # file without a name, of which nothing stays if this process is killed.
    with explain_write(path.parent), TemporaryFile(dir=path.parent) as file:
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


def number(text: str) -> float | str:
    """Return a whole number as an ``int``, any other number as a ``float``, and "auto" as it is.

    The name of this function appears in argparse's message: "invalid number value: ...".
    """
    if text == "auto":
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def part_of_all(text: str) -> tuple[int, int] | None:
    """Return the number of a part, and the number of all parts: (3, 16) for "3/16"."""
    return require_part([int(number) for number in text.split("/")])


def local_path(text: str) -> str:
    """Return the path of a folder or a file with its "~" expanded, and refuse a URL."""
    require_local_path(text)
    return os.path.expanduser(text)


def place(text: str) -> str:
    """Return the path or the URL of a folder or a file.

    A URL whose protocol cannot be read on this machine is refused.
    """
    open_place(text)
    return os.path.expanduser(text)


# The type of an option, and the function that reads its text.
Place = Annotated[str, place]
LocalPath = Annotated[str, local_path]
CountOrAuto = Annotated[int | Literal["auto"], number]
Exif = Literal["auto", "turn", "keep"]


def check(
    images: Place,
    annotations: Place,
    deep: bool = False,
    repair: LocalPath = "",
    report: LocalPath = "",
    crowds: Literal["leave", "objects"] = "leave",
    exif: Exif = "auto",
    val_images: Place = "",
    val_annotations: Place = "",
) -> Any:
    """Look over a COCO dataset: every defect by name.

    Args:
        images (DIR): image folder, or its URL
        annotations (FILE): COCO instance JSON, or its URL
        deep: decode each whole image, not only its header
        repair (OUT.json): write a repaired copy of the annotations
        report (FILE.html): write a page: what to do, the worst images, the data in numbers
        crowds: with --repair: make objects of crowds, such as CVAT's masks
        exif: turn or keep photos that EXIF turns while their size does not tell how they were
            annotated; auto treats them like the other photos
        val_images (DIR): image folder of the validation set, or its URL; without it, that of
            --images
        val_annotations (FILE): JSON of the validation set, or its URL; finds images that are in
            both sets
    """
    from colab_utils.data.repair import repair_annotations
    from colab_utils.show.report import write_check

    if val_images and not val_annotations:
        raise ColabUtilsError(
            "--val-images is given without --val-annotations. Name its JSON, too."
        )
    validation = (val_images or images, val_annotations) if val_annotations else None
    settings: Any = {"deep": deep, "validation": validation, "exif": exif}
    if repair:
        checked = repair_annotations(images, annotations, output=repair, crowds=crowds, **settings)
    else:
        checked = colab_utils.check_dataset(images, annotations, **settings)
    if report:
        page = write_check(checked, images, repair or annotations, report)
        print(f"report: {page}", file=sys.stderr)
    return checked


def diagnose(
    images: Place = "",
    annotations: Place = "",
    shards: Place = "",
    batch_size: int = 4,
    workers: CountOrAuto = "auto",
    step_ms: float = 100,
    verify: bool = False,
) -> Any:
    """Find what training waits for, and which fix wins most.

    Args:
        images (DIR): image folder, or its URL
        annotations (FILE): COCO instance JSON, or its URL
        shards (DIR): folder of shards, or its URL, in place of --images and --annotations
        batch_size (N): images in a batch
        workers (N): worker processes
        step_ms (X): milliseconds of your training step for a batch; the step is emulated
        verify: apply the fixes that can be applied here, and measure
    """
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


def preprocess(
    images: Place,
    annotations: Place,
    shards: Place,
    plan: bool = False,
    part: Annotated[tuple[int, int], part_of_all] | None = None,
    finish: bool = False,
    workers: CountOrAuto = "auto",
    streams: CountOrAuto = "auto",
    min_size: int = 800,
    max_size: int = 1333,
    storage: Literal["auto", "keep", "shrink"] = "auto",
    exif: Exif = "auto",
    shard_mb: float = 128,
    max_bad: Annotated[float, number] = 0.01,
) -> Any:
    """Write a COCO dataset as shards.

    Args:
        images (DIR): image folder, or its URL
        annotations (FILE): COCO instance JSON, or its URL
        shards (DIR): folder of shards, or its URL
        plan: print the plan with its estimate, and write nothing
        part (I/N): write only part I of N; machines write the parts in any order, and may repeat
            them
        finish: write the index if all parts are written; otherwise name the missing ones
        workers (N): worker processes
        streams (N): files that each process reads at once
        min_size (N): shorter side in training, px
        max_size (N): limit of the longer side, px
        storage: shrink: make images smaller that are larger than training needs; keep: keep every
            file's bytes; auto: shrink if any image is larger
        exif: turn or keep photos that EXIF turns while their size does not tell how they were
            annotated; auto treats them like the other photos
        shard_mb (X): approximate size of a shard, MB
        max_bad (X): bad images or objects to allow: a share such as 0.05, or a number such as 5
    """
    from colab_utils.shards.estimate import plan_shards
    from colab_utils.shards.folder_state import inspect_folder
    from colab_utils.shards.plan import Annotations, open_annotations

    if plan + finish + bool(part) > 1:
        raise ColabUtilsError("Pass one of --plan, --part and --finish, and leave out the others.")
    if finish:
        return colab_utils.finish_shards(images, annotations, shards=shards, max_bad=max_bad)
    sizes: Any = {"min_size": min_size, "max_size": max_size, "workers": workers}
    opened: Annotations = annotations
    begun = inspect_folder(shards).recipe if storage == "auto" else {}
    if begun:
        # Some shards are written already: without --storage, the others are stored the same way.
        storage = begun["storage"]
    if plan or storage == "auto":
        opened = open_annotations(images, annotations)
        planned = plan_shards(images, opened, storage=storage, **sizes)
        if plan:
            return planned
        storage = planned.storage
        print(f"note: {planned}", file=sys.stderr)
    report = colab_utils.write_shards(
        images,
        opened,
        shards=shards,
        storage=storage,
        streams=streams,
        exif=exif,
        shard_mb=shard_mb,
        max_bad=max_bad,
        part=part,
        **sizes,
    )
    if part:
        print(
            "note: this part is written. When all parts are, run preprocess with --finish in place "
            "of --part.",
            file=sys.stderr,
        )
    return report


def verify(shards: Place) -> Any:
    """Check every shard against its checksum.

    Args:
        shards (DIR): folder of shards, or its URL
    """
    return colab_utils.verify_shards(shards)


def copy(shards: Place, to: Place) -> Any:
    """Copy shards from Drive to the local SSD.

    Args:
        shards (DIR): folder of shards, or its URL
        to (DIR): folder to copy to, or its URL
    """
    return colab_utils.copy_shards(shards, to)


def train(
    run: Place,
    shards: Place | None = None,
    images: Place | None = None,
    annotations: Place | None = None,
    drive: Place | None = None,
    ssd: LocalPath | None = None,
    val_shards: Place | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    model: str | None = None,
    batch_size: CountOrAuto = "auto",
    min_size: int | None = None,
    max_size: int | None = None,
    learning_rate: float | None = None,
    resume: Literal["auto", "never"] = "auto",
    seed: int = 0,
    checkpoint_steps: int | None = None,
) -> Any:
    """Train a torchvision Mask R-CNN on shards or images. The same command continues a run.

    Args:
        run (DIR): folder for checkpoints, or its URL
        shards (DIR): folder of shards, or its URL
        images (DIR): image folder, or its URL, in place of --shards
        annotations (FILE): COCO instance JSON of --images, or its URL
        drive (DIR): folder on Drive for the shards of --images, or its URL
        ssd (DIR): folder on the SSD: copy or write the shards there while it trains
        val_shards (DIR): shards to evaluate on, or their URL: box and mask AP
        steps (N): train for N steps in all
        epochs (N): or for N epochs in all; 1 without --steps
        model (NAME): model by torchvision's name; the default depends on the device
        batch_size (N): images in a batch
        min_size (N): shorter side in training, px; the default depends on the model
        max_size (N): limit of the longer side, px; without it, 5/3 of --min-size
        learning_rate (X): highest learning rate; the default depends on the batch size
        resume: continue a run, or begin anew
        seed (N): seed of the order and of random weights
        checkpoint_steps (N): steps between checkpoints; without it, one a minute, and one at an
            epoch's end
    """
    # Each option is an argument of the package's function.
    options: dict[str, Any] = locals()
    log = None if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr)
    report = colab_utils.train(**options, log=log)
    # With several processes, only the first one prints the report.
    return report if os.environ.get("RANK", "0") == "0" else None


def compare(
    report: LocalPath,
    images: LocalPath = "",
    annotations: LocalPath = "",
    batch_size: int = 4,
    step_ms: float = 100,
    strategies: str = "",
    drive_profile: str = "",
    repeats: int = 3,
    seconds: float = 30,
    against: Annotated[Sequence[str], local_path] = (),
) -> Any:
    """Time every way of loading, side by side, and write a receipt.

    Args:
        report (DIR): folder for the receipt
        images (DIR): image folder
        annotations (FILE): COCO instance JSON
        batch_size (N): images in a batch
        step_ms (X): milliseconds of your training step for a batch; the step is emulated
        strategies (A,B,C): names, separated by commas; without it, all
        drive_profile (NAME): how slow Drive is; without it, as the slowed folder of --images,
            else typical
        repeats (N): how often each strategy is timed
        seconds (X): how long each strategy runs cold, in seconds
        against (JSON): draw these receipts of many machines, time nothing
    """
    from colab_utils.course.receipts import write_class
    from colab_utils.loading.emulated_step import EmulatedStep
    from colab_utils.show.report import check_receipt_folder, write_receipt

    if against:
        return write_class(against, report)
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
        batch_size=batch_size,
        repeats=repeats,
        timeline_s=seconds,
    )
    print(f"receipt: {write_receipt(comparison, report)}", file=sys.stderr)
    return comparison


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    # The help names the command that you used. If you used the script colab-utils, `python` may be
    # another Python than the script's.
    script = Path(sys.argv[0]).name
    parser = _Parser(
        prog=None if script == _SCRIPT else "python -m colab_utils",
        description="Find and cure data-loading stalls of Mask R-CNN.",
    )
    parser.add_argument("--version", action="version", version=colab_utils.__version__)
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for run in (check, diagnose, preprocess, verify, copy, train, compare):
        meaning = (run.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(
            run.__name__, help=meaning, description=meaning, argument_default=argparse.SUPPRESS
        )
        command.set_defaults(run_command=run)
        command.add_argument(
            "--json",
            metavar="FILE",
            type=local_path,
            help="write the result as JSON (-: standard output)",
            default="",
        )
        _add_options(command, run)
    return parser


def _add_options(command: _Parser, run: Callable[..., Any]) -> None:
    """Add an option for each parameter of a command's function.

    The annotation says how the text is read. The docstring names the value, and gives the help:
    "name (VALUE): help". An option that you leave out takes the function's default.
    """
    texts = {name: text for name, *text in _ARGUMENT.findall(run.__doc__ or "")}
    for name, parameter in inspect.signature(run).parameters.items():
        # Without docstrings (python -OO), there is no help.
        value, meaning = texts.get(name, [None, ""])
        default = parameter.default
        kind = parameter.annotation
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        settings: dict[str, Any] = {"required": default is parameter.empty}
        if kind is bool:
            settings["action"] = "store_true"
        elif get_origin(kind) is Literal:
            settings["choices"] = get_args(kind)
        else:
            settings["metavar"] = value
            settings["type"] = getattr(kind, "__metadata__", [kind])[0]
            settings["nargs"] = "+" if default == () else None
        if default not in (parameter.empty, None, "", ()) and kind is not bool:
            meaning += f" ({default})"
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, help=" ".join(meaning.split()), **settings)


if __name__ == "__main__":
    sys.exit(main())
