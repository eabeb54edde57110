"""The kinds of cases: each changes something, calls the package's own entry points, and compares
what comes out.
"""

from __future__ import annotations

from tests.fuzz import datasets, mutate, shards
from tests.fuzz.pool import Kinds

_IMAGES = ["0.jpg", "sub/1.png", "2.tif", "3.png"]
# A weight says how many of some hundred cases are of a kind.
KINDS: Kinds = {
    "json_bytes": (7, datasets.json_bytes),
    "json_tree": (9, datasets.json_tree),
    "json_field": (12, datasets.json_field),
    "json_ids": (2, datasets.json_ids),
    "image_bytes": (8, datasets.image_kind(_IMAGES, mutate.change_bytes)),
    "image_png": (4, datasets.image_kind(["sub/1.png", "3.png"], mutate.change_png)),
    "image_jpeg": (4, datasets.image_kind(["0.jpg"], mutate.change_jpeg)),
    "image_odd": (3, datasets.image_odd),
    "zip_bytes": (4, datasets.zip_bytes),
    "zip_members": (5, datasets.zip_members),
    "shard_bytes": (9, shards.shard_kind(shards.damage)),
    "shard_twin": (5, shards.shard_kind(shards.make_twin)),
    "shard_swap": (4, shards.shard_kind(shards.swap)),
    "index": (9, shards.shard_kind(shards.change_index)),
}
