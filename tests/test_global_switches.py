"""Switches of the whole process, as a notebook or another package sets them, change no result; and
they are as they were afterwards.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from PIL import GifImagePlugin, Image, ImageFile
from torch.utils._pytree import tree_leaves

from colab_utils.course.sample_data import make_dataset
from colab_utils.data.checks import check_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.write import write_shards
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import build_mask_rcnn, load_trained_model
from colab_utils.training.train import train
from tests.tiny_model import TINY_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINING = {
    "model": TINY_MODEL,
    "weights": None,
    "min_size": 64,
    "max_size": 96,
    "batch_size": 2,
}


@contextmanager
def change(read, write, value):
    """Set a switch; it must have this value at the end, too."""
    before = read()
    write(value)
    try:
        yield
    finally:
        after = read()
        write(before)
    assert after == value


def change_attribute(holder, name, value):
    return change(partial(getattr, holder, name), partial(setattr, holder, name), value)


# The switches of a group are set together. None of them hides what another one does.
SWITCHES = {
    "Pillow and numpy": (
        lambda: np.errstate(all="raise"),
        lambda: change_attribute(ImageFile, "MAXBLOCK", 16),
        lambda: change_attribute(Image, "MAX_IMAGE_PIXELS", None),
        lambda: change_attribute(ImageFile, "LOAD_TRUNCATED_IMAGES", True),
        lambda: change_attribute(
            GifImagePlugin, "LOADING_STRATEGY", GifImagePlugin.LoadingStrategy.RGB_ALWAYS
        ),
        lambda: change_attribute(logging.getLogger("PIL.TiffImagePlugin"), "disabled", True),
    ),
    "limits": (
        lambda: change_attribute(ImageFile, "MAXBLOCK", 1 << 22),
        lambda: change_attribute(Image, "MAX_IMAGE_PIXELS", 1),
        lambda: change(torch.get_default_device, torch.set_default_device, torch.device("meta")),
    ),
    "torch": (
        lambda: change(torch.is_grad_enabled, torch.set_grad_enabled, False),
        lambda: change(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        lambda: change(
            multiprocessing.get_start_method,
            partial(multiprocessing.set_start_method, force=True),
            "spawn",
        ),
    ),
    "inference": (torch.inference_mode,),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(
        tmp_path_factory.mktemp("data"), n=4, width=96, height=64, objects=(1, 3), workers=1
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_mask_rcnn(TINY_MODEL, num_classes=60, weights=None, min_size=64, max_size=96)


def flatten(values):
    """Return tensors and whatever else lies in batches or samples, as one flat list."""
    # The tables of a packed batch are attributes.
    tree = [getattr(value, "__dict__", value) for value in values]
    return [
        (leaf.dtype, leaf.device.type, leaf.tolist()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves(tree)
    ]


def load(dataset, workers, deliver):
    loader = make_loader(dataset, batch_size=2, workers=workers, deliver=deliver)
    try:
        return flatten(list(loader))
    finally:
        loader.close()


def use_data(data, shards):
    """Check, write and load."""
    results = {"check": str(check_dataset(data.images, data.annotations, deep=True))}
    write_shards(data.images, data.annotations, shards=shards, workers=1, min_size=48, max_size=80)
    for workers in (0, 2):
        for deliver in ("packed", "dense"):
            results[deliver, workers] = load(ShardDataset(shards), workers, deliver)
    return results


def use_all(data, model, folder):
    """Return what each of the main functions gives."""
    shards = folder / "shards"
    results = use_data(data, shards)
    results["write"] = [path.read_bytes() for path in sorted(shards.glob("*.tar"))]
    dataset = ShardDataset(shards)
    results["shards"] = flatten([dataset[i] for i in range(4)])
    files = CocoFolder(data.images, data.annotations)
    results["files"] = flatten([files[i] for i in range(4)])
    (batch,) = make_loader(dataset, batch_size=4, workers=0, deliver="packed")
    torch.manual_seed(0)
    losses = compute_losses(model, batch)
    results["losses"] = {name: float(loss.detach()) for name, loss in losses.items()}
    report = train(shards, folder / "run", steps=2, workers=0, **TRAINING)
    results["train"] = [str(point) for point in report.losses]
    results["trained"] = flatten(load_trained_model(folder / "run").state_dict().values())
    return results


@pytest.fixture(scope="module")
def expected(data, model, tmp_path_factory):
    return use_all(data, model, tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("group", SWITCHES)
def test_switches_change_no_result(data, model, expected, tmp_path, group):
    with ExitStack() as switches:
        for switch in SWITCHES[group]:
            switches.enter_context(switch())
        results = use_all(data, model, tmp_path)
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert result == expected[name], name


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16],
)
def test_another_default_dtype_is_told_by_train_and_changes_no_data(
    data, expected, tmp_path, dtype
):
    with change(torch.get_default_dtype, torch.set_default_dtype, dtype):
        shards = tmp_path / "shards"
        assert use_data(data, shards).items() <= expected.items()
        with pytest.raises(ColabUtilsError, match=rf"{dtype}, .* Call torch.set_default_dtype"):
            train(shards, tmp_path / "run", steps=2, **TRAINING)
        assert not list(tmp_path.glob("run/*"))


def test_the_users_random_numbers_go_on_as_they_were(data, tmp_path):
    def read_states():
        return (
            random.getstate(),
            str(np.random.get_state()),
            torch.get_rng_state().tolist(),
        )

    before = read_states()
    check_dataset(data.images, data.annotations, deep=True)
    write_shards(data.images, data.annotations, shards=tmp_path, workers=2)
    for workers in (0, 2):
        load(ShardDataset(tmp_path), workers, "packed")
    assert read_states() == before
