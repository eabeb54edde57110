"""What the tests of this room share: samples that wait or work, and loops over their loaders."""

import multiprocessing
import time
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader, Dataset

from colab_utils.diagnosis.watch import watch
from colab_utils.machine import count_cores


def burn(seconds):
    """Keep a core busy for so many CPU seconds."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


class Samples(Dataset):
    """Numbered samples, each of which is waited for. ``act`` is called with the number first."""

    def __init__(self, count=64, wait_s=0.0, act=None):
        self.count = count
        self.wait_s = wait_s
        self.act = act

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.act:
            self.act(index)
        time.sleep(self.wait_s)
        return torch.zeros(3, 8, 8), index


def collate(samples):
    """Put samples together as the references of torchvision do."""
    return tuple(zip(*samples, strict=True))


def watch_pass(source, **options):
    """Watch a whole pass over a loader, or over a dataset by a DataLoader with these options."""
    watched = watch(DataLoader(source, **options) if options else source)
    list(watched)
    return watched


@contextmanager
def crowd(processes):
    """Keep all cores busy by so many processes for each core."""
    context = multiprocessing.get_context("fork")
    number = processes * count_cores()
    rivals = [context.Process(target=burn, args=(60,), daemon=True) for _ in range(number)]
    for rival in rivals:
        rival.start()
    try:
        yield
    finally:
        for rival in rivals:
            rival.kill()
            rival.join()
