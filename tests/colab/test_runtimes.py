"""The table of Colab's runtimes, and which of its packages an overlay replaces."""

from __future__ import annotations

import re

import pytest

from colab_utils.errors import ColabUtilsError
from tests.colab.environments import SMALL
from tests.colab.runtimes import list_requirements, read_runtime, read_runtimes
from tools.cells import ROOT


def test_the_table_names_each_runtime_with_its_source():
    runtimes = read_runtimes()
    assert list(runtimes) == ["2025.10", "2026.01", "2026.04", "2026.07", "now"]
    assert {len(versions) for versions in runtimes.values()} == {len(runtimes["now"])}
    for versions in runtimes.values():
        assert re.fullmatch("[0-9a-f]{7}", versions["commit"])
        assert re.fullmatch(r"202\d-\d\d-\d\d", versions["date"])
    dates = [versions["date"] for versions in runtimes.values()]
    assert dates == sorted(dates)


def test_every_package_that_we_need_is_in_the_table():
    needed = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert set(needed) <= set(read_runtime("now"))
    assert set(SMALL) <= set(read_runtime("now"))


def test_an_overlay_leaves_torch_and_python_as_they_are():
    requirements = list_requirements(read_runtime("2026.04"), SMALL)
    assert "numpy==2.0.2" in requirements
    assert not any(line.startswith(("torch", "python", "pip=")) for line in requirements)
    everything = list_requirements(read_runtime("2026.04"))
    assert "torch==2.10.0" in everything
    assert not any(line.startswith(("python==", "commit", "date")) for line in everything)


def test_a_runtime_that_nobody_knows_is_refused_with_those_that_are_known():
    with pytest.raises(ColabUtilsError, match=r"'2024\.01' is no runtime .* one of 2025\.10, "):
        read_runtime("2024.01")


def test_the_lists_that_colab_publishes_are_read(tmp_path):
    versions = dict(read_runtime("now"))
    del versions["commit"], versions["date"]
    path = tmp_path / "today.txt"
    packages = [f"{name}=={versions[name]}" for name in versions.keys() - {"python", "torch"}]
    wheel = f"torch-{versions['torch']}%2Bcpu-cp313-cp313-manylinux_2_28_x86_64.whl"
    system = f"Ubuntu 22.04.5 LTS\nPython {versions['python']}\n"
    path.write_text("\n".join([*packages, f"torch @ https://example.org/whl/{wheel}", system]))
    assert read_runtime(str(path)) == versions
    # A list of another form is named, and not taken for one without packages.
    path.write_text(f"numpy 2.1.3\n{system}")
    with pytest.raises(ColabUtilsError, match="names no aiohttp, fsspec, "):
        read_runtime(str(path))
