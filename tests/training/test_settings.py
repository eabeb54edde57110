"""What a run trains with: what was asked for, else what its checkpoint holds, else the defaults."""

from __future__ import annotations

import dataclasses

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.training.settings import TrainSettings, choose_settings, read_settings


def test_a_setting_that_is_not_named_stays_as_it_was():
    stored = {
        "model": "maskrcnn_resnet50_fpn",
        "min_size": 480,
        "max_size": 640,
        "augment": "none",
        "batch_size": 6,
        "learning_rate": 0.3,
    }
    unchanged = choose_settings(TrainSettings(), stored, on_gpu=False)
    assert dataclasses.asdict(unchanged).items() >= stored.items()
    # The rate follows the batch.
    assert choose_settings(TrainSettings(batch_size=8), stored, on_gpu=False).learning_rate == 0
    asked = TrainSettings(batch_size=8, learning_rate=0.1, min_size=300)
    changed = choose_settings(asked, stored, on_gpu=True)
    assert (changed.learning_rate, changed.min_size, changed.max_size) == (0.1, 300, 640)


@pytest.mark.parametrize(
    ("model", "on_gpu", "size"),
    [
        ("", True, 800),
        ("maskrcnn_mobilenet_v3_large_fpn", True, 800),
        ("maskrcnn_tiny_fpn", True, 128),
    ],
)
def test_the_size_of_the_images_follows_the_model(model, on_gpu, size):
    settings = choose_settings(TrainSettings(model=model), {}, on_gpu=on_gpu)
    assert (settings.min_size, settings.max_size) == (size, round(size * 5 / 3))


BAD_VALUES = [
    ("model", "yolo", "model must be one of maskrcnn_resnet50_fpn_v2, "),
    ("max_size", 0, "expected max_size of 1 or more and of 10,000 or less, found 0"),
    ("augment", "mosaic", "augment must be one of none, flip, own transforms; it is 'mosaic'"),
    ("seed", -1, "expected seed of 0 or more .*found -1"),
    ("steps", 0, "expected steps of 1 or more, found 0"),
    ("batch_size", 2.5, "expected batch_size as a whole number, found 2.5"),
    ("learning_rate", float("inf"), "expected learning_rate over 0, found inf"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_VALUES)
def test_a_value_that_is_none_is_refused(name, value, expected):
    with pytest.raises(ColabUtilsError, match=f"^{expected}"):
        read_settings({name: value})
