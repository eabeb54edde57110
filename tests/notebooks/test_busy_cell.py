"""The function of notebook 01 that says whether other programs kept the machine busy."""

from __future__ import annotations

import re
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

from tests.notebooks.test_exercises import read_cells


@pytest.fixture
def machine():
    """A machine of two cores whose clocks a test sets: what all programs and the notebook used."""
    state = SimpleNamespace(busy_s=100.0, idle_s=100.0, own_s=50.0, emulated=True)
    # The notebook itself used a second, its child the rest.
    child = SimpleNamespace(cpu_times=lambda: (state.own_s, 0.0, 0.0, 0.0, 0.0))
    notebook = SimpleNamespace(
        cpu_times=lambda: (1.0, 0.0, 0.0, 0.0, 0.0), children=lambda recursive: [child]
    )
    names = {
        "psutil": SimpleNamespace(
            cpu_times=lambda: (state.busy_s, 0.0, 0.0, state.idle_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
            Process=lambda: notebook,
            Error=psutil.Error,
        ),
        "suppress": suppress,
        "workspace": state,
        "EMULATED_STEP_MS": 100,
    }
    source = "\n".join(read_cells("01").values())
    functions = re.search(r"^def measure_cores\(.*?(?=^def label\()", source, re.M | re.S)
    exec(functions[0], names)
    state.find_busy = names["find_busy"]
    return state


def test_the_notebooks_own_children_do_not_count(machine):
    machine.busy_s += 9.5
    machine.own_s += 9.0
    machine.idle_s += 0.5
    assert machine.find_busy(0.1) == ""


def test_other_programs_count_since_the_last_call(machine):
    machine.busy_s += 9.0
    machine.own_s += 2.0
    machine.idle_s += 1.0
    assert "busy with other work: 70 % of its cores" in machine.find_busy(0.1)
    machine.idle_s += 10.0
    assert machine.find_busy(0.1) == ""


def test_a_step_that_took_longer_counts_where_it_is_emulated(machine):
    assert "the step took 250 ms, not 100" in machine.find_busy(0.25)
    machine.emulated = False
    assert machine.find_busy(0.25) == ""
