"""The file of a checkpoint. It ends with a seal, which holds a checksum of all bytes before it."""

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import hash_bytes, parse_file, read_whole
from colab_utils.places import Place, PlaceLike

State = Mapping[str, Any]
"""What a checkpoint holds."""
TORN = "is torn (cut short or damaged)"
# A seal begins with this text, where the number is the version of the format. The checksum follows.
_SEAL = b"colab_utils 2 "
_MOST_BYTES = 1e10
_CURE = "Move this file away: the previous checkpoint is loaded then."


class TornError(ColabUtilsError):
    """A checkpoint is not as it was written. It gave the same wrong bytes twice."""


def pack_state(state: State) -> tuple[memoryview, bytes]:
    """Return the content of a file that holds a state, and the seal to write after it.

    Example:
        >>> content, seal = pack_state({"step": 120})
        >>> zipfile.is_zipfile(io.BytesIO(bytes(content) + seal)), seal[:14]
        (True, b'colab_utils 2 ')
    """
    # The content is made in memory, because a file on Drive must be written once, from its first
    # byte to its last.
    data = io.BytesIO()
    torch.save(state, data)
    content = data.getbuffer()
    # The content is a zip, and the seal becomes its comment. The two bytes before the comment hold
    # the length of the comment.
    content[-2:] = len(_make_seal(b"")).to_bytes(2, "little")
    return content, _make_seal(content)


def _make_seal(content: bytes | memoryview) -> bytes:
    return _SEAL + hash_bytes(content).encode()


def read_sealed(path: Place) -> bytes:
    """Return the content of a checkpoint, with its seal.

    Raises:
        TornError: It is not as it was written.
        ColabUtilsError: It is a complete zip without a seal, because another program wrote or
            changed it; or its seal is of another version.
        DriveLostError: Drive does not answer, or gives other bytes at each try.
    """
    read = partial(read_whole, path, most_bytes=_MOST_BYTES)
    with explain_read(path):
        return parse_file(path, lambda: Retries().run(read), partial(_check_seal, path))


def _check_seal(path: Place, content: bytes) -> bytes:
    """Return ``content`` if its seal is right. Raises the errors of `read_sealed`."""
    length = len(_make_seal(b""))
    if content.endswith(_make_seal(memoryview(content)[:-length])):
        return content
    seal = content[-length:]
    if not seal.startswith(_SEAL):
        # A file that is complete, but has the seal of another version or none, is not torn. Another
        # version or program wrote it. A file of ours that is cut short is no complete zip.
        with suppress(zipfile.BadZipFile):
            is_zip = seal.endswith(b"\0\0") and zipfile.is_zipfile(io.BytesIO(content))
            if is_zip or seal.startswith(_SEAL[:-2]):
                raise _refuse(path)
    raise TornError(
        f"{path} {TORN}. Move it away, and run the same command again: the previous checkpoint is "
        "used then."
    )


@contextmanager
def explain_state(state: State | None) -> Iterator[None]:
    """Refuse a checkpoint if the block, which uses its state, fails.

    ``state`` is what `CheckpointFolder.read` returned.

    Example:
        >>> with explain_state({"path": "runs/first/checkpoint-00000120.pt"}):
        ...     {}["plan"]
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: ... is no checkpoint of this version of colab_utils: ...
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # If memory ran out, the checkpoint is not to blame.
        if state is None or "memory" in str(error) or "CUDA" in str(error):
            raise
        raise _refuse(state["path"]) from error


def load_weights(model: torch.nn.Module, state: State) -> None:
    """Load the weights of a checkpoint into a model.

    Raises:
        ColabUtilsError: A weight is not finite.
        RuntimeError: The weights are those of another model.
    """
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise ColabUtilsError(
                f"The checkpoint {state['path']} cannot be used: {name} has values that are not "
                f"finite. {_CURE}"
            )


def _refuse(path: PlaceLike) -> ColabUtilsError:
    return ColabUtilsError(
        f"{path} is no checkpoint of this version of colab_utils: it was changed or renamed, or "
        f"another program or version wrote it. {_CURE} Or update colab_utils."
    )


def load_content(path: Place, content: bytes) -> State:
    """Return the state that a file holds.

    `read_sealed` has checked the seal of ``content``, so the file is not torn. Only torn files are
    renamed, by `CheckpointFolder.read`. So this file keeps its name even if it cannot be loaded.
    """
    try:
        state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise ColabUtilsError(
            f"{path} cannot be loaded, though the file is complete ({first_line}). Free memory and "
            f"start again. Or: {_CURE}"
        ) from error
    with explain_state({"path": path}):
        if f"{state['step']:08d}" != Path(path.name).stem.rpartition("-")[2]:
            raise _refuse(path)
    return state


@contextmanager
def explain_read(path: Place) -> Iterator[None]:
    """Say what to do if the block cannot read a checkpoint or its folder."""
    try:
        yield
    # A path that cannot be the name of a file raises a ValueError.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ColabUtilsError(
            f"Checkpoints cannot be read in {path}: {reason}. Make it readable, move it away, or "
            "choose another run folder."
        ) from error
