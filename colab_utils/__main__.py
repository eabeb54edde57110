"""The command line: ``python -m colab_utils COMMAND``.

Each command calls one function of the package, and prints what the function returns.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import colab_utils
from colab_utils.drive import explain_write
from colab_utils.errors import (
    ColabUtilsError,
    ColabUtilsWarning,
    escape,
    explain_limits,
    explain_os_error,
)
from colab_utils.files import require_new, write_file
from colab_utils.places import Place, open_place, require_local_path
from colab_utils.slow_drive import find_profile

# The result goes to standard output in place of a file.
_PRINTED = Path("-")
_JSON_START = b'{\n "command": '
# A line of `_OPTIONS`, with the lines that continue it.
_OPTION = re.compile(r"^(\w+)(\*?)(?: (\S+))?: (.+(?:\n  .+)*)", re.MULTILINE)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {escape(' '.join(message.split()))}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status.

    The status is 0 after success, 2 after bad input, and 130 after Ctrl-C. Training also ends with
    143 after SIGTERM, and with 129 after SIGHUP. A script under watch has its own status.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", ColabUtilsWarning)
        ended = _explain_errors(partial(_run_command, arguments))
    # A script has its own output, warnings and errors.
    return ended if isinstance(ended, int) else ended()


def _explain_errors(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the exit status of an error, which is printed in one line."""
    try:
        return call()
    except ColabUtilsError as error:
        text = str(error)
    except KeyboardInterrupt:
        text = "nothing half-done is left, and the same command uses what was finished"
        print(f"\nstopped: {text}", file=sys.stderr)
        return 130
    except OSError as error:
        reason = explain_os_error(error, "Check disk and Drive.")
        text = f"{error.filename or 'A file'} cannot be read or written: {reason}"
    print("error: " + escape(" ".join(text.split())), file=sys.stderr)
    return 2


def _run_command(arguments: Sequence[str] | None) -> int | Callable[[], int]:
    """Run one command, and return its exit status, or the script that it has prepared."""
    # Three entries are for this function. All others are arguments of the command's.
    options = vars(_make_parser().parse_args(arguments))
    command = options.pop("command")
    call = options.pop("run_command")
    target = options.pop("json", None)
    _check_json(target)
    # Only the result belongs on standard output, and torch prints its downloads there.
    with redirect_stdout(sys.stderr), explain_limits():
        report = call(**options)
    if command == "run":
        return partial(report, partial(_finish_script, target=target))
    return 0 if report is None else _finish(report, command, target)


def _finish_script(report: Any, target: Path | None) -> None:
    """Print and write the report on a script. Whatever comes, the status is the script's."""
    with redirect_stdout(sys.stdout if target == _PRINTED else sys.stderr):
        _explain_errors(partial(_finish, report, "run", target))


