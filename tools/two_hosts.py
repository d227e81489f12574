#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Two hosts lose a disk, a host, the link between them and the right time, and train on as if nothing had happened.

python tools/two_hosts.py [cut_link]

Needs root on Linux (two_hosts_cluster.py builds the hosts). Each scenario runs two ranks and takes a minute or two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from two_hosts_cluster import Cluster, Host, two_hosts

from torchditan.checkpoint.files import latest_checkpoint
from torchditan.checkpoint.loading import read_numbers, read_state
from torchditan.run.reading import read_config, read_metrics, read_status

TRAINER = Path(__file__).resolve().parents[1] / "train.py"
STEPS = 60
TIMEOUT_S = 5
FLAGS = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--model.input_channels=1",
    "--dataset.dataset_name=dummy",
    "--dataset.image_size=8",
    "--dataset.num_classes=10",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=12",
    f"--training.steps={STEPS}",
    "--optimizer.lr=1e-3",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
    "--metrics.experiment_name=run",
    "--checkpoint.enable_checkpoint",
    "--checkpoint.interval=10",
    "--checkpoint.keep_latest_k=2",
    f"--comm.train_timeout_seconds={TIMEOUT_S}",
]
QUICK = "last_call_timeout=2,keep_alive_interval=1"
PATIENCE_S = 240.0
"""How long a scenario waits for one thing: other jobs may share the cores."""


def train_alone(folder: Path) -> Path:
    """The run on one process that nothing happens to."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAINER), *FLAGS, f"--job.dump_folder={folder}"]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return folder / "run"


def launch(host: Host, **variables: str) -> subprocess.Popen[bytes]:
    return host.launch(*FLAGS, f"--job.dump_folder={host.cluster.home / 'shared'}", **variables)


def run_of(cluster: Cluster) -> Path:
    return cluster.shared / "run"


def last_step(cluster: Cluster) -> int:
    records = read_metrics(run_of(cluster))
    return records[-1]["step"] if records else 0


def num_ranks(cluster: Cluster) -> int:
    ranks: int = read_config(run_of(cluster))["hardware"]["device_count"]
    return ranks


def reason_of(cluster: Cluster) -> str | None:
    status = read_status(run_of(cluster)) or {}
    return status["reason"] if status.get("state") == "error" else None


def wait_for(condition: Any, *, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def assert_as_if_nothing_happened(run: Path, reference: Path) -> None:
    """Each step is there once with the same samples and losses, and the final state is the same."""
    records, expected = read_metrics(run), read_metrics(reference)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["images_seen"] for record in records] == [record["images_seen"] for record in expected]
    losses, expected_losses = (torch.tensor([record["loss"] for record in run]) for run in (records, expected))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
    status = read_status(run)
    assert status is not None
    assert (status["state"], status["step"]) == ("completed", STEPS)
    ours, theirs = (latest_checkpoint(folder / "checkpoint") for folder in (run, reference))
    assert ours is not None
    assert theirs is not None
    assert read_numbers(ours)["position"] == read_numbers(theirs)["position"] == 12 * STEPS
    state, expected_state = read_state(ours), read_state(theirs)
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert (state[name] - tensor).abs().max() <= 1e-5 * max(1.0, float(tensor.abs().max())), name


def ends_of(launches: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=PATIENCE_S) for process in launches]


def full_disk_and_lost_host(cluster: Cluster, reference: Path) -> None:
    """They cost a checkpoint and some seconds."""
    one, two = cluster.hosts
    elastic = {"NNODES": "1:2", "MAX_RESTARTS": "1", "RDZV_CONF": QUICK}
    cluster.set_pace(0.04)
    launches = [launch(host, **elastic) for host in cluster.hosts]
    wait_for(lambda: latest_checkpoint(run_of(cluster) / "checkpoint"))
    first = latest_checkpoint(run_of(cluster) / "checkpoint")
    with cluster.full_disk():
        wait_for(lambda: "no checkpoint of step 20: No space left on device" in one.log.read_text())
        assert latest_checkpoint(run_of(cluster) / "checkpoint") == first
    wait_for(lambda: last_step(cluster) > 20)

    launches[1].kill()
    cluster.set_pace(0.3)  # the host must be back before the last step
    wait_for(lambda: num_ranks(cluster) == 1)
    assert "lost rank 1: " in one.log.read_text()
    launches[1] = launch(two, **elastic)
    wait_for(lambda: num_ranks(cluster) == 2)
    cluster.set_pace(None)
    assert ends_of(launches) == [0, 0]
    assert_as_if_nothing_happened(run_of(cluster), reference)


def cut_link(cluster: Cluster, reference: Path) -> None:
    """Each host names the other, and the two fixed hosts wait for each other."""
    cluster.set_pace(0.04)
    fixed = {"NNODES": "2", "MAX_RESTARTS": "1", "RDZV_CONF": f"{QUICK},read_timeout=600"}
    launches = [launch(host, **fixed) for host in cluster.hosts]
    wait_for(lambda: last_step(cluster) > 10)
    cluster.hosts[1].cut()
    wait_for(lambda: reason_of(cluster), seconds=TIMEOUT_S + 30)
    lost = reason_of(cluster)
    assert lost is not None
    assert lost.startswith("lost rank ")
    assert " waited for it in gloo:" in lost
    at = last_step(cluster)
    wait_for(lambda: all("lost rank " in host.log.read_text() for host in cluster.hosts), seconds=60)
    assert last_step(cluster) == at
    assert [process.poll() for process in launches] == [None, None]
    cluster.hosts[1].mend()
    cluster.set_pace(None)
    assert ends_of(launches) == [0, 0]
    assert_as_if_nothing_happened(run_of(cluster), reference)


def wrong_clock(cluster: Cluster, reference: Path) -> None:
    """A host whose clock is an hour behind is left out and changes nothing."""
    cluster.hosts[1].clock_off_s = -3600
    cluster.set_pace(0.02)
    launches = [launch(host, NNODES="1:2", RDZV_CONF=QUICK) for host in cluster.hosts]
    wait_for(lambda: last_step(cluster) > 0)
    assert num_ranks(cluster) == 1
    cluster.set_pace(None)
    assert launches[0].wait(timeout=PATIENCE_S) == 0
    assert_as_if_nothing_happened(run_of(cluster), reference)


SCENARIOS = {
    "full_disk_and_lost_host": (full_disk_and_lost_host, ("one", "two")),
    "cut_link": (cut_link, ("two", "one")),  # torchrun numbers hosts by name: rank 0 is on the host that is cut off
    "wrong_clock": (wrong_clock, ("one", "two")),
}
"""What happens to the hosts, and their names."""


def play(name: str, folder: Path) -> None:
    """Build two hosts in `folder`, let the scenario happen, and compare with an uninterrupted run.

    Raises:
        AssertionError: a host did not behave as promised.
        PermissionError: this machine permits no namespaces.
    """
    happen, names = SCENARIOS[name]
    with two_hosts(folder, names=names) as cluster:
        happen(cluster, train_alone(folder / "reference"))


if __name__ == "__main__":
    for name in sys.argv[1:] or SCENARIOS:
        with tempfile.TemporaryDirectory() as temporary:
            play(name, Path(temporary))
        print(f"{name}: as promised", flush=True)
