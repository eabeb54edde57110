import json

import numpy as np
import pytest
import torch

from benchmarks.data import make_data
from benchmarks.environments import REQUIREMENTS, read_sections
from benchmarks.systems import SYSTEMS, get_system
from benchmarks.systems.base import Crew, System
from benchmarks.worker import Job, check, run_job

pytestmark = [
    # every crew is tried, whatever the machine
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # peers may deliver views
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]


@pytest.fixture(scope="module")
def make(tiny_dataset, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    return lambda name: make_data(
        name, work, [tiny_dataset.images], [tiny_dataset.annotations], samples=12
    )


@pytest.mark.parametrize(
    ("name", "kind", "crew"),
    [
        ("references", "kept", Crew(1, "workers")),
        ("references_800", "kept", Crew(0, "workers")),
        ("bare_decode", "kept", Crew(2, "threads")),
        ("ceiling", "pixels_800", Crew(2, "threads")),
        ("packed", "kept", Crew(1, "processes")),
        ("packed", "pixels_800", Crew(1, "processes")),
        ("packed_files", "kept", Crew(1, "processes")),
        ("dense", "jpg_800", Crew(1, "processes")),
        ("dense_float", "pixels_800", Crew(0, "processes")),
        ("pt_files", "jpg_800", Crew(1, "workers")),  # a record with a JPEG
        ("memmap", "pixels_800", Crew(0, "workers")),  # a record with pixels
        ("webdataset", "jpg_800", Crew(1, "workers")),
    ],
)
def test_a_system_delivers_what_the_reference_gives(make, tmp_path, name, kind, crew):
    pytest.importorskip(name if name == "webdataset" else "torch")
    system, data = get_system(name), make(kind)
    job = Job("check", name, data, make("pixels_800") if system.size_800 else data, tmp_path, crew)
    system.prepare(data, tmp_path)
    assert run_job(job) == {"difference": "", "seen": 12, "whole_epoch": True, "compared": 12}


def test_measuring_and_trying_give_every_figure(make, tmp_path, monkeypatch):
    monkeypatch.setattr(get_system("memmap"), "crews", get_system("memmap").crews[:2])
    job = Job(
        "measure",
        "memmap",
        make("pixels_800"),
        make("pixels_800"),
        tmp_path,
        Crew(0, "workers"),
        batches=8,
    )
    get_system("memmap").prepare(job.data, tmp_path)
    found = run_job(Job.parse(job.dump()))
    assert found["images"] == 32
    assert min(found[name] for name in ("images_per_second", "cpu_ms_per_image", "control_s")) > 0
    tried = run_job(Job("trial", "memmap", job.data, job.reference, tmp_path, batches=2))
    assert len(tried["rates"]) == len(get_system("memmap").crews)
    assert min(tried["rates"]) > 0
    assert tried["kb_per_image"] > 3 * 800 * 1000 / 1000


class _Faulty(System):
    """The reference's own samples in one batch, with a fault."""

    fault = ""

    def __iter__(self):
        folder = self.data.open()
        samples = [self.spoil(*folder[row]) for row in range(len(folder))]
        if self.fault == "twice":
            samples[1] = samples[0]
        if self.fault == "missing":
            samples = samples[1:]
        yield tuple(zip(*samples, strict=True))

    def spoil(self, image, target):
        if self.fault == "half mirrored":
            image = image.flip(-1)
        if self.fault == "boxes":
            target = {**target, "boxes": target["boxes"] + 2}
        if self.fault == "masks":
            target = {**target, "masks": target["masks"].roll(8, -1)}
        if self.fault == "labels":
            target = {**target, "labels": target["labels"] + 1}
        if self.fault == "pixels":
            image = image.roll(1, -1)
        if self.fault == "unknown":
            target = {**target, "image_id": target["image_id"] + 1000}
        return image, target


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("", ""),
        ("twice", "1 came twice"),
        ("missing", "11 of 12 came"),
        ("unknown", "12 images unknown"),
        ("half mirrored", "box"),  # the image without its boxes and masks
        ("boxes", "box"),
        ("masks", "mask"),
        ("labels", "labels"),
        ("pixels", "pixels"),
    ],
)
def test_the_check_names_what_differs(make, tmp_path, monkeypatch, fault, word):
    monkeypatch.setattr(_Faulty, "fault", fault)
    data, crew = make("kept"), Crew(0, "workers")
    job = Job("check", "faulty", data, data, tmp_path, crew)
    difference = check(_Faulty(data, tmp_path, crew), job)["difference"]
    assert word in difference
    assert bool(word) == bool(difference)


def test_mirrored_samples_and_another_codec_are_accepted(make, tmp_path):
    class Mirrored(_Faulty):
        own_codec = True

        def spoil(self, image, target):
            x0, y0, x1, y1 = target["boxes"].unbind(1)
            boxes = torch.stack([image.shape[-1] - x1, y0, image.shape[-1] - x0, y1], 1)
            noise = torch.from_numpy(np.random.default_rng(0).integers(0, 5, image.shape)).to(
                torch.uint8
            )
            image = torch.maximum(image, noise) - noise
            return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}

    data, crew = make("jpg_800"), Crew(0, "workers")
    job = Job("check", "mirrored", data, data, tmp_path, crew)
    assert check(Mirrored(data, tmp_path, crew), job)["difference"] == ""
    Mirrored.own_codec = False
    assert "pixels differ" in check(Mirrored(data, tmp_path, crew), job)["difference"]


def test_every_environment_has_a_section_and_every_name_a_class():
    environments = {get_system(name).environment for name in SYSTEMS} - {""}
    assert environments | {"formats"} == set(read_sections(REQUIREMENTS.read_text()))


def test_the_job_answers_an_error_in_one_line(make, tmp_path, capfd, monkeypatch):
    from benchmarks import worker

    job = Job(
        "check", "memmap", make("kept"), make("kept"), tmp_path / "nothing", Crew(0, "workers")
    )
    threads = torch.get_num_threads()
    monkeypatch.setattr(worker.sys, "argv", ["worker", job.dump()])
    monkeypatch.setattr(worker.os, "dup2", lambda *_: None)  # pytest needs its own output
    try:
        assert worker.main() == 0
    finally:
        torch.set_num_threads(threads)
    assert "FileNotFoundError" in json.loads(capfd.readouterr().out)["error"]
