"""Datasets of other people: their indices, their attributes, and how they give their samples."""

from __future__ import annotations

import io
import re
import zipfile
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    DistributedSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning


class Numbers(Dataset):
    """Somebody's own dataset of six images without objects."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        image = torch.full((3, 8, 8), int(index), dtype=torch.uint8)
        return image, {"boxes": [], "labels": [], "masks": []}


def list_ids(loader):
    return [number for batch in loader for number in batch.image_ids.tolist()]


def list_shades(loader):
    """Return the value of each image, sorted."""
    return sorted(shade for batch in loader for shade in batch.pixels[::192].tolist())


NO_INDICES = [
    # True and False of a mask would be taken for 1 and 0.
    [False, True, True, False, False, True],
    # This is what np.argwhere gives.
    np.array([[1], [2], [5]]),
    # These lists have no one length.
    [[0, 1], [2]],
    [1, 6],
    [-7, 1],
]


@pytest.mark.parametrize("indices", NO_INDICES, ids=str)
def test_something_else_than_indices_is_refused(make, indices):
    for owner, dataset, sampler in (
        ("Subset", Subset(Numbers(), indices), None),
        ("Subset", Subset(Subset(Numbers(), range(6)), indices), None),
        ("sampler", Numbers(), indices),
    ):
        message = rf"^The {owner} does not .*flatnonzero\(mask\)"
        with pytest.raises(ColabUtilsError, match=message):
            list(make(dataset, sampler=sampler))


@pytest.mark.parametrize(
    "kind", [list, np.array, torch.tensor, tuple], ids=["list", "array", "tensor", "tuple"]
)
def test_indices_of_any_kind_are_taken(make, kind):
    assert list_ids(make(Numbers(), sampler=kind([4, 1, -1]))) == [4, 1, 5]
    assert list_shades(make(Subset(Numbers(), kind([4, 1, 5])))) == [1, 4, 5]


def test_a_subset_of_a_dataset_without_a_length_is_taken(make):
    unbounded = type("Unbounded", (), {"__getitem__": Numbers.__getitem__})
    assert list_shades(make(Subset(unbounded(), [7, 200, 3]))) == [3, 7, 200]


def test_an_empty_subset_is_told(make):
    for dataset in (Subset(Numbers(), []), Subset(Subset(Numbers(), []), [])):
        with pytest.raises(ColabUtilsError, match=r"The dataset is empty"):
            make(dataset)


@pytest.mark.parametrize("sampler", [iter([1]), WeightedRandomSampler], ids=["no length", "class"])
def test_what_is_no_sampler_is_refused(make, sampler):
    with pytest.raises(ColabUtilsError, match=r"A sampler needs a length, and this .* has none"):
        make(Numbers(), sampler=sampler)


class Once(Sampler):
    """A sampler that is used up after an epoch."""

    def __init__(self):
        self.indices = iter(range(6))

    def __len__(self):
        return 6

    def __iter__(self):
        return self.indices


def test_a_sampler_that_is_used_up_is_told(make):
    loader = make(Numbers(), sampler=Once())
    assert list_ids(loader) == [*range(6)]
    with pytest.raises(ColabUtilsError, match=r"sampler does not give indices.*in each epoch"):
        list(loader)


class Table(Numbers):
    """A dataset that gives samples by a function of the list of samples of a batch."""

    def __init__(self, answer):
        self.answer = answer

    def __getitems__(self, indices):
        return self.answer([self[index] for index in indices])


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (lambda samples: samples + samples, 2),
        (lambda samples: None, 0),
    ],
    ids=["more", "None"],
)
def test_another_number_of_samples_than_asked_for_is_told(make, answer, size):
    message = rf"__getitems__ of your dataset returned {size} samples for the indices \[0"
    with pytest.raises(ColabUtilsError, match=message):
        list(make(Table(answer), batch_size=3, shuffle=False))


class Places(Numbers):
    """A dataset that tells as the image's id in which worker it was loaded."""

    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        info = get_worker_info()
        if info is None:
            return image, target
        assert info.dataset is self
        return image, target | {"image_id": 1000 * info.num_workers + 100 * info.id + index}


