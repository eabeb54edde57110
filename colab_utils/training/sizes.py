"""The sizes that a model's transform resizes and pads images to, computed without any pixels."""

from collections.abc import Iterable, Sequence

from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.data.sizes import fit_size

Size = tuple[int, int]
"""Height and width in pixels."""


def choose_sizes(transform: GeneralizedRCNNTransform, sizes: Sequence[Sequence[int]]) -> list[Size]:
    """Choose the size that a model's transform resizes each image to.

    In training the size is random if the transform has several values of ``min_size``. This
    function then draws random numbers as torchvision does, so a seed gives the same sizes.

    Source: ``GeneralizedRCNNTransform.resize`` of torchvision, with ``_skip_resize`` and
    ``fixed_size``.

    Args:
        transform: The transform of the model, in training or evaluation mode.
        sizes: Height and width of each image, as stored.

    Example:
        >>> choose_sizes(GeneralizedRCNNTransform(800, 1333, [0], [1]), [(480, 640)])
        [(800, 1066)]
    """
    if transform.training and transform._skip_resize:
        return [(height, width) for height, width in sizes]
    if transform.training and len(transform.min_size) > 1:
        min_sizes = [transform.torch_choice([*transform.min_size]) for _ in sizes]
    else:
        min_sizes = [transform.min_size[-1]] * len(sizes)
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
        return [(height, width)] * len(sizes)
    return [
        fit_size(height, width, min_size=float(min_size), max_size=transform.max_size)
        for (height, width), min_size in zip(sizes, min_sizes, strict=True)
    ]


def fit_shape(sizes: Iterable[Sequence[int]], *, step: int) -> Size:
    """Return the height and width that torchvision pads a batch of images to.

    They are the largest height and width of the images, rounded up to multiples of ``step``.

    Example:
        >>> fit_shape([(800, 1066), (750, 1000)], step=32)
        (800, 1088)
    """
    heights, widths = zip(*sizes, strict=True)
    return -(-max(heights) // step) * step, -(-max(widths) // step) * step
