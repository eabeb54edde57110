"""Groups of shards: each host copies its own, and any number of hosts loads the same batches."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import pytest
import torch

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.groups import DealtImages, deal_shards
from colab_utils.loading.loader import make_loader
from colab_utils.sample_data import make_dataset
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.loading.test_loader import join_group

GROUPS = 8
BATCH = 16
SLOW = DriveProfile("test", open_s=0.03, bytes_per_s=2e6, source="made up for the test")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards of different sizes, more than groups; some images are tall."""
    folder = tmp_path_factory.mktemp("groups")
    made = make_dataset(
        folder / "data",
        n=101,
        width=64,
        height=48,
        objects=(1, 2),
        workers=1,
    )
    write_shards(
        made.images,
        made.annotations,
        shards=folder / "shards",
        shard_mb=0.02,
        workers=1,
    )
    images = [shard.images for shard in ShardDataset(folder / "shards").index.shards]
    assert len(images) > GROUPS
    assert len(set(images)) > 1
    return folder / "shards"


def load_epochs(loader, epochs=2):
    """The image ids of each batch of each epoch, [] where this process has none."""
    return [
        [[] if batch is None else batch.image_ids.tolist() for batch in loader]
        for _ in range(epochs)
    ]


def make(dataset, **options):
    settings = {
        "batch_size": BATCH,
        "groups": GROUPS,
        "workers": 0,
        "deliver": "packed",
    }
    return make_loader(dataset, **{**settings, **options})


