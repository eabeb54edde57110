"""The dataset as it is on disk: COCO JSON and images, checks, masks."""