def test_a_dataset_is_told_its_worker(make):
    assert list_ids(make(Places(), shuffle=False)) == [*range(6)]
    for options in ({}, {"max_wait_s": 60}):
        ids = list_ids(make(Places(), shuffle=False, workers=2, batch_size=1, **options))
        assert [number % 10 for number in ids] == [*range(6)]
        assert {number // 100 for number in ids} == {20, 21}
    assert get_worker_info() is None


class Reused(Numbers):
    """A dataset that writes each sample into the same memory."""

    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    boxes = torch.tensor([[-1.0, -1, 0, 0]])
    labels = torch.tensor([0])

    def __getitem__(self, index):
        parts = {"boxes": self.boxes.add_(1), "labels": self.labels.add_(1)}
        return self.image.fill_(index), {**parts, "masks": self.image[:1] > 9}


@pytest.mark.filterwarnings("ignore:.*has no pixel")
def test_a_dataset_may_write_its_samples_into_the_same_memory(make):
    [batch] = make(Reused(), batch_size=6, shuffle=False)
    assert batch.pixels[::192].tolist() == batch.boxes[:, 0].tolist() == [*range(6)]
    assert batch.labels.tolist() == [*range(1, 7)]


class OwnError(Exception):
    """An error that cannot be sent to another process."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


class Failing(Numbers):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        if index == 4:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [IndexError(), OwnError(7, "no")], ids=repr)
def test_every_error_names_its_sample(make, error, workers):
    with pytest.raises((IndexError, OwnError, RuntimeError)) as caught:
        list(make(Failing(error), workers=workers, shuffle=False))
    notes = "".join(caught.value.__notes__)
    assert "Sample 4 raised this error." in notes
    assert not workers or "in a worker process:" in notes


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), GeneratorExit()], ids=repr)
def test_no_sample_ends_the_pass(make, error, workers):
    message = f"Sample 4: your dataset raised {type(error).__name__}"
    with pytest.raises(ColabUtilsError, match=message):
        list(make(Failing(error), workers=workers, shuffle=False))


@pytest.mark.parametrize("fault", [MemoryError, ImportError])
def test_a_fault_of_the_machine_leaves_no_sample_out(make, fault):
    with pytest.raises(fault):
        list(make(Failing(fault("no")), max_bad=3))


class Named(Numbers):
    def __init__(self, names):
        self.class_names = dict(enumerate(names, 1))


def test_joined_datasets_whose_labels_clash_are_refused(make):
    make(ConcatDataset([Named(["car"]), Subset(Named(["car", "dog"]), [0])]))
    with pytest.raises(ColabUtilsError, match=r"Label 1 is 'car' in one of .*'dog' in another"):
        make(ConcatDataset([Named(["car"]), Subset(Named(["dog", "car"]), [0])]))


class Holder(Numbers):
    def __init__(self, held):
        self.held = held


def open_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"a")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize(
    ("open_it", "name"),
    [
        (lambda path: [path.open("wb+")], "Holder.held[0]"),
        (lambda path: [open_zip(path)], "Holder.held[0].fp"),
        (lambda path: [path.open("wb")], ""),
        (lambda path: [io.BytesIO(b"a")], ""),
    ],
)
def test_an_open_file_that_workers_would_share_is_told(tmp_path, make, open_it, name):
    held = open_it(tmp_path / "a")
    [file] = held
    dataset = Holder(held)
    expected = pytest.warns(ColabUtilsWarning, match=re.escape(f"{name} is an open file"))
    with expected if name else nullcontext():
        list(make(dataset, workers=1))
    # Without workers, nobody shares it.
    list(make(dataset))
    file.close()


@pytest.mark.parametrize("given", ["num_workers", "collate_fn", "pin_memory", "batch_sampler"])
def test_arguments_of_dataloader_are_explained(make, given):
    with pytest.raises(ColabUtilsError, match=f"make_loader has no {given}: "):
        make(Numbers(), **{given: 1})


def test_an_epoch_that_the_user_sets_wins(make):
    sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=3)
    loader = make(Numbers(), sampler=sampler)
    for epoch in (7, 8, 0):
        sampler.set_epoch(epoch)
        assert list_ids(loader) == list(sampler)
