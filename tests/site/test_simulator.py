"""The site simulates in JavaScript: same settings and seed, same batches as in Python."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from colab_utils.diagnosis.simulator import simulate

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "site" / "first" / "simulator.js"
RUN_ALL = """
const { simulate } = require(process.argv[1]);
const settings = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(settings.map(simulate)));
"""

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None,
    reason="no node (apt-get install nodejs): the site's simulator is not tested",
)


def simulate_in_node(settings):
    done = subprocess.run(
        ["node", "-e", RUN_ALL, str(SCRIPT)],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def draw_setting(generator):
    """A setting that a loader could have: many are round numbers, where ties decide."""
    spread = generator.choice([0.0, 0.22, 0.5, generator.uniform(0, 2)])
    return {
        "workers": generator.randrange(0, 17),
        "load_s": generator.choice([0.1, 0.4, 0.7, 2.0, 10 ** generator.uniform(-2, 1)]),
        "step_s": generator.choice([0.1, 0.25, 10 ** generator.uniform(-2, 0.5)]),
        "load_cv": spread,
        "step_cv": generator.choice([0.0, spread, generator.uniform(0, 1)]),
        "prefetch": generator.randrange(1, 9),
        "seconds": generator.choice([10, 30, generator.uniform(1, 40)]),
        "seed": generator.choice([0, 4, generator.randrange(2**32)]),
        "in_order": generator.random() < 0.5,
        "cores": generator.choice([1, 2, 8]),
        **draw_reads(generator),
    }


def draw_reads(generator):
    """Files of a batch, and how they are read and worked on; none in half of the settings."""
    if generator.random() < 0.5:
        return {}
    return {
        "load_s": 0.0,
        "batch_size": generator.randrange(1, 5),
        "streams": generator.choice([1, 2, 8, 32]),
        "read_s": [10 ** generator.uniform(-2, 0) for _ in range(generator.choice([1, 2, 64]))],
        "work_s": generator.choice([0.0, 0.01, 0.1]),
        "handoff_s": generator.choice([0.0, 0.01]),
    }


def assert_same_trace(spans, trace, seconds):
    """The spans of one lane, or of the steps, are those of Python."""
    rows = [[span["batch"], span["start"], span["end"]] for span in spans]
    batches, starts, ends = np.reshape(rows, (-1, 3)).T
    np.testing.assert_array_equal(batches, trace.batch)
    np.testing.assert_allclose(starts, trace.start_s, rtol=1e-9, atol=1e-6)
    # A trace is cut at the end of the simulation; the site needs to know what has not ended.
    np.testing.assert_allclose(np.minimum(ends, seconds), trace.end_s, rtol=1e-9, atol=1e-6)


def test_random_settings_give_the_batches_of_python():
    generator = random.Random(0)
    settings = [draw_setting(generator) for _ in range(150)]
    runs = simulate_in_node(settings)
    total = 0
    for setting, run in zip(settings, runs, strict=True):
        expected = simulate(**setting)
        assert run["batches"] == expected.batches, setting
        assert run["utilisation"] == pytest.approx(expected.utilisation, abs=1e-6), setting
        assert len(run["loads"]) == len(expected.loads), setting
        total += expected.batches
        # What shares cores ends within a rounding of each other: either may be the first.
        if setting.get("work_s") or setting.get("handoff_s"):
            continue
        lanes = (*run["loads"], run["steps"])
        for spans, trace in zip(lanes, (*expected.loads, expected.steps), strict=True):
            assert_same_trace(spans, trace, setting["seconds"])
    # Settings under which nothing is trained would prove nothing.
    assert total > 3_000


def test_the_settings_of_the_first_page_give_the_batches_that_it_tells():
    cases = [(2.0, 0.0), (0.35, 0.0), (0.7, 0.22)]
    settings = [
        {"workers": 7, "load_s": load_s, "load_cv": spread, "step_s": 0.1, "seed": 4}
        for load_s, spread in cases
    ]
    assert [run["batches"] for run in simulate_in_node(settings)] == [98, 296, 275]
