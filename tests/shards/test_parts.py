"""Shards that are written in parts: by any process, twice, killed and again, and by executors that
lose their workers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from colab_utils.__main__ import main
from colab_utils.errors import ColabUtilsError
from colab_utils.sample_data import make_dataset
from colab_utils.shards import finish, job_plan, jobs, plan_jobs, running, write_shard
from colab_utils.shards.job_plan import read_plan
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import slow_down
from tests.drive_mount import mount_or_skip
from tests.snapshots import snapshot

SHARD_MB = 0.03


def write_alone(dataset, folder, **options):
    settings = {"shard_mb": SHARD_MB, "workers": 1, **options}
    write_shards(*dataset, shards=folder, **settings)
    return snapshot(folder)


def plan(dataset, folder, **options):
    return plan_jobs(*dataset, shards=folder, **{"shard_mb": SHARD_MB, **options})


# These tests write parts.


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    """Sixty small pictures, slow to read, which make 15 shards."""
    folder = tmp_path_factory.mktemp("sixty")
    made = make_dataset(folder, n=60, width=160, height=128, objects=(1, 4), workers=1)
    return made.images, made.annotations


def start_part(dataset, folder, part):
    words = [
        *("--images", dataset[0]),
        *("--annotations", dataset[1]),
        *("--shards", folder),
        *("--shard-mb", "0.05"),
        *("--storage", "keep"),
        *("--workers", "1"),
        *("--streams", "1"),
        *("--part", part),
    ]
    command = [sys.executable, "-m", "colab_utils", "preprocess", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_of_four_parts_at_once_one_is_killed_and_done_by_two(sixty, folder, tmp_path, capsys):
    expected = write_alone(sixty, tmp_path / "alone", shard_mb=0.05, storage="keep")
    slow_down(sixty[0], "typical")
    parts = [start_part(sixty, folder, f"{number}/4") for number in range(1, 5)]
    killed = parts.pop(1)
    while not (folder / "shard-000001.tar").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    for process in parts:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
        assert "run preprocess with --finish" in errors
    assert main(["preprocess", "--shards", str(folder), "--finish"]) == 2
    missing = [number for number in range(15) if not (folder / f"shard-{number:06d}.tar").exists()]
    assert missing
    assert all(number % 4 == 1 for number in missing)
    error = capsys.readouterr().err
    assert f"{len(missing)} of 15 shards are missing in {folder}: number {missing[0]}" in error
    assert not (folder / "index.json").exists()
    for process in [start_part(sixty, folder, "2/4") for _ in range(2)]:
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    assert main(["preprocess", "--shards", str(folder), "--finish"]) == 0
    # What is left of the killed one goes with the folder's next writer.
    for path in folder.glob(".*.part"):
        path.unlink()
    assert snapshot(folder) == expected


def test_five_tabs_write_to_one_drive(sixty, tmp_path, capsys):
    expected = write_alone(sixty, tmp_path / "alone", shard_mb=0.05, storage="keep")
    backing = tmp_path / "backing"
    backing.mkdir()
    shutil.copytree(sixty[0], backing / "images")
    shutil.copy(sixty[1], backing / "annotations.json")
    with mount_or_skip(backing, tmp_path / "drive", profile="fast") as mount:
        drive = mount.folder
        dataset = (drive / "images", drive / "annotations.json")
        parts = [start_part(dataset, drive / "shards", f"{number}/5") for number in range(1, 6)]
        for process in parts:
            errors = process.communicate()[1]
            assert process.returncode == 0, errors
        assert main(["preprocess", "--shards", str(drive / "shards"), "--finish"]) == 0
        assert "60 images in 15 shards" in capsys.readouterr().out
        assert snapshot(drive / "shards") == expected


def test_a_job_is_two_texts_and_a_number(dataset, folder, tmp_path):
    expected = write_alone(dataset, tmp_path / "alone")
    planned = plan(dataset, folder)
    for job in planned.jobs:
        assert [type(value) for value in job] == [str, int, str]
        assert len(pickle.dumps(job)) < 400
    # The last one first, and each of them twice.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        indexes = list(pool.map(write_shard, [*planned.jobs[::-1], *planned.jobs]))
    assert sum(index.images for index in indexes) == 24
    report = finish(folder)
    assert (report.images, report.shards) == (12, planned.count)
    assert snapshot(folder) == expected


def test_a_second_plan_is_the_first_one(dataset, folder, monkeypatch):
    first = plan(dataset, folder)
    before = snapshot(folder)
    monkeypatch.setattr("colab_utils.shards.parts.open_annotations", None)
    second = plan(dataset, folder)
    assert second == first
    assert snapshot(folder) == before
    # A run of its own, nevertheless.
    assert {job.run for job in first.jobs}.isdisjoint(job.run for job in second.jobs)


def plan_at_once(barrier, dataset, folder):
    barrier.wait(60)
    for job in plan(dataset, folder).jobs:
        write_shard(job)


def test_processes_that_plan_at_the_same_time_make_one_plan(dataset, folder, tmp_path):
    expected = write_alone(dataset, tmp_path / "alone")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=plan_at_once, args=(barrier, dataset, folder)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    finish(folder)
    assert snapshot(folder) == expected


def test_what_one_machine_began_parts_go_on_with_and_the_other_way_round(dataset, tmp_path):
    expected = write_alone(dataset, tmp_path / "alone")
    begun = shutil.copytree(tmp_path / "alone", tmp_path / "begun")
    (begun / "index.json").unlink()
    (begun / "shard-000001.tar").unlink()
    times = {path: path.stat().st_mtime_ns for path in begun.glob("shard-*")}
    for job in plan(dataset, begun).jobs:
        write_shard(job)
    finish(begun)
    assert snapshot(begun) == expected
    later = {path: path.stat().st_mtime_ns for path in times}
    changed = [path.name for path in times if times[path] != later[path]]
    assert sorted(changed) == ["shard-000001.arrays"]
    planned = plan(dataset, tmp_path / "planned")
    write_shard(planned.jobs[1])
    assert write_alone(dataset, tmp_path / "planned") == expected


def test_a_finished_folder_has_no_jobs_and_is_finished_again(dataset, folder, capsys):
    expected = write_alone(dataset, folder)
    assert plan(dataset, folder).jobs == []
    assert finish(folder).images == 12
    words = ["--images", dataset[0], "--annotations", dataset[1], "--shards", folder]
    command = ["preprocess", *map(str, words), "--shard-mb", str(SHARD_MB), "--part", "1/2"]
    assert main([*command, "--storage", "shrink"]) == 0
    assert "12 images in" in capsys.readouterr().out
    assert snapshot(folder) == expected


def test_a_shard_without_a_usable_image_is_not_missing(dataset, folder, tmp_path):
    bad = _list_names(_folder(dataset, tmp_path / "all") / "shard-000001.tar")
    per_shard = len(bad)
    whole = {name: (dataset[0] / name).read_bytes() for name in bad}
    for name in bad:
        (dataset[0] / name).write_bytes(b"")
    expected = write_alone(dataset, tmp_path / "alone", max_bad=1.0)
    planned = plan(dataset, folder)
    for job in [*planned.jobs, *planned.jobs]:
        write_shard(job)
    assert "shard-000001.tar" not in snapshot(folder)
    with pytest.raises(ColabUtilsError, match=f"Bad images so far: {per_shard},"):
        finish(folder)
    report = finish(folder, max_bad=1.0)
    assert [image.file_name for image in report.skipped] == bad
    assert snapshot(folder) == expected
    # Repaired, they are taken in.
    for name in bad:
        (dataset[0] / name).write_bytes(whole[name])
    for job in plan(dataset, folder).jobs:
        write_shard(job)
    assert finish(folder).images == 12
    assert snapshot(folder) == snapshot(tmp_path / "all")


def _folder(dataset, folder):
    write_alone(dataset, folder)
    return folder


def _list_names(path):
    """Return the names of the images in a shard, in its order."""
    with tarfile.open(path) as tar:
        records = [json.load(tar.extractfile(name)) for name in tar.getnames() if ".json" in name]
    return [record["file_name"] for record in records]


@pytest.mark.parametrize("name", ["shard-000001.tar", "shard-000001.arrays"])
@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_what_was_lost_or_cut_is_named(dataset, folder, name, damage):
    planned = plan(dataset, folder)
    for job in planned.jobs:
        write_shard(job)
    if damage == "lost":
        (folder / name).unlink()
    else:
        os.truncate(folder / name, 2000)
    with pytest.raises(
        ColabUtilsError, match=rf"1 of {planned.count} shards are missing in .*: number 1\."
    ):
        finish(folder)
    write_shard(planned.jobs[1])
    finish(folder)
    assert verify_shards(folder).bad == ()


def test_a_plan_of_other_settings_or_data_is_refused_before_any_shard(dataset, folder):
    plan(dataset, folder)
    before = snapshot(folder)
    with pytest.raises(ColabUtilsError, match="made with other settings"):
        plan(dataset, folder, min_size=640)
    with pytest.raises(ColabUtilsError, match="made with other settings"):
        write_alone(dataset, folder, min_size=640)
    coco = json.loads(dataset[1].read_text())
    dataset[1].write_text(json.dumps({**coco, "info": {"year": 1999}}))
    with pytest.raises(ColabUtilsError, match="of another dataset"):
        plan(dataset, folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("change", ["images", "version"])
def test_a_job_of_another_plan_writes_nothing(dataset, folder, tmp_path, monkeypatch, change):
    """The folder was planned again: from another path of the images, or by another version of the
    package.
    """
    old = plan(dataset, folder)
    if change == "images":
        (tmp_path / "elsewhere").symlink_to(dataset[0])
        new = plan((tmp_path / "elsewhere", dataset[1]), folder)
    else:
        monkeypatch.setattr("colab_utils.__version__", "9.9")
        with pytest.raises(ColabUtilsError, match=r"\(this machine has 9\.9\)"):
            write_shard(old.jobs[0])
        new = plan(dataset, folder)
    with pytest.raises(ColabUtilsError, match="planned again with other settings"):
        write_shard(old.jobs[0])
    assert not list(folder.glob("shard-*"))
    for job in new.jobs:
        write_shard(job)
    assert finish(folder).images == 12


def test_a_job_may_come_as_a_list(dataset, folder, tmp_path):
    for job in plan(dataset, folder).jobs:
        write_shard(json.loads(json.dumps(job)))
    finish(folder)
    assert snapshot(folder) == write_alone(dataset, tmp_path / "alone")


@pytest.mark.parametrize(
    "job",
    [
        None,
        "shards",
        ["shards", 0],
        ["shards", "0", "run"],
        ["shards", 0.0, "run"],
        ("shards", True, "run"),
        {"shards": "shards", "number": 0, "run": "run"},
    ],
    ids=str,
)
def test_what_is_no_job_is_told(job):
    with pytest.raises(ColabUtilsError, match=r"is not a job\. Pass one of the jobs of plan_jobs"):
        write_shard(job)


@pytest.mark.parametrize("run", ["", "abc", "-", "0-0-0-0"])
def test_a_job_that_was_made_up_is_refused(dataset, folder, run):
    job = plan(dataset, folder).jobs[0]
    with pytest.raises(ColabUtilsError, match="The plan of this job is not in"):
        write_shard(job._replace(run=run))
    with pytest.raises(ColabUtilsError, match="it is missing"):
        write_shard(job._replace(number=99))


def test_a_machine_that_does_not_see_the_images_says_so(dataset, folder, tmp_path):
    planned = plan(dataset, folder)
    dataset[0].rename(tmp_path / "elsewhere")
    with pytest.raises(ColabUtilsError, match="There is no image folder at "):
        write_shard(planned.jobs[0])


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'"a"', b'{"key": 1, "plan": {"a": 2}}'])
def test_a_damaged_plan_is_told(dataset, folder, tmp_path, content):
    planned = plan(dataset, folder)
    (folder / "plan.json").write_bytes(content)
    for act in (
        lambda: plan(dataset, folder),
        lambda: write_shard(planned.jobs[0]),
        lambda: finish(folder),
    ):
        with pytest.raises(
            ColabUtilsError, match=r"The plan of shards cannot be read in .*Delete plan\.json"
        ):
            act()
    (folder / "plan.json").unlink()
    for job in plan(dataset, folder).jobs:
        write_shard(job)
    finish(folder)
    assert snapshot(folder) == write_alone(dataset, tmp_path / "alone")


@pytest.mark.parametrize("place", ["start", "middle", "end", "gone"])
def test_damaged_annotations_of_a_shard_are_told(dataset, folder, place):
    planned = plan(dataset, folder)
    (path,) = folder.glob("plan-*/000001.npz")
    content = bytearray(path.read_bytes())
    offset = {"start": 0, "middle": len(content) // 2, "end": len(content) - 10}.get(place)
    if offset is None:
        path.unlink()
    else:
        content[offset : offset + 4] = b"\xff\x00\xff\x00"
        path.write_bytes(content)
    with pytest.raises(
        ColabUtilsError, match=r"The plan of shards cannot be read in .*Delete plan\.json"
    ):
        write_shard(planned.jobs[1])
    (folder / "plan.json").unlink()
    for job in plan(dataset, folder).jobs:
        write_shard(job)
    assert finish(folder).images == 12


def test_folders_of_the_user_stay(dataset, folder):
    (folder / "plan-b").mkdir(parents=True)
    (folder / "plan-b" / "notes.txt").write_text("mine")
    for job in plan(dataset, folder).jobs:
        write_shard(job)
    finish(folder)
    assert (folder / "plan-b" / "notes.txt").read_text() == "mine"
    assert not (folder / "plan.json").exists()
    assert len(list(folder.glob("plan-*"))) == 1


def test_finish_has_nothing_without_a_plan(folder, tmp_path):
    with pytest.raises(ColabUtilsError, match="Run preprocess"):
        finish(folder)
    with pytest.raises(ColabUtilsError, match="Run preprocess"):
        finish(tmp_path)


@pytest.mark.parametrize("text", ["", "3", "1/0", "0/0", "5/4", "-1/4", "a/b", "1/2/3", "1.5/2"])
def test_a_part_that_is_none(dataset, folder, capsys, text):
    words = ["--images", dataset[0], "--annotations", dataset[1], "--shards", folder]
    with pytest.raises(SystemExit) as exit_info:
        main(["preprocess", *map(str, words), f"--part={text}"])
    assert exit_info.value.code == 2
    assert "name one of 1/N to N/N" in capsys.readouterr().err
    assert not folder.exists()


def test_parts_are_counted_from_one_or_from_zero(dataset, tmp_path):
    written = {}
    for text in ("0/3", "3/3"):
        folder = tmp_path / text.replace("/", "-")
        words = ["--images", dataset[0], "--annotations", dataset[1], "--shards", folder]
        command = ["preprocess", *map(str, words), "--shard-mb", str(SHARD_MB), "--part", text]
        assert main(command) == 0
        written[text] = sorted(path.name for path in folder.glob("shard-*"))
    assert written["0/3"] == written["3/3"]


def test_parts_are_not_written_and_finished_at_once(folder, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["preprocess", "--shards", str(folder), "--part", "1/2", "--finish"])
    assert exit_info.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_preprocess_needs_images_unless_it_finishes(folder, capsys):
    assert main(["preprocess", "--shards", str(folder)]) == 2
    assert "needs --images and --annotations, or --finish" in capsys.readouterr().err


# These tests stop a run.


def test_a_stopped_job_writes_nothing(sixty, folder, monkeypatch):
    """The stop comes while its images are read."""
    monkeypatch.setattr(job_plan, "_LOOK_S", 0.0)
    planned = plan(sixty, folder, shard_mb=0.3)
    job = planned.jobs[0]
    slow_down(sixty[0], "typical")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(write_shard, job, streams=1)
        time.sleep(0.3)
        assert not future.done()
        job.stop_file.touch()
        with pytest.raises(ColabUtilsError, match="The writing of shards was stopped"):
            future.result(timeout=30)
    assert not list(folder.glob("*shard-*"))
    # Another run of the same plan is not.
    slow_down(sixty[0], None)
    write_shard(planned.jobs[0])


def test_a_job_that_waited_while_its_run_was_stopped_looks_for_nothing(
    tiny_dataset, tmp_path, monkeypatch
):
    """At a server that refuses, each look takes half a minute, and many jobs may wait."""
    made = tiny_dataset.images, tiny_dataset.annotations
    job = plan(made, tmp_path / "shards", shard_mb=0.01).jobs[0]
    job.stop_file.touch()
    monkeypatch.setattr(jobs, "find_shard", None)
    with pytest.raises(ColabUtilsError, match="was stopped"):
        write_shard(job)


# These tests use executors.


class Forgetful(Executor):
    """An engine with a process for each job, which is killed where ``dies`` says so; like others,
    it gives the outcome of an equal call again.
    """

    def __init__(self, dies):
        self._dies = dies
        self._kept = {}
        self._pools = []
        self.calls = []

    def submit(self, call, *arguments):
        job = arguments[0]
        if job not in self._kept:
            self.calls.append(job.number)
            self._kept[job] = self._run(call, job)
        return self._kept[job]

    def _run(self, call, job):
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
        self._pools.append(pool)
        if self._dies(job.number, self.calls.count(job.number)):
            return pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL)
        return pool.submit(call, job)

    def close(self):
        for pool in self._pools:
            pool.shutdown()


@pytest.fixture
def forgetful():
    """Makes such engines, and closes them."""
    engines = []

    def make(dies):
        engines.append(Forgetful(dies))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_lost_workers_are_tried_again_twice(dataset, folder, tmp_path, forgetful):
    engine = forgetful(lambda number, tries: number == 1 and tries <= 2)
    assert write_alone(dataset, folder, executor=engine) == write_alone(dataset, tmp_path / "alone")
    assert engine.calls.count(1) == 3
    assert engine.calls.count(0) == 1


@pytest.mark.parametrize(("retries", "tries"), [(2, 3), (0, 1)])
def test_a_shard_that_is_lost_again_and_again_is_named(
    dataset, folder, tmp_path, forgetful, retries, tries
):
    engine = forgetful(lambda number, _: number == 1)
    with pytest.raises(
        ColabUtilsError, match=r"shard-000001 was not written.*it continues"
    ) as error:
        write_alone(dataset, folder, executor=engine, retries=retries)
    assert "BrokenProcessPool" in str(error.value)
    assert engine.calls.count(1) == tries
    assert not (folder / "index.json").exists()
    assert not (folder / "writer.txt").exists()
    # The same call on the same engine, which has new workers now.
    engine._dies = lambda *_: False
    assert write_alone(dataset, folder, executor=engine) == write_alone(dataset, tmp_path / "alone")


def test_what_is_no_executor_is_told(dataset, folder):
    """Dask's client has `submit`, too, and gives futures of its own."""
    with pytest.raises(ColabUtilsError, match=r"executor is a module.*client\.get_executor\(\)"):
        write_alone(dataset, folder, executor=os)
    assert not folder.exists()


