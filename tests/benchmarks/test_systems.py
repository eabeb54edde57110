"""Every system delivers the samples that the reference gives."""

import pytest

from benchmarks.data import make_data
from benchmarks.environments import REQUIREMENTS, read_sections
from benchmarks.systems import SYSTEMS, get_system
from benchmarks.systems.base import Crew
from benchmarks.worker import Job, run_job

pytestmark = [
    # Every crew is tried, whatever the machine.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # Peers may deliver views.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
]


@pytest.fixture(scope="module")
def make(tiny_dataset, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    return lambda name: make_data(
        name, work, [tiny_dataset.images], [tiny_dataset.annotations], samples=24
    )


@pytest.mark.parametrize(
    ("name", "kind", "crew"),
    [
        ("references", "kept", Crew(1, "workers")),
        ("references_800", "kept", Crew(0, "workers")),
        ("bare_decode", "kept", Crew(2, "threads")),
        ("packed", "kept", Crew(1, "processes")),
        ("packed_files", "kept", Crew(1, "processes")),
        ("dense", "jpg_800", Crew(1, "processes")),
        ("memmap", "jpg_800", Crew(0, "workers")),
        ("webdataset", "jpg_800", Crew(1, "workers")),
    ],
)
def test_a_system_delivers_what_the_reference_gives(make, tmp_path, name, kind, crew):
    pytest.importorskip(name if name == "webdataset" else "torch")
    system = get_system(name)
    data = make(kind)
    job = Job(
        "check",
        name,
        data,
        make("pixels_800") if system.size_800 else data,
        tmp_path,
        crew,
    )
    system.prepare(data, tmp_path)
    assert run_job(job) == {"difference": "", "seen": 24, "compared": 24}


def test_every_environment_has_a_section_and_every_name_a_class():
    environments = {get_system(name).environment for name in SYSTEMS} - {""}
    others = {"engines", "formats", "frameworks"}
    assert environments | others == set(read_sections(REQUIREMENTS.read_text()))
