"""The size that a model's transform resizes an image to, computed without any pixels."""

from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.data.sizes import Size, fit_size


def find_size(transform: GeneralizedRCNNTransform, height: int, width: int) -> Size:
    """Return the height and width that a model's transform resizes an image to in evaluation.

    In training it is the same if the transform has one ``min_size``, as those of
    `build_mask_rcnn` have.

    Source: ``GeneralizedRCNNTransform.resize`` of torchvision.

    Example:
        >>> find_size(GeneralizedRCNNTransform(800, 1333, [0], [1]), 480, 640)
        (800, 1066)
    """
    min_size = transform.min_size[-1]
    return fit_size(height, width, min_size=min_size, max_size=transform.max_size)
