"""How photos that EXIF turns are read: by the size in the annotations, by the other photos, or as
the user says.
"""

import json
import os

import numpy as np
import pytest
from PIL import Image

from colab_utils.__main__ import main
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards import plan, write
from colab_utils.show.report import write_check
from tests.coco_files import CocoFiles, count_problems
from tests.pictures import make_exif

pytestmark = pytest.mark.usefixtures("no_fork")

LONG = 96
SHORT = 64
HALF_TURNS = (2, 3, 4)
QUARTER_TURNS = (5, 6, 7, 8)
# EXIF says how to come from the stored photo to the upright one. These turns undo it.
BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


class Photos(CocoFiles):
    """A folder of photos with one bright object each, whose outline is drawn on the photo as it is
    shown, or as it is stored.
    """

    def add(self, orientation, *, upright=True, square=False, sized=True, kind="jpg"):
        number = len(self.objects) + 1
        pixels = np.zeros((LONG, LONG if square else SHORT, 3), np.uint8)
        pixels[56:88, 8:40] = 255
        shown = Image.fromarray(pixels)
        stored = shown.transpose(BACK[orientation]) if orientation in BACK else shown
        name = f"{number}.{kind}"
        entry = self.add_image(stored, name, exif=make_exif(orientation), quality=95)
        labelled = shown if upright else stored
        entry.update(width=labelled.width, height=labelled.height)
        if not sized:
            del entry["width"], entry["height"]
        left, top, right, bottom = labelled.getbbox()
        self.add_object(number, [left, top, right - left, bottom - top])

    def read_recipe(self):
        return json.loads((self.shards / "index.json").read_text())["recipe"]


@pytest.fixture
def photos(tmp_path):
    return Photos(tmp_path)


def fits(sample):
    """Return whether the mask lies on the object, and nowhere else."""
    image, target = sample
    inside = target["masks"][0].bool()
    pixels = image.float().mean(0)
    return bool(pixels[inside].mean() > 240 and pixels[~inside].mean() < 15)


def list_fits(dataset):
    order = np.argsort(dataset.image_ids).tolist()
    return [fits(dataset[i]) for i in order]


