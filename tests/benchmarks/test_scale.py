"""Growth is measured on data that are sound: a few images, in a process for each step."""

import json

import pytest

from benchmarks import scale
from colab_utils.shards.verify import verify_shards


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The data of each kind and size are made once for all steps."""
    return tmp_path_factory.mktemp("scale") / "work"


@pytest.mark.parametrize("step", scale.STEPS)
def test_each_step_runs_at_two_sizes(tmp_path, work, step, capsys):
    steps = ["plan", step] if step == "plan again" else [step]
    arguments = ["--steps", *steps, "--sizes", "30", "60", "--work", str(work)]
    assert scale.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["images"] for row in rows if row["step"] == step] == [30, 60]
    assert all(row["cpu_s"] > 0 for row in rows)
    assert step in capsys.readouterr().out


def test_shards_are_sound_but_for_their_number_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "_SHARD_IMAGES", 10)
    shards = scale.make_shards(tmp_path, 25)
    dataset = scale.ShardDataset(shards)
    assert len(dataset) == 25
    assert len(dataset.record(24)["annotations"]) > 0
    assert verify_shards(shards).bad == ()


@pytest.mark.parametrize(
    ("times_s", "exponent"),
    [
        ([1, 10, 100], 1),
        ([5, 1, 100], 2),
    ],
)
def test_the_exponent_is_that_of_the_two_largest_sizes(times_s, exponent):
    rows = [{"images": 10**n, "cpu_s": time_s} for n, time_s in enumerate(times_s)]
    assert scale.find_exponent(rows) == pytest.approx(exponent)
