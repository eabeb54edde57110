"""Every loader on the same Mask R-CNN work: ours, its peers, and what hand-made code reaches."""
