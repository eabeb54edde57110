"""The names at the top: light to import, easy to find; and the one setting that must come before
torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import colab_utils


def run_python(code: str, **environment: str) -> str:
    """What a fresh Python prints, with the errors; variables of OpenMP are those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    kept["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def test_waiting_threads_sleep_when_torch_comes_after_us():
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in run_python(
        "import colab_utils, torch", OMP_DISPLAY_ENV="TRUE"
    )


def test_a_wait_policy_of_the_user_stays():
    code = "import os, colab_utils; print(os.environ['OMP_WAIT_POLICY'])"
    assert run_python(code, OMP_WAIT_POLICY="ACTIVE").strip() == "ACTIVE"


def test_benchmarks_have_it_before_torch_too():
    code = (
        "import os, sys, benchmarks; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )
    assert run_python(code).strip() == "False PASSIVE"


def test_the_table_of_modules_is_of_these_names_and_each_is_defined_there():
    assert len(colab_utils._MODULES) <= 20
    assert {*colab_utils._MODULES} == {*colab_utils.__all__} - {"__version__"}
    for name, module in colab_utils._MODULES.items():
        assert getattr(colab_utils, name).__module__ == module


def test_unknown_names_and_modules_are_as_in_any_package():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = colab_utils.no_such_name
    assert (
        run_python("from colab_utils import drive; print(drive.__name__)").strip()
        == "colab_utils.drive"
    )
