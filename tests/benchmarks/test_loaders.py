import doctest
import json
from importlib import import_module

import pytest

from benchmarks import environments, loaders
from benchmarks.report import BEGIN, END, README, write_readme
from benchmarks.scenarios import SCENARIOS, Target, judge
from benchmarks.systems import SYSTEMS, get_system
from benchmarks.worker import run_job
from colab_utils.errors import ColabUtilsError

PEERS = ("slow", "fast")


@pytest.mark.parametrize(
    ("target", "value", "reached"),
    [
        # the fastest peer counts
        (Target("ours", "images_per_second", PEERS, at_least=2), 2.5, True),
        (Target("ours", "images_per_second", PEERS, at_least=3), 2.5, False),
        # of CPU time, the least
        (Target("ours", "cpu_ms_per_image", PEERS, at_most=0.5), 0.4, True),
        (Target("ours", "wait_share", at_most=0.01), 0.02, False),  # by itself
        (Target("ours", "images_per_second", ("absent",), at_least=2), None, None),
        (Target("absent", "images_per_second", PEERS, at_least=2), None, None),
    ],
)
def test_judge(target, value, reached):
    figures = {
        "ours": {"images_per_second": 500.0, "cpu_ms_per_image": 2.0, "wait_share": 0.02},
        "slow": {"images_per_second": 100.0, "cpu_ms_per_image": 9.0, "wait_share": 0.9},
        "fast": {"images_per_second": 200.0, "cpu_ms_per_image": 5.0, "wait_share": 0.5},
    }
    judged = judge(target, figures)
    assert (judged["value"], judged["reached"]) == (value, reached)


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
    work, run_apart, packed = (
        tmp_path_factory.mktemp("work"),
        loaders.run_apart,
        get_system("packed"),
    )

    def run_job_here(job, python, *, timeout_s):
        return (
            run_apart(job, python, timeout_s=timeout_s) if job.task == "measure" else run_job(job)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "run_apart", run_job_here)
        patch.setattr(packed, "crews", packed.crews[:2])
        return run_kept_jpeg(tiny_dataset, work)


def run_kept_jpeg(tiny_dataset, work):
    options = [
        "--scenario",
        "kept_jpeg",
        "--systems",
        "packed,dali",
        "--samples",
        "12",
        "--seconds",
        "0.2",
    ]
    data = ["--images", str(tiny_dataset.images), "--annotations", str(tiny_dataset.annotations)]
    arguments = [
        *data,
        *options,
        "--repeats",
        "1",
        "--work",
        str(work),
        "--json",
        str(work / "out.json"),
    ]
    assert loaders.main(arguments) == 0
    assert not (work / "forms" / "shards-kept").exists()  # deleted when no later scenario reads it
    return json.loads((work / "out.json").read_text())


def test_a_run_measures_what_is_installed_and_names_what_is_not(results):
    (scenario,) = results["scenarios"]
    ours, peer = scenario["rows"]
    assert ours["check"] == {"difference": "", "seen": 12, "whole_epoch": True, "compared": 12}
    assert len(ours["repeats"]) == 1
    assert (
        ours["figures"]["lowest"]
        <= ours["figures"]["images_per_second"]
        <= ours["figures"]["highest"]
    )
    assert ours["crew"] == max(ours["trials"], key=ours["trials"].get)
    assert peer["figures"] is None
    assert "make peers" in peer["reason"]
    assert [target["value"] for target in scenario["targets"]] == [None] * 3
    assert results["machine"]["cores"] >= 1
    assert "--systems packed,dali" in results["command"]


def test_scenarios_measured_before_stay_in_the_file(results, tmp_path):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(results))
    this = {**results, "versions": {}}
    assert loaders._read_earlier(path, this, ["pixels_800"]) == {
        "kept_jpeg": results["scenarios"][0]
    }
    assert loaders._read_earlier(path, this, ["kept_jpeg"]) == {}
    with pytest.raises(ColabUtilsError, match="with these settings"):
        loaders._read_earlier(path, {**this, "repeats": 99}, [])
    assert loaders._read_earlier(tmp_path / "none.json", this, []) == {}


def test_the_readme_gets_the_tables_between_its_markers(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_readme(results, readme)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "old" not in text
    assert "| packed |" in text
    assert "not measured" in text  # the targets beside systems that were not there
    readme.write_text("no markers")
    with pytest.raises(ColabUtilsError, match="expected the lines"):
        write_readme(results, readme)
    assert BEGIN in README.read_text()
    assert END in README.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "pakced"], "expected systems among"),  # a slip of the pen
        (["--readme", "no/such.json"], "No such file"),
        (["--scenario", "kept_jpeg"], "expected"),  # the images are not there
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    data = [
        "--images",
        "no/such",
        "--annotations",
        "no/such.json",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert loaders.main([*data, "--work", str(tmp_path / "work"), *arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("error: ")
    assert message in said[-1]


def test_a_crash_and_a_hang_are_reasons(monkeypatch, tmp_path):
    class Script:
        text = "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"
        task = "check"

        def dump(self):
            return self.text

    monkeypatch.setattr(loaders, "_COMMAND", ["-c", "import sys; exec(sys.argv[1])"])
    python = environments.find_python("", tmp_path)
    with pytest.raises(ColabUtilsError, match="ended with code -6 in check: last words"):
        loaders.run_apart(Script(), python, timeout_s=60)
    Script.text = "import time; time.sleep(600)"
    with pytest.raises(ColabUtilsError, match="did not finish to check within 1 s"):
        loaders.run_apart(Script(), python, timeout_s=1)


def test_an_environment_that_cannot_be_built_says_why(monkeypatch, tmp_path):
    section = tmp_path / "requirements.txt"
    section.write_text("# [bad]\nnothing @ file:///no/such/package-1-py3-none-any.whl\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", section)
    with pytest.raises(ColabUtilsError, match="is not installed: run make peers"):
        environments.find_python("bad", tmp_path)
    reason = environments.build_environment("bad", tmp_path)
    assert "/no/such/package-1-py3-none-any.whl" in reason
    with pytest.raises(ColabUtilsError, match=r"could not be installed: .*no/such/package"):
        environments.find_python("bad", tmp_path)


@pytest.mark.parametrize("module", ["environments", "scenarios"])
def test_examples_run(module):
    found = doctest.testmod(
        import_module(f"benchmarks.{module}"), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert found.attempted > 0
    assert found.failed == 0