def load_on_hosts(open_host, hosts, local=1, **options):
    """The batches of each epoch, put together from what each process of each host loads."""
    shares = []
    for rank in range(hosts * local):
        with join_group(rank, hosts * local):
            loader = make(open_host(rank // local, hosts), **options)
            shares.append(load_epochs(loader))
            loader.close()
    epochs = []
    for parts in zip(*shares, strict=True):
        assert len({len(part) for part in parts}) == 1
        batches = zip(*parts, strict=True)
        epochs.append([sorted(chain.from_iterable(batch)) for batch in batches])
    return epochs


def test_dealt_groups_hold_all_shards_and_about_as_many_images():
    sizes = np.random.default_rng(3).integers(1, 100, 60).tolist()
    dealt = deal_shards(sizes, groups=GROUPS, seed=0)
    assert sorted(chain.from_iterable(dealt)) == [*range(60)]
    totals = [sum(sizes[number] for number in group) for group in dealt]
    assert max(totals) - min(totals) <= max(sizes)
    assert max(totals) < 1.05 * min(totals)


def test_the_dealing_depends_on_sizes_groups_and_seed_alone():
    sizes = [5] * 40
    first = deal_shards(sizes, groups=4, seed=1)
    assert first == deal_shards(sizes, groups=4, seed=1)
    assert first != deal_shards(sizes, groups=4, seed=2)


def test_empty_shards_are_dealt_evenly():
    dealt = deal_shards([0] * 16, groups=GROUPS, seed=0)
    assert [len(group) for group in dealt] == [2] * GROUPS


def test_the_first_epoch_takes_few_shards_at_first_and_then_four_at_a_time():
    images = DealtImages([[*range(20)]], np.arange(20))
    assert np.bincount(images.window_of).tolist() == [1, 1, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_image_comes_once_an_epoch_and_full_batches_hold_as_many_of_each_group(
    shards, shuffle, drop_last
):
    dataset = ShardDataset(shards)
    images = [shard.images for shard in dataset.index.shards]
    loader = make(dataset, shuffle=shuffle, drop_last=drop_last)
    dealt = deal_shards(images, groups=GROUPS, seed=0)
    group_of_shard = {shard: group for group, shards in enumerate(dealt) for shard in shards}
    group_of = dict(
        zip(
            dataset.image_ids.tolist(),
            [group_of_shard[shard] for shard in dataset.shard_of.tolist()],
            strict=True,
        )
    )
    largest = max(sum(images[shard] for shard in group) for group in dealt)
    share = BATCH // GROUPS
    batches = largest // share if drop_last else -(-largest // share)
    epochs = load_epochs(loader)
    for epoch in epochs:
        assert len(epoch) == len(loader) == batches
        seen = [*chain.from_iterable(epoch)]
        assert len(seen) == len(set(seen))
        if not drop_last:
            assert sorted(seen) == sorted(dataset.image_ids.tolist())
        for batch in epoch:
            counts = np.bincount([group_of[image] for image in batch], minlength=GROUPS)
            assert counts.max() <= share
            if len(batch) == BATCH:
                assert counts.tolist() == [share] * GROUPS
    assert (epochs[0] == epochs[1]) != shuffle


def test_batches_hold_images_of_one_orientation_as_far_as_possible(shards):
    dataset = ShardDataset(shards)
    generator = np.random.default_rng(0)
    dataset.sizes = np.where(generator.random((len(dataset), 1)) < 0.4, [[48, 64]], [[64, 48]])
    wide = dict(
        zip(dataset.image_ids.tolist(), dataset.sizes[:, 1] >= dataset.sizes[:, 0], strict=True)
    )
    pure = 0
    _, epoch = load_epochs(make(dataset))
    assert sorted(chain.from_iterable(epoch)) == sorted(wide)
    for batch in epoch:
        pure += len({wide[image] for image in batch}) == 1
    assert pure > len(epoch) / 2


def test_the_first_epoch_begins_with_the_first_shard_of_each_group(shards):
    dataset = ShardDataset(shards)
    images = [shard.images for shard in dataset.index.shards]
    dealt = deal_shards(images, groups=GROUPS, seed=0)
    firsts = {group[0] for group in dealt}
    seconds = {group[1] for group in dealt}
    shard_of = dict(zip(dataset.image_ids.tolist(), dataset.shard_of.tolist(), strict=True))
    first, second = load_epochs(make(dataset))
    # A shard of one image is too small for its share of the batch.
    assert firsts <= {shard_of[image] for image in first[0]} <= firsts | seconds
    assert not firsts <= {shard_of[image] for image in second[0]}


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"drop_last": True}])
def test_any_number_of_hosts_loads_the_same_batches(shards, options):
    """Also with several processes a host."""

    def open_host(host, hosts):
        return ShardDataset(shards)

    epochs = load_epochs(make(open_host(0, 1), **options))
    alone = [[sorted(batch) for batch in epoch] for epoch in epochs]
    for hosts in (1, 2, 4, 8):
        assert load_on_hosts(open_host, hosts, **options) == alone


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 4), (4, 3), (1, 3)])
def test_hosts_of_several_processes_load_the_same_batches(
    shards, tmp_path, monkeypatch, hosts, local
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    expected = load_on_hosts(lambda host, hosts: ShardDataset(shards), 1)

    def open_host(host, hosts):
        groups = range(host, GROUPS, hosts)
        dataset = ArrivingShards(shards, tmp_path / f"ssd-{host}", groups=groups)
        dataset.wait()
        return dataset

    assert load_on_hosts(open_host, hosts, local) == expected


# The tests below let each host copy its own groups alone.


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_each_host_copies_its_groups_alone(shards, tmp_path, hosts, workers):
    whole = ShardDataset(shards)
    dealt = deal_shards([shard.images for shard in whole.index.shards], groups=GROUPS, seed=0)
    expected = load_on_hosts(lambda host, hosts: whole, 1)
    slow_down(shards, SLOW)

    def open_host(host, hosts):
        groups = range(host, GROUPS, hosts)
        return ArrivingShards(shards, tmp_path / f"ssd-{host}", groups=groups)

    assert load_on_hosts(open_host, hosts, workers=workers) == expected
    for host in range(hosts):
        own = sorted(chain.from_iterable(dealt[host::hosts]))
        ssd = tmp_path / f"ssd-{host}"
        open_host(host, hosts).wait()
        names = {whole.index.shards[number].name for number in own}
        assert {path.name for path in ssd.glob("*.tar")} == names
        assert verify_shards(ssd).bad == ()
        assert len(ShardDataset(ssd)) == sum(whole.index.shards[number].images for number in own)


def test_an_image_of_another_group_is_read_at_its_source(shards, tmp_path):
    whole = ShardDataset(shards)
    dataset = ArrivingShards(shards, tmp_path / "ssd", groups=range(1, GROUPS, 8))
    dataset.wait()
    for index in range(0, len(whole), 9):
        assert torch.equal(dataset[index][0], whole[index][0])


def test_a_complete_copy_stays_complete_beside_groups(shards, tmp_path):
    copy_shards(shards, tmp_path / "ssd")
    ArrivingShards(shards, tmp_path / "ssd", groups=range(1, GROUPS, 2)).wait()
    assert len(ShardDataset(tmp_path / "ssd")) == len(ShardDataset(shards))
    assert not ShardDataset(tmp_path / "ssd").index.partial


@pytest.mark.parametrize("epoch", [0, 1])
def test_fewer_hosts_go_on_with_the_same_batches_after_one_is_lost(shards, tmp_path, epoch):
    """The host that is left copies the other groups, too."""

    def open_host(host, hosts):
        groups = range(host, GROUPS, hosts)
        return ArrivingShards(shards, tmp_path / f"ssd-{host}", groups=groups)

    expected = load_on_hosts(lambda host, hosts: ShardDataset(shards), 1)[epoch]
    seen = 3
    shares = []
    for host in range(2):
        with join_group(host, 2):
            loader = make(open_host(host, 2))
            for _ in range(epoch):
                list(loader)
            batches = iter(loader)
            shares.append([next(batches).image_ids.tolist() for _ in range(seen)])
            state = json.loads(json.dumps(loader.state_dict()))
    assert state["groups"] == GROUPS
    before = [sorted(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)]
    assert before == expected[:seen]
    loader = make(open_host(0, 1))
    loader.load_state_dict(state)
    after = [sorted(batch.image_ids.tolist()) for batch in loader]
    assert after == expected[seen:]


def test_another_batch_size_goes_on_with_the_images_that_are_left(shards):
    dataset = ShardDataset(shards)
    loader = make(dataset)
    batches = iter(loader)
    before = [next(batches).image_ids.tolist() for _ in range(3)]
    again = make(dataset, batch_size=24)
    again.load_state_dict(loader.state_dict())
    after = [batch.image_ids.tolist() for batch in again]
    assert sorted(chain(*before, *after)) == sorted(dataset.image_ids.tolist())


def test_without_groups_the_order_is_that_of_before(shards):
    dataset = ShardDataset(shards)
    plain = make_loader(dataset, batch_size=BATCH, workers=0, deliver="packed")
    assert load_epochs(make(dataset, groups=None)) == load_epochs(plain)
    assert plain.state_dict()["groups"] == 0
    state = plain.state_dict()
    del state["groups"]
    # A state of an older version has no groups.
    plain.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, "groups"),
        ({"groups": 1.5}, "groups"),
        ({"batch_size": 12}, "multiple of 8"),
        ({"groups": 64, "batch_size": 64}, "cannot be dealt to 64 groups"),
        ({"sampler": range(5)}, "A sampler decides the order itself"),
    ],
)
def test_groups_that_do_not_fit_are_refused(shards, options, message):
    with pytest.raises(ColabUtilsError, match=message):
        make(ShardDataset(shards), **options)


