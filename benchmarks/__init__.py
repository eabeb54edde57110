"""Every loader on the same Mask R-CNN work: ours, its peers, and what hand-made code reaches."""

import colab_utils  # noqa: F401  # before torch: it sets how OpenMP's threads wait
