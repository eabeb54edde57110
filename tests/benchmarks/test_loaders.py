"""A tiny run of one scenario, its tables, and the examples."""

import doctest
import json
from importlib import import_module

import pytest

from benchmarks import loaders
from benchmarks.scenarios import SCENARIOS
from benchmarks.systems import SYSTEMS, get_system
from benchmarks.worker import run_job


def test_scenarios_name_systems_that_there_are():
    for scenario in SCENARIOS.values():
        assert set(scenario.systems) <= set(SYSTEMS)
        for target in scenario.targets:
            assert {target.system, *target.over} <= set(scenario.systems)
    assert {name for scenario in SCENARIOS.values() for name in scenario.systems} == set(SYSTEMS)


@pytest.fixture(scope="module")
def results(tiny_dataset, tmp_path_factory):
    """A run of one scenario with our loader and a peer that is not installed.

    Only what is measured runs in a process of its own, and two crews are tried.
    """
    work = tmp_path_factory.mktemp("work")
    run_apart = loaders.run_apart
    packed = get_system("packed")

    def run_job_here(job, python, *, timeout_s):
        if job.task == "measure":
            return run_apart(job, python, timeout_s=timeout_s)
        return run_job(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "run_apart", run_job_here)
        patch.setattr(packed, "crews", packed.crews[:2])
        command = (
            f"--images {tiny_dataset.images} --annotations {tiny_dataset.annotations} "
            f"--work {work} --json {work}/out.json --repeats 1 --samples 12 --seconds 0.2 "
            "--scenario kept_jpeg --systems packed,spdl_files"
        )
        assert loaders.main(command.split()) == 0
    # The runner deletes what no later scenario reads.
    assert not (work / "forms" / "shards-kept").exists()
    return json.loads((work / "out.json").read_text())


def test_a_run_measures_what_is_installed_and_names_what_is_not(results):
    (scenario,) = results["scenarios"]
    ours, peer = scenario["rows"]
    assert ours["check"] == {"difference": "", "seen": 12, "compared": 12}
    figures = ours["figures"]
    assert figures["lowest"] <= figures["images_per_second"] <= figures["highest"]
    assert ours["crew"] == max(ours["trials"], key=ours["trials"].get)
    assert peer["figures"] is None
    assert "make peers" in peer["reason"]
    assert [target["value"] for target in scenario["targets"]] == [None] * 3


@pytest.mark.parametrize("module", ["environments", "scenarios"])
def test_examples_run(module):
    result = doctest.testmod(
        import_module(f"benchmarks.{module}"), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted > 0
    assert result.failed == 0
