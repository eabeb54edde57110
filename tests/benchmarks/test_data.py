"""The data of the benchmarks: every image several times, under ids of its own."""

import json

from benchmarks.data import make_data


def make(tiny_dataset, work, name, samples=24):
    return make_data(
        name,
        work,
        [tiny_dataset.images],
        [tiny_dataset.annotations],
        samples=samples,
    )


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