def test_an_executor_that_was_shut_down_is_told(dataset, folder):
    with ThreadPoolExecutor(1) as executor:
        pass
    with pytest.raises(ColabUtilsError, match=r"shard-000000 was not written.*after shutdown"):
        write_alone(dataset, folder, executor=executor)


def test_an_executor_that_gives_no_index_is_told(dataset, folder, tmp_path):
    class Forgetting(ThreadPoolExecutor):
        def submit(self, *_):
            return super().submit(print, end="")

    with (
        Forgetting(1) as executor,
        pytest.raises(ColabUtilsError, match="in place of an index of the shard came None"),
    ):
        write_alone(dataset, folder, executor=executor)
    assert write_alone(dataset, folder) == write_alone(dataset, tmp_path / "alone")


@pytest.mark.parametrize("answer", [None, {}, "done"], ids=str)
def test_an_executor_that_gives_no_future_is_told(dataset, folder, answer):
    class Direct(Executor):
        def submit(self, *_):
            return answer

    with pytest.raises(ColabUtilsError, match=f"in place of a Future came {answer!r}"):
        write_alone(dataset, folder, executor=Direct())


def test_an_executor_whose_workers_write_elsewhere_is_told(dataset, folder, tmp_path):
    """Such as a cluster where each machine has a folder of this name of its own."""

    def write_elsewhere(call, job):
        index = call(job)
        (folder / f"shard-{job.number:06d}.tar").unlink()
        return index

    class Elsewhere(ThreadPoolExecutor):
        def submit(self, call, job):
            return super().submit(write_elsewhere, call, job)

    with (
        Elsewhere(1) as executor,
        pytest.raises(ColabUtilsError, match="this process does not see all of them in"),
    ):
        write_alone(dataset, folder, executor=executor)
    assert not (folder / "index.json").exists()
    assert write_alone(dataset, folder) == write_alone(dataset, tmp_path / "alone")


