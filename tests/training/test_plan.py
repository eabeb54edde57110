"""What a run says of its plan."""

from __future__ import annotations

from colab_utils.training.memory import MemoryPlan
from colab_utils.training.plan import TrainingPlan

T4_BYTES = 15_000_000_000
L4_BYTES = 22_000_000_000


def make_plan(*, min_size, total_bytes, limit_bytes=None):
    memory = None
    if total_bytes:
        memory = MemoryPlan(
            batch_size=4,
            parts=1,
            peak_bytes=9_000_000,
            limit_bytes=limit_bytes or total_bytes,
            total_bytes=total_bytes,
        )
    return TrainingPlan(
        dataset="fingerprint",
        model="maskrcnn_resnet50_fpn_v2",
        starts_from="coco",
        device="cuda:0",
        precision="float16",
        num_classes=3,
        images=100,
        skipped_images=0,
        objects=700,
        skipped_objects=0,
        batch_size=4,
        min_size=min_size,
        max_size=1333,
        learning_rate=0.005,
        steps=25,
        seed=0,
        memory=memory,
    )


def test_a_large_gpu_that_others_fill_is_not_called_small():
    text = str(make_plan(min_size=800, total_bytes=150_000_000_000, limit_bytes=12_900_000_000))
    assert "takes 9.0 MB of 12.9 GB. The GPU has 150.0 GB: nvidia-smi lists the processes" in text


def test_a_gpu_of_ones_own_has_no_other_processes():
    text = str(make_plan(min_size=800, total_bytes=T4_BYTES, limit_bytes=0.95 * T4_BYTES))
    assert "nvidia-smi" not in text
