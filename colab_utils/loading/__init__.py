"""From samples to batches on the device."""

from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader, make_loader

__all__ = ["ArrivingShards", "CocoFolder", "Loader", "PackedBatch", "ShardDataset", "make_loader"]
