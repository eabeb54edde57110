"""The sizes that a model's transform gives images, known without an image."""

from collections.abc import Iterable, Sequence

from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.data.sizes import fit_size

Size = tuple[int, int]
"""Height and width in pixels."""


def choose_sizes(transform: GeneralizedRCNNTransform, sizes: Sequence[Sequence[int]]) -> list[Size]:
    """The size that a model's transform gives each image; in training random where it has several
    ``min_size``.

    Source: ``GeneralizedRCNNTransform.resize`` of torchvision, with its ``_skip_resize`` and
    ``fixed_size``; the random numbers are the same ones, of torch on the CPU.

    Args:
        transform: of the model, in training or evaluation mode.
        sizes: height and width of each image, as stored.

    Example:
        >>> choose_sizes(GeneralizedRCNNTransform(800, 1333, [0], [1]), [(480, 640)])
        [(800, 1066)]
    """
    if transform.training and transform._skip_resize:
        return [(height, width) for height, width in sizes]
    sides = [*transform.min_size] if transform.training else [transform.min_size[-1]]
    chosen = [transform.torch_choice(sides) if sides[1:] else sides[0] for _ in sizes]
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
        return [(height, width)] * len(sizes)
    longest = transform.max_size
    return [
        fit_size(*size, min_size=float(one), max_size=longest)
        for size, one in zip(sizes, chosen, strict=True)
    ]


def fit_shape(sizes: Iterable[Sequence[int]], *, step: int) -> Size:
    """The shape that a batch of images of these sizes is padded to, as torchvision does it: the
    largest sides, each rounded up to a multiple of ``step``.

    Example:
        >>> fit_shape([(800, 1066), (750, 1000)], step=32)
        (800, 1088)
    """
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    return height, width
