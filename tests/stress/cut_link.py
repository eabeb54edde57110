"""Cut the cable between two hosts that train together: each one names the host that it lost within
a minute, after a checkpoint, and both end.

    python -m tests.stress.cut_link [--folder DIR]

The hosts are two network namespaces with a cable between them, which needs root and iproute2
(apt-get install iproute2). A cut cable closes no connection, so nobody is told. Exits 1 if a host
does not end in time, or does not say why. Without root it says that it is skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.training.checkpoint_folder import CheckpointFolder

HOSTS = ("cut-link-a", "cut-link-b")
CABLES = ("cut-a", "cut-b")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
LIMIT_S = 60.0
# These are the words that each host may end with. The second one cannot reach the store either,
# which lies on the first.
EXPECTED = (
    (f"error: No sign of life came from rank 1 on {HOSTS[1]} for ",),
    (
        f"error: No sign of life came from rank 0 on {HOSTS[0]} for ",
        f"error: The machine of torchrun's store, {ADDRESSES[0]}, was not heard for ",
    ),
)

TRAIN = """
import sys
from colab_utils import train
from tests.tiny_model import TINY_MODEL

shards, run = sys.argv[1:]
train(
    shards,
    run,
    model=TINY_MODEL,
    weights=None,
    min_size=64,
    batch_size=4,
    steps=1_000_000,
    checkpoint_steps=1_000_000,
    device="cpu",
    log=lambda line: print(line, flush=True),
)
"""


def run_command(command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command.split(), check=True, capture_output=True)


def remove_hosts() -> None:
    """Remove the namespaces, and the cable with them."""
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


@contextmanager
def connect_hosts() -> Iterator[None]:
    """Make two hosts with a cable between them."""
    remove_hosts()
    try:
        for host in HOSTS:
            run_command(f"ip netns add {host}")
        run_command(f"ip link add {CABLES[0]} type veth peer name {CABLES[1]}")
        for host, cable, address in zip(HOSTS, CABLES, ADDRESSES, strict=True):
            run_command(f"ip link set {cable} netns {host}")
            run_command(f"ip -n {host} addr add {address}/24 dev {cable}")
            run_command(f"ip -n {host} link set {cable} up")
            run_command(f"ip -n {host} link set lo up")
        yield
    finally:
        remove_hosts()


def start_host(number: int, script: Path, folder: Path) -> subprocess.Popen[str]:
    """Start torchrun on a host with its own name."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        f"--node-rank={number}",
        "--nproc-per-node=1",
        f"--master-addr={ADDRESSES[0]}",
        "--master-port=29556",
        "--",
        str(script),
        str(folder / "shards"),
        str(folder / f"run-{number}"),
    ]
    # The arguments of the shell take the place of "$@".
    rename = f'hostname {HOSTS[number]}; exec "$@"'
    host = ["ip", "netns", "exec", HOSTS[number], "unshare", "--uts", "sh", "-c", rename, "sh"]
    with (folder / f"log-{number}.txt").open("w") as log:
        return subprocess.Popen(
            [*host, *torchrun],
            stdout=log,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": CABLES[number],
            },
        )


def wait_for_text(path: Path, texts: tuple[str, ...], limit_s: float) -> bool:
    """Wait until a file holds one of the texts; return whether it came in time."""
    end_s = time.monotonic() + limit_s
    while not any(text in path.read_text() for text in texts):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


def cut_and_watch(hosts: list[subprocess.Popen[str]], folder: Path) -> list[str]:
    """Cut the cable while both hosts train; return what goes wrong."""
    logs = [folder / f"log-{number}.txt" for number in range(len(hosts))]
    if not wait_for_text(logs[0], ("step 20",), 120):
        return [f"no training: {logs[0].read_text()}{logs[1].read_text()}"]
    run_command(f"ip -n {HOSTS[1]} link set {CABLES[1]} down")
    cut_s = time.monotonic()
    faults = []
    for number, log in enumerate(logs):
        left_s = LIMIT_S - (time.monotonic() - cut_s)
        if not wait_for_text(log, EXPECTED[number], left_s):
            faults.append(f"{HOSTS[number]} does not name the lost host: {log.read_text()}")
        print(f"{HOSTS[number]} was looked at after {time.monotonic() - cut_s:.0f} s")
    for number, (host, log) in enumerate(zip(hosts, logs, strict=True)):
        try:
            host.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            faults.append(f"{HOSTS[number]} does not end: {log.read_text()}")
        print(f"{HOSTS[number]} ended after {time.monotonic() - cut_s:.0f} s")
        if host.returncode == 0:
            faults.append(f"{HOSTS[number]} ends as if nothing was wrong")
    state = CheckpointFolder(folder / "run-0").read()
    if state is None or state["step"] < 20:
        faults.append("no checkpoint of the steps that were done")
    else:
        print(f"the checkpoint is of step {state['step']}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="folder to work in (a temporary one)")
    options = parser.parse_args()
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        print("skipped: two hosts need root, iproute2 and util-linux")
        return 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="cut-link-"))
    data = make_dataset(folder / "data", n=24, width=96, height=80, workers=1)
    write_shards(data.images, data.annotations, shards=folder / "shards")
    script = folder / "train.py"
    script.write_text(TRAIN)
    with connect_hosts():
        hosts = [start_host(number, script, folder) for number in range(2)]
        try:
            faults = cut_and_watch(hosts, folder)
        finally:
            for host in hosts:
                host.kill()
                host.wait()
    for fault in faults:
        print(fault)
    print("failed" if faults else "both hosts named the lost one, saved and ended")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