def test_an_error_of_ours_is_not_tried_again(dataset, folder, forgetful, monkeypatch):
    engine = forgetful(lambda *_: False)
    monkeypatch.setattr(jobs, "load_part", refuse)
    with pytest.raises(ColabUtilsError, match=r"^refused$"):
        write_alone(dataset, folder, executor=engine, workers=1)
    assert max(map(engine.calls.count, engine.calls)) == 1


def refuse(*_):
    raise ColabUtilsError("refused")


def test_a_stop_that_cannot_be_written_hides_no_error(dataset, folder, forgetful):
    """The folder of the plan is gone, as with a Drive that is disconnected."""
    engine = forgetful(lambda number, _: number == 1 and not shutil.rmtree(*folder.glob("plan-*")))
    # A job that was under way may miss the plan before the lost one is given up.
    with pytest.raises(ColabUtilsError, match=r"shard-000001 was not written|it is missing"):
        write_alone(dataset, folder, executor=engine, retries=0)


def test_a_few_jobs_are_handed_over_at_a_time(sixty, folder):
    under_way = []
    counts = []

    class Counting(ThreadPoolExecutor):
        def submit(self, *arguments):
            future: Future = super().submit(*arguments)
            under_way.append(future)
            counts.append(sum(not future.done() for future in under_way))
            return future

    with Counting(1) as executor:
        write_alone(sixty, folder, shard_mb=0.05, executor=executor, workers=1)
    assert len(counts) == 15
    assert max(counts) <= running._AHEAD


def test_no_job_is_at_work_when_the_folder_is_free(sixty, folder, monkeypatch):
    """One job fails while another one reads."""
    monkeypatch.setattr(job_plan, "_LOOK_S", 0.0)
    slow_down(sixty[0], "typical")
    write = jobs.write_file

    def fail(path, *parts):
        if "shard-000000" in path.name:
            raise OSError(28, "No space left on device")
        write(path, *parts)

    monkeypatch.setattr(jobs, "write_file", fail)
    with ThreadPoolExecutor(3) as executor:
        with pytest.raises(ColabUtilsError, match="No space left"):
            write_alone(sixty, folder, shard_mb=0.05, executor=executor, workers=3, streams=1)
        assert not (folder / "writer.txt").exists()
        before = snapshot(folder)
        time.sleep(1)
    assert snapshot(folder) == before
    assert read_plan(folder) is not None
