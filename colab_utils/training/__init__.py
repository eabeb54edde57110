"""Model, loop, checkpoints and evaluation."""
