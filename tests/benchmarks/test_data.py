import json

import pytest
from PIL import Image

from benchmarks import data as benchmark_data
from benchmarks.data import make_data
from colab_utils.errors import ColabUtilsError


def make(tiny_dataset, work, name, samples=24):
    return make_data(name, work, [tiny_dataset.images], [tiny_dataset.annotations], samples=samples)


def test_kept_repeats_every_image_under_ids_of_its_own(tiny_dataset, tmp_path):
    data = make(tiny_dataset, tmp_path, "kept")
    assert (data.records, data.copies) == (24, 2)
    folder = data.open()
    assert len({*folder.image_ids.tolist()}) == 24
    assert folder.read(0) == folder.read(1) != folder.read(2)
    given = json.loads(tiny_dataset.annotations.read_text())
    assert len(folder.coco.ids) == 2 * len(given["annotations"])
    assert sorted({folder.read(row) for row in range(24)}) == sorted(
        (tiny_dataset.images / image["file_name"]).read_bytes() for image in given["images"]
    )


def test_data_is_made_once_and_again_for_another_size(tiny_dataset, tmp_path):
    first = make(tiny_dataset, tmp_path, "kept").annotations.stat().st_mtime_ns
    assert make(tiny_dataset, tmp_path, "kept").annotations.stat().st_mtime_ns == first
    assert make(tiny_dataset, tmp_path, "kept", samples=5).records == 5  # fewer than there are
    (tmp_path / "data" / "kept" / "made.json").unlink()  # left unfinished
    assert make(tiny_dataset, tmp_path, "kept").records == 24


def test_two_folders_are_one_dataset(tiny_dataset, tmp_path):
    twice = [tiny_dataset.images] * 2, [tiny_dataset.annotations] * 2
    data = make_data("kept", tmp_path, *twice, samples=24)
    assert (data.records, data.copies) == (24, 1)
    other = json.loads(tiny_dataset.annotations.read_text())
    other["categories"][0]["id"] = 999
    other["annotations"] = []
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(ColabUtilsError, match="expected the same categories"):
        make_data(
            "kept",
            tmp_path,
            twice[0],
            [tiny_dataset.annotations, tmp_path / "other.json"],
            samples=12,
        )


def test_800_keeps_masks_and_boxes_together(tiny_dataset, tmp_path):
    pixels, jpeg = (
        make(tiny_dataset, tmp_path, name, samples=12).open() for name in ("pixels_800", "jpg_800")
    )
    image, target = pixels[3]
    assert image.shape == (3, 800, 1000)
    assert jpeg[3][0].shape == image.shape
    assert 0 < (jpeg[3][0].float() - image.float()).abs().mean() < 4
    assert target["boxes"].tolist() == jpeg[3][1]["boxes"].tolist()
    for mask, box in zip(target["masks"], target["boxes"], strict=True):
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert [abs(float(a) - b) < 16 for a, b in zip(around, box.tolist(), strict=True)] == [
            True
        ] * 4


def test_photos_are_large_and_full_images_are_full(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_data, "PHOTO_PIXELS", 500_000)
    photos = make(tiny_dataset, tmp_path, "photos_12mp", samples=12)
    with Image.open(min(photos.images.iterdir())) as photo:
        width, height = photo.size
    assert width * height == pytest.approx(500_000, rel=0.01)
    assert width / height == pytest.approx(160 / 128, rel=0.01)
    assert photos.open()[0][1]["masks"].any()
    crowded = make(tiny_dataset, tmp_path, "objects_300", samples=12).open()
    target = crowded[0][1]
    assert len(target["boxes"]) == 300
    # a very small one may fall between pixels
    assert target["masks"].flatten(1).any(1).float().mean() > 0.95
    assert len({tuple(box) for box in target["boxes"].tolist()}) > 290
