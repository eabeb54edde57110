"""What lies in a folder of shards: shards of which data and settings, and whether all are there."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from colab_utils.data.coco import CocoDataset
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.places import Place, open_place
from colab_utils.shards.index import ShardIndex, explain_read, find_index
from colab_utils.shards.jobs import are_still_bad, read_shard_index
from colab_utils.shards.lock import WRITER_NAME


@dataclass(frozen=True)
class FolderState:
    """What `inspect_folder` found in a folder."""

    folder: Place
    index: ShardIndex | None = None
    """The index; None if there are no shards. If no index is written yet, it is that of one shard,
    and ``partial``: its fingerprint and its recipe are those of all shards.
    """
    is_finished: bool = False
    """Whether the index lists all shards of the dataset, and nobody writes into the folder. The
    shards themselves were not looked at.
    """

    @property
    def recipe(self) -> dict[str, Any]:
        """Return the recipe of the shards; {} if there are no shards."""
        return {} if self.index is None else self.index.recipe

    def require(self, dataset: CocoDataset, recipe: dict[str, Any]) -> None:
        """Refuse shards of other data or settings.

        Raises:
            ColabUtilsError: the shards are of another dataset, or made with other settings.
        """
        if self.index is None:
            return
        difference = ""
        if self.index.fingerprint != dataset.fingerprint:
            difference = "of another dataset"
        elif not self.recipe.items() >= recipe.items():
            difference = "made with other settings"
        if difference:
            raise ColabUtilsError(
                f"{self.folder} holds shards {difference}. Name another folder (in a notebook: "
                "DRIVE_FOLDER), or delete these."
            )


def inspect_folder(folder: str | Place) -> FolderState:
    """Look which shards a folder holds, without looking at each of them.

    Raises:
        ColabUtilsError: if the folder cannot be read, it holds tars that no index describes, or its
            index is damaged.

    Example:
        >>> inspect_folder("no/such/folder").recipe
        {}
    """
    folder = open_place(folder)
    store = open_store(folder)
    with explain_read(folder):
        index = find_index(folder)
        if index is not None:
            is_written = bool(store.find_kind(WRITER_NAME))
            return FolderState(folder, index, is_finished=not (index.partial or is_written))
        # The arrays of each shard hold the fingerprint and the recipe of all shards.
        for name in store.list_names("shard-*.arrays"):
            shard = read_shard_index(store, name)
            if shard is not None:
                return FolderState(folder, shard)
        if store.list_names("shard-*.tar"):
            raise ColabUtilsError(f"{folder} holds shards without an index. Name another folder.")
    return FolderState(folder)


def find_common_recipe(folders: Iterable[Place], dataset: CocoDataset) -> dict[str, Any]:
    """Return the recipe that the shards of a dataset have in all these folders; {} if there are no
    shards.

    Raises:
        ColabUtilsError: if a folder holds shards of other data, or of another recipe than the
            folders before it.
    """
    recipe: dict[str, Any] = {}
    for folder in folders:
        state = inspect_folder(folder)
        state.require(dataset, recipe)
        recipe = state.recipe or recipe
    return recipe


def confirm_finished(state: FolderState, images: Place, dataset: CocoDataset) -> ShardIndex | None:
    """Return the index of a folder if nothing is left to do there; else None.

    All files must be there, and no bad image may have been repaired since.
    """
    index = state.index
    if index is None or not state.is_finished:
        return None
    with explain_read(state.folder):
        if not open_store(state.folder).has_files(index.files()):
            return None
    return index if are_still_bad(index, images, dataset) else None