def test_groups_of_a_dataset_without_shards_are_refused():
    with pytest.raises(ColabUtilsError, match=r"the dataset has none\. Pass a ShardDataset"):
        make(range(99))


@pytest.mark.parametrize("hosts", [3, 5, 16])
def test_groups_that_hosts_do_not_divide_are_refused(shards, tmp_path, hosts):
    message = f"cannot be divided among {hosts} hosts"
    with join_group(0, hosts), pytest.raises(ColabUtilsError, match=message):
        make(ShardDataset(shards))
    with pytest.raises(ColabUtilsError, match=message):
        ArrivingShards(shards, tmp_path / "ssd", groups=range(0, GROUPS, hosts))
    assert not (tmp_path / "ssd").exists()


def test_hosts_with_unequal_numbers_of_processes_are_refused(shards, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with join_group(0, 3), pytest.raises(ColabUtilsError, match="the same number of processes"):
        make(ShardDataset(shards))


@pytest.mark.parametrize("groups", [4, [0, 2], range(0), range(8, 8, 8), range(3, 8, 2)])
def test_groups_of_a_host_that_are_no_range_are_refused(shards, tmp_path, groups):
    with pytest.raises(ColabUtilsError, match=r"such as range\(host, 8, hosts\)"):
        ArrivingShards(shards, tmp_path / "ssd", groups=groups)
    assert not (tmp_path / "ssd").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": None}, "to 8 and to 0 groups"),
        ({"groups": 4}, "to 8 and to 4 groups"),
        ({"seed": 3}, "the seeds differ"),
        ({}, r"copies the groups range\(1, 8, 2\)\. Open it with groups=range\(0, 8\)"),
    ],
)
def test_a_loader_that_does_not_fit_the_copied_groups_is_refused(
    shards, tmp_path, options, message
):
    dataset = ArrivingShards(shards, tmp_path / "ssd", groups=range(1, GROUPS, 2))
    with pytest.raises(ColabUtilsError, match=message):
        make(dataset, **options)
    dataset.stop()


def test_shards_of_groups_do_not_take_turns(shards, tmp_path):
    with pytest.raises(ColabUtilsError, match="cannot have a limit_gb"):
        ArrivingShards(shards, tmp_path / "ssd", groups=range(8), limit_gb=1)
    assert not (tmp_path / "ssd").exists()


def test_a_state_of_other_groups_is_refused(shards):
    dataset = ShardDataset(shards)
    state = make(dataset).state_dict()
    for groups in (None, 4):
        with pytest.raises(ColabUtilsError, match="'groups': 8"):
            make(dataset, groups=groups).load_state_dict(state)
    with pytest.raises(ColabUtilsError, match="or it was changed"):
        make(dataset).load_state_dict({**state, "batch_size": 12})