KINDS = {
    "half turns": [{"orientation": tag} for tag in HALF_TURNS],
    "square photos": [{"orientation": tag, "square": True} for tag in range(2, 9)],
    "no size": [{"orientation": tag, "sized": False} for tag in range(2, 9)],
    "PNG": [{"orientation": tag, "kind": "png"} for tag in HALF_TURNS],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("upright", [True, False])
def test_photos_that_can_tell_decide_for_those_that_cannot(photos, kind, upright):
    for tag in (1, *QUARTER_TURNS):
        photos.add(tag, upright=upright)
    for photo in KINDS[kind]:
        photos.add(**photo, upright=upright)
    used, exif = ("turned", "turn") if upright else ("used as stored", "keep")
    match = f"They are {used}, as the other photos"
    with pytest.warns(ColabUtilsWarning, match=match) as warned:
        report = photos.write()
    assert photos.read_recipe()["exif"] == exif
    assert report.images == 5 + len(KINDS[kind])
    assert all(list_fits(ShardDataset(photos.shards)))
    loose = photos.open()
    with pytest.warns(ColabUtilsWarning, match=match) as warned_by_loose:
        assert all(list_fits(loose))
    assert (len(warned), len(warned_by_loose)) == (1, 1)
    checked = photos.check()
    assert checked.ok
    assert (checked.exif, checked.unclear) == (exif, ())
    expected = "EXIF rotation, turned" if upright else "EXIF rotation, kept"
    assert count_problems(checked)[expected] == len(KINDS[kind])


DISAGREE = [(6, True), (8, False), (3, True), (3, False)]
NONE_TELLS = [(1, True), (3, True), (3, False), (2, True)]


@pytest.mark.parametrize("set_of", [DISAGREE, NONE_TELLS])
def test_where_nothing_decides_photos_stay_as_stored_and_check_calls_it(photos, tmp_path, set_of):
    for tag, upright in set_of:
        photos.add(tag, upright=upright)
    unclear = sum(tag in HALF_TURNS for tag, _ in set_of)
    right = [not upright or tag not in HALF_TURNS for tag, upright in set_of]
    with pytest.warns(ColabUtilsWarning, match=r"used as stored, because .* choose exif \(--exif"):
        report = photos.write()
    assert report.faults == {"EXIF rotation, unclear": unclear}
    assert photos.read_recipe()["exif"] == "keep"
    assert list_fits(ShardDataset(photos.shards)) == right
    with pytest.warns(ColabUtilsWarning, match="used as stored, because"):
        assert list_fits(photos.open()) == right
    checked = photos.check()
    assert checked.ok
    assert count_problems(checked) == {"EXIF rotation, unclear": unclear}
    assert len(checked.unclear) == 2
    page = write_check(checked, photos.images, photos.annotations, tmp_path / "check.html")
    text = page.read_text()
    for number in checked.unclear:
        for way in ("keep", "turn"):
            assert f"{number}.jpg\n--exif {way}" in text


@pytest.mark.parametrize("exif", ["turn", "keep"])
def test_an_argument_decides_for_photos_whose_size_does_not_tell_alone(photos, exif):
    upright = exif == "turn"
    # The sizes of these two decide, whatever the argument says.
    photos.add(6, upright=not upright)
    photos.add(7, upright=upright)
    for tag in HALF_TURNS:
        photos.add(tag, upright=upright)
    photos.add(8, square=True, upright=upright)
    photos.write(exif=exif)
    assert photos.read_recipe()["exif"] == exif
    assert all(list_fits(ShardDataset(photos.shards)))
    assert all(list_fits(photos.open(exif=exif)))
    checked = photos.check(exif=exif)
    assert checked.ok
    assert (checked.exif, checked.unclear) == (exif, ())
    # A call without the argument goes on by the recipe. Another argument is refused.
    assert photos.write().images == 6
    with pytest.raises(ColabUtilsError, match="made with other settings"):
        photos.write(exif="keep" if exif == "turn" else "turn")


def test_an_older_folder_goes_on_by_its_own_recipe(photos, monkeypatch):
    for tag in (6, 3, 8, 3, 3, 3):
        photos.add(tag)
    # Versions before this one wrote no ``exif``.
    monkeypatch.setattr(plan, "choose_turn", lambda *_, **options: "keep")

    real = plan.plan_recipe

    def plan_without(*arguments):
        recipe = real(*arguments)
        del recipe["exif"]
        return recipe

    monkeypatch.setattr(write, "plan_recipe", plan_without)
    photos.write(shard_mb=0.001)
    monkeypatch.undo()
    assert "exif" not in photos.read_recipe()
    shards = photos.shards
    before = {path.name: path.read_bytes() for path in shards.iterdir()}
    tars = sorted(shards.glob("shard-*.tar"))
    assert len(tars) > 1
    for path in (tars[-1], tars[-1].with_suffix(".arrays"), shards / "index.json"):
        os.unlink(path)
    photos.write(shard_mb=0.001)
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == before


def test_photos_without_a_turn_say_nothing_and_a_wrong_word_is_refused(photos):
    photos.add(1)
    photos.add(6)
    photos.write()
    assert photos.read_recipe()["exif"] == "turn"
    assert all(list_fits(photos.open()))
    assert photos.check().problems == ()
    for call in (photos.open, photos.check, photos.write):
        with pytest.raises(ColabUtilsError, match="exif must be one of auto, turn, keep"):
            call(exif="upright")


@pytest.mark.parametrize("orientation", [6, 8])
def test_a_tiff_that_pillow_turns_has_its_size_as_turned(photos, orientation):
    for upright in (True, False):
        photos.add(orientation, upright=upright, kind="tif")
    # Check says what reading does.
    [problem] = photos.check().problems
    assert (problem.kind, problem.count) == ("size mismatch", 1)
    assert problem.examples[0].endswith("the file has 64 x 96")
    dataset = photos.open()
    assert fits(dataset[0])
    with pytest.raises(ColabUtilsError, match="the annotations say 96 x 64"):
        dataset[1]


def test_the_commands_take_the_argument(photos, tmp_path, capsys):
    for tag in (3, 2, 1):
        photos.add(tag)
    photos.save()
    data = ["--images", str(photos.images), "--annotations", str(photos.annotations)]
    repaired = ["check", *data, "--exif", "turn", "--repair", str(tmp_path / "new.json")]
    assert main(repaired) == 0
    assert "EXIF rotation, turned" in capsys.readouterr().out
    assert main(["preprocess", *data, "--shards", str(photos.shards), "--exif", "turn"]) == 0
    assert photos.read_recipe()["exif"] == "turn"
    assert all(list_fits(ShardDataset(photos.shards)))


def test_damaged_and_missing_photos_tell_nothing(photos):
    for tag in (6, 6, 6, 3):
        photos.add(tag)
    (photos.images / "1.jpg").unlink()
    (photos.images / "2.jpg").write_bytes(b"\xff\xd8\xff\xe1nothing")
    with pytest.warns(ColabUtilsWarning, match="They are turned"):
        report = photos.write(max_bad=2)
    assert report.images == 2
    assert all(list_fits(ShardDataset(photos.shards)))