def _finish(report: Any, command: str, target: Path | None) -> int:
    """Print the report, write its JSON, and name what is wrong in it."""
    missing = getattr(report, "missing", ())
    for image in getattr(report, "skipped", missing):
        print(escape(f"skipped {image.file_name}: {image.reason}"), file=sys.stderr)
    content = {"command": command, **dataclasses.asdict(report)}
    # Programs that read the JSON know the stages under this older name.
    if "stages" in content:
        content["layers"] = content.pop("stages")
    # JSON knows no infinity and no NaN: they become null.
    plain = json.loads(json.dumps(content, default=_to_plain), parse_constant=lambda _: None)
    text = json.dumps(plain, indent=1)
    # The command itself may have written another file under this name: --repair or --report.
    _check_json(target)
    shown = text if target == _PRINTED else "\n".join(map(escape, str(report).split("\n")))
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(shown.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Whoever has seen enough, such as `head`, closes the pipe. At its exit, Python would write
        # to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if target not in (None, _PRINTED):
        write_file(target, text.encode())
    if missing:
        raise ColabUtilsError(
            f"Files could not be copied, such as {missing[0].file_name}. The others are in place, "
            "and the same command tries again."
        )
    if getattr(report, "bad", ()):
        raise ColabUtilsError(
            f"Shards are damaged or missing: {report.bad[0].reason}. Copy the named file again "
            "from a good folder, or delete it and run preprocess again."
        )
    if not getattr(report, "ok", True):
        raise ColabUtilsError(
            "The dataset has the defects that the report lists. Write a repaired annotations file "
            "with --repair OUT.json, or repair the files."
        )
    return 0


def _to_plain(value: Any) -> Any:
    """Return a numpy number as a Python number, and any other value as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _check_json(target: Path | None) -> None:
    """Refuse a file name where the JSON cannot be written, or would replace another file."""
    if target is None or target == _PRINTED:
        return
    path = require_new(target, _JSON_START)
    # A folder that cannot be written to must not end hours of work. Of a file without a name,
    # nothing stays if this process is killed.
    with explain_write(path.parent), TemporaryFile(dir=path.parent):
        pass


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    if issubclass(category, ColabUtilsWarning):
        print(f"note: {message}", file=sys.stderr)


def _read_number(text: str) -> float | str:
    """Return a number, or another text as it is. The command's function refuses bad values."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _read_part(text: str) -> list[float | str]:
    """Return the number of a part, and the number of all parts: 3 and 16 for "3/16"."""
    return [*map(_read_number, text.split("/"))]


# How the text of an option is read, by the word for its value in the help. Others are counts.
_READERS: dict[str, Callable[[str], Any]] = {
    "DIR": require_local_path,
    "FILE": require_local_path,
    "DIR|URL": open_place,
    "FILE|URL": open_place,
    "I/N": _read_part,
    "X": float,
    "TIME": str,
    "NAME": str,
    "NAMES": partial(str.split, sep=","),
}
_JSON_OPTION = "json FILE: write the result as JSON (-: standard output)"
# The options of each command: a name, the word for its value, and its meaning. A star marks those
# that are required. An option that is left out takes the default of the command's function, or of
# the function that the command calls.
_OPTIONS = {
    "check": """
images* DIR|URL: image folder
annotations* FILE|URL: COCO instance JSON
deep: decode each whole image, not only its header
repair FILE: write a repaired copy of the annotations to this JSON
report FILE: write an HTML page: what to do, the worst images, the data in numbers
crowds leave|objects: with --repair: make objects of crowds, such as CVAT's masks (leave)
exif auto|turn|keep: turn or keep photos that EXIF turns while their size does not tell how they
  were annotated; auto treats them like the other photos (auto)
""",
    "diagnose": """
images DIR|URL: image folder
annotations FILE|URL: COCO instance JSON
shards DIR|URL: folder of shards, in place of --images and --annotations
batch_size N: images in a batch (4)
workers N|auto: worker processes (auto)
step_ms X: milliseconds of your training step for a batch; the step is emulated (100)
verify: apply the fixes that can be applied here, and measure
""",
    "preprocess": """
images* DIR|URL: image folder
annotations* FILE|URL: COCO instance JSON
shards* DIR|URL: folder of shards
part I/N: write only part I of N; machines write the parts in any order, and may repeat them; then
  run it with --finish
finish: write the index if all parts are written, otherwise name the missing ones; --part has no
  effect then
workers N|auto: worker processes (auto)
streams N|auto: files that each process reads at once (auto)
min_size N: shorter side in training, px (800)
max_size N: limit of the longer side, px (1333)
storage keep|shrink: shrink: make images smaller that are larger than training needs; keep: shrink
  none. Photos that EXIF turns, and all but JPEGs and 8-bit PNGs, become PNGs (shrink)
exif auto|turn|keep: turn or keep photos that EXIF turns while their size does not tell how they
  were annotated; auto treats them like the other photos (auto)
shard_mb X: approximate size of a shard, MB (128)
max_bad N|SHARE: bad images or objects to allow: a number such as 5, or a share (0.01)
""",
    "verify": """
shards* DIR|URL: folder of shards
""",
    "copy": """
shards DIR|URL: folder of shards
images DIR|URL: image folder, in place of --shards
annotations FILE|URL: COCO instance JSON of --images: copy only the files that it names
to* DIR|URL: folder to copy to
streams N|auto: files that are read at once (auto)
""",
    "train": """
run* DIR|URL: folder for checkpoints
shards DIR|URL: folder of shards
images DIR|URL: image folder, in place of --shards
annotations FILE|URL: COCO instance JSON of --images
drive DIR|URL: folder on Drive for the shards of --images
ssd DIR: folder on the SSD: copy or write the shards there while it trains
val_shards DIR|URL: shards to evaluate on: box and mask AP
steps N: train for N steps in all
epochs N: or for N epochs in all; 1 without --steps
model NAME: maskrcnn_resnet50_fpn_v2 (on a GPU), maskrcnn_resnet50_fpn,
  maskrcnn_mobilenet_v3_large_fpn (on a CPU) or maskrcnn_tiny_fpn
batch_size N|auto: images in a batch (auto)
min_size N: shorter side in training, px; the default depends on the model
max_size N: limit of the longer side, px; without it, 5/3 of --min-size
learning_rate X: highest learning rate; the default depends on the batch size
resume auto|never: continue a run, or begin anew (auto)
seed N: seed of the order and of random weights (0)
checkpoint_steps N: steps between checkpoints; without it, one a minute
budget TIME: such as 2h, 1h30m or 90m: stop by then, with a checkpoint; the same command goes on
""",
    "compare": """
report* DIR: folder for the receipt
images DIR: image folder
annotations FILE: COCO instance JSON
batch_size N: images in a batch (4)
step_ms X: milliseconds of your training step for a batch; the step is emulated (100)
strategies NAMES: names, separated by commas; without it, all
drive_profile NAME: how slow Drive is made: fast, typical (the good day), bad (the bad day) or none;
  without it, it stays as it is where --images lie on Drive or in a slowed folder, and is typical
  elsewhere
repeats N: how often each strategy is timed (3)
seconds X: how long each strategy runs cold, in seconds (30)
against FILE: draw these receipts of many machines, time nothing
""",
    "run": "",
}


def check(
    images: Place,
    annotations: Place,
    repair: Any = None,
    report: Any = None,
    crowds: Any = "leave",
    **settings: Any,
) -> Any:
    """Look over a COCO dataset: every defect by name."""
    from colab_utils.data.repair import repair_annotations
    from colab_utils.show.report import write_check

    if repair:
        checked = repair_annotations(images, annotations, output=repair, crowds=crowds, **settings)
    else:
        checked = colab_utils.check_dataset(images, annotations, **settings)
    if report:
        page = write_check(checked, images, repair or annotations, report)
        print(f"report: {page}", file=sys.stderr)
    return checked


def diagnose(
    images: Any = None,
    annotations: Any = None,
    shards: Any = None,
    batch_size: int = 4,
    step_ms: float = 100,
    verify: bool = False,
    **settings: Any,
) -> Any:
    """Find what training waits for, and which fix wins most."""
    from colab_utils.loading.emulated_step import EmulatedStep

    if bool(shards) == bool(images and annotations):
        raise ColabUtilsError("Pass --images and --annotations, or --shards alone. See --help.")
    dataset: Any = (
        colab_utils.ShardDataset(shards) if shards else colab_utils.CocoFolder(images, annotations)
    )
    loader = colab_utils.make_loader(dataset, batch_size=batch_size, **settings)
    return colab_utils.diagnose(loader, EmulatedStep(step_ms), verify=verify)


def preprocess(finish: bool = False, **settings: Any) -> Any:
    """Write a COCO dataset as shards."""
    if finish:
        kept = settings.keys() & {"images", "annotations", "shards", "max_bad"}
        return colab_utils.finish_shards(**{name: settings[name] for name in kept})
    return colab_utils.write_shards(**settings)


def verify(shards: Place) -> Any:
    """Check every shard against its checksum."""
    return colab_utils.verify_shards(shards)


def copy(to: Any, shards: Any = None, images: Any = None, **settings: Any) -> Any:
    """Copy shards, or loose image files, from Drive to the local SSD."""
    if bool(shards) == bool(images) or (shards and "annotations" in settings):
        raise ColabUtilsError("Pass --shards alone, or --images. See --help.")
    if shards:
        return colab_utils.copy_shards(shards, to, **settings)
    return colab_utils.copy_images(images, to, **settings)


def train(run: Place, **settings: Any) -> Any:
    """Train a torchvision Mask R-CNN on shards or images. The same command continues a run."""
    log = None if sys.stderr.isatty() else lambda line: print(line, file=sys.stderr)
    report = colab_utils.train(run=run, log=log, **settings)
    # With several processes, only the first one prints the report.
    return report if os.environ.get("RANK", "0") == "0" else None


def compare(
    report: Path,
    images: Any = None,
    annotations: Any = None,
    step_ms: float = 100,
    drive_profile: str = "",
    seconds: float = 30,
    against: Sequence[Path] = (),
    **settings: Any,
) -> Any:
    """Time every way of loading, side by side, and write a receipt."""
    from colab_utils.course.questions import write_class
    from colab_utils.loading.emulated_step import EmulatedStep
    from colab_utils.show.report import check_receipt_folder, write_receipt
    from colab_utils.streams import is_remote

    if against:
        return write_class(against, report)
    if not (images and annotations):
        raise ColabUtilsError("compare needs --images and --annotations, or --against. See --help.")
    check_receipt_folder(report)
    default = "none" if is_remote(images) else "typical"
    comparison = colab_utils.compare(
        images,
        annotations,
        folder=report / "work",
        drive_profile=drive_profile or find_profile(images) or default,
        step=EmulatedStep(step_ms),
        timeline_s=seconds,
        **settings,
    )
    print(f"receipt: {write_receipt(comparison, report)}", file=sys.stderr)
    return comparison


def run(script: str, arguments: Sequence[str] = ()) -> Any:
    """Run a Python script, unchanged, and say in the end what its loaders waited for, and why."""
    from colab_utils.diagnosis.script import compile_script, run_script

    return partial(run_script, compile_script(script), (script, *arguments))


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="python -m colab_utils", description="Find and cure data-loading stalls of Mask R-CNN."
    )
    parser.add_argument("--version", action="version", version=colab_utils.__version__)
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for function in (check, diagnose, preprocess, verify, copy, train, compare, run):
        meaning = function.__doc__
        command = commands.add_parser(
            function.__name__, help=meaning, description=meaning, argument_default=argparse.SUPPRESS
        )
        command.set_defaults(run_command=function)
        for row in _OPTION.findall(_JSON_OPTION + _OPTIONS[function.__name__]):
            _add_option(command, *row)
        if function is run:
            command.add_argument("script", metavar="SCRIPT", help="a Python script")
            command.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add_option(command: _Parser, name: str, star: str, value: str, meaning: str) -> None:
    """Add an option of a command. ``value`` is the word for its value, or its choices."""
    settings: dict[str, Any] = {"required": bool(star), "help": " ".join(meaning.split())}
    if not value:
        settings["action"] = "store_true"
    elif value.islower():
        settings["choices"] = value.split("|")
    else:
        settings["metavar"] = value
        settings["type"] = _READERS.get(value, _read_number)
        settings["nargs"] = "+" if name == "against" else None
    command.add_argument(f"--{name.replace('_', '-')}", **settings)


if __name__ == "__main__":
    sys.exit(main())
