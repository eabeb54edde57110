"""Bring a dataset into a folder: download or unpack a zip, or convert masks from image files."""

from colab_utils.data.archives import is_archive, unpack_dataset
from colab_utils.data.mask_files import convert_masks

__all__ = ["convert_masks", "is_archive", "unpack_dataset"]
