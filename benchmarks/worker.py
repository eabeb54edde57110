"""One job, in the environment of its system: `python -m benchmarks.worker JOB` answers with one
line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.data import Data
from benchmarks.environments import list_versions
from benchmarks.systems import get_system
from benchmarks.systems.base import Crew, Sample, System
from colab_utils.comparison.compare import describe_difference
from colab_utils.diagnosis.timing import time_batches
from colab_utils.errors import describe_error
from colab_utils.loading.emulated_step import EmulatedStep

__all__ = ["Job", "run_job"]

COMPARED_IMAGES = 24


@dataclass(frozen=True)
class Job:
    """What to do with a system; ``batches`` and ``seconds`` say when to stop measuring, whichever
    comes first.
    """

    task: Literal["prepare", "trial", "check", "measure"]
    system: str
    data: Data
    reference: Data
    folder: Path
    crew: Crew | None = None
    batches: int = 10**9
    seconds: float = 8
    step_ms: float | None = None

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def parse(cls, text: str) -> Job:
        """The job that ``dump`` wrote."""
        fields = json.loads(text)
        for name in ("data", "reference"):
            fields[name] = Data(**{**fields[name], "folder": Path(fields[name]["folder"])})
        crew = fields["crew"] and Crew(*fields["crew"])
        return cls(**{**fields, "folder": Path(fields["folder"]), "crew": crew})

    def open(self, crew: Crew) -> System:
        """The system, ready to load."""
        return get_system(self.system)(self.data, self.folder, crew)

    @property
    def files(self) -> Path:
        """Where the files lie that the system reads."""
        return self.folder if get_system(self.system).store else self.data.images


def run_job(job: Job) -> dict[str, Any]:
    """Do the job; what it found, ready for JSON."""
    if job.task == "prepare":
        get_system(job.system).prepare(job.data, job.folder)
        return {}
    if job.task == "trial":
        return try_crews(job)
    _warm(job.files)
    assert job.crew is not None
    system = job.open(job.crew)
    try:
        return check(system, job) if job.task == "check" else measure(system, job)
    finally:
        system.close()


def try_crews(job: Job) -> dict[str, Any]:
    """The speed of every crew, measured for a short time each; 0 where it failed."""
    rates = []
    errors = []
    _warm(job.files)
    for crew in get_system(job.system).crews:
        try:
            system = job.open(crew)
            rates.append(measure(system, job)["images_per_second"])
            system.close()
        # A peer may raise whatever it likes.
        except Exception as error:
            rates.append(0.0)
            errors.append(f"{crew}: {describe_error(error)}")
    size = sum(path.stat().st_size for path in job.files.rglob("*") if path.is_file())
    return {
        "rates": rates,
        "errors": errors,
        "kb_per_image": size / job.data.records / 1000,
        "versions": list_versions(get_system(job.system).environment),
    }


def measure(system: System, job: Job) -> dict[str, Any]:
    """Speed, CPU time and waiting, after a warm-up that empties what was loaded ahead."""
    stream = _repeat(system)
    step = EmulatedStep(job.step_ms) if job.step_ms else None
    for batch in islice(stream, 2 * system.crew.size + 2):
        if step:
            step(batch)
    # A loader that uses memory again would have to do without this one's.
    batch = None
    times = time_batches(stream, step, batches=job.batches, max_s=job.seconds, warmup=0)
    stream.close()
    return {
        "images_per_second": times.images_per_second,
        "cpu_ms_per_image": times.cpu_ms_per_image,
        "wait_share": times.wait_share,
        "images": times.images,
    }


def _repeat(system: System) -> Generator[Any, None, None]:
    """The batches of one epoch after the other."""
    has_batches = True
    while has_batches:
        has_batches = False
        for batch in system:
            has_batches = True
            yield batch


def check(system: System, job: Job) -> dict[str, Any]:
    """Check that every image comes once, and the first ones are what the reference gives."""
    reference = job.reference.open()
    row_of = {image_id: row for row, image_id in enumerate(reference.image_ids.tolist())}
    seen: Counter[int] = Counter()
    compared = 0
    difference = ""
    for batch in system:
        seen.update(system.read_ids(batch))
        for image, target in system.unpack(batch) if compared < COMPARED_IMAGES else ():
            compared += 1
            if not difference and target["image_id"] in row_of:
                problem = _compare((image, target), reference[row_of[int(target["image_id"])]])
                difference = problem and f"image {target['image_id']}: {problem}"
    unknown = seen.keys() - row_of.keys()
    repeated = [image_id for image_id, times in seen.items() if times > 1]
    if unknown or repeated or len(seen) < len(row_of):
        arrived = f"{len(seen)} of {len(row_of)} came"
        difference = f"{len(unknown)} images unknown, {len(repeated)} came twice, {arrived}"
    return {"difference": difference, "seen": len(seen), "compared": compared}


def _compare(sample: Sample, wanted: Sample) -> str:
    """Say how a sample differs from the reference, mirrored where the sample is; what it lacks is
    not compared.
    """
    image, target = sample
    wanted_image, wanted_target = wanted
    if image.shape == wanted_image.shape:
        pixels = image.float() * (255 if image.is_floating_point() else 1)
        as_is = (pixels - wanted_image.float()).abs().mean()
        mirrored = (pixels - wanted_image.flip(-1).float()).abs().mean()
        if mirrored < as_is:
            x0, y0, x1, y1 = wanted_target["boxes"].unbind(1)
            boxes = torch.stack([image.shape[-1] - x1, y0, image.shape[-1] - x0, y1], 1)
            wanted_target = {
                **wanted_target,
                "boxes": boxes,
                "masks": wanted_target["masks"].flip(-1),
            }
            wanted_image = wanted_image.flip(-1)
        # Pixels as fractions of one count as equal, too.
        if min(as_is, mirrored) == 0:
            image = wanted_image
    if "boxes" not in target:
        target = wanted_target
    return describe_difference((image, target), (wanted_image, wanted_target))


def _warm(folder: Path) -> None:
    """Read every file once, so that all systems find theirs in the page cache."""
    known = set()
    buffer = bytearray(1 << 22)
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_ino not in known:
            known.add(path.stat().st_ino)
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def main() -> int:
    """Do the job of the command line."""
    answer = os.fdopen(os.dup(1), "w")
    # What a peer prints must not mix with the answer.
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # A DataLoader's workers have one thread, too: systems that use threads bring their own.
    torch.set_num_threads(1)
    try:
        result = run_job(Job.parse(sys.argv[1]))
    except Exception as error:
        result = {"error": describe_error(error)}
    print(json.dumps(result), file=answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
