# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Two hosts lose a disk, a host, the link between them and the right time, and train on as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_launch import wait_for
from two_hosts import Cluster, Host, two_hosts

from torchditan.checkpoint.loading import latest_checkpoint, read_numbers, read_state
from torchditan.run.reading import read_config, read_metrics, read_status

pytestmark = pytest.mark.nightly

TRAINER = Path(__file__).resolve().parents[2] / "train.py"
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
"""How long a test waits for one thing: other jobs may share the cores."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("reference")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAINER), *FLAGS, f"--job.dump_folder={folder}"]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return folder / "run"


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two hosts whose names are the parameter of the fixture, or one and two."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(two_hosts(tmp_path, names=getattr(request, "param", ("one", "two"))))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine permits no network namespaces: {error}")
        yield cluster


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


def wait_long(condition: Any) -> None:
    wait_for(condition, seconds=PATIENCE_S)


def assert_as_if_nothing_happened(run: Path, reference: Path) -> None:
    """Each step is there once with the same samples and losses, and the final state is the same."""
    records, expected = read_metrics(run), read_metrics(reference)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record["images_seen"] for record in records] == [record["images_seen"] for record in expected]
    assert [record["loss"] for record in records] == pytest.approx([record["loss"] for record in expected], rel=1e-5)
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


def test_a_full_disk_and_a_lost_host_cost_a_checkpoint_and_some_seconds(cluster: Cluster, reference: Path) -> None:
    one, two = cluster.hosts
    elastic = {"NNODES": "1:2", "MAX_RESTARTS": "1", "RDZV_CONF": QUICK}
    cluster.set_pace(0.04)
    launches = [launch(host, **elastic) for host in cluster.hosts]
    wait_long(lambda: latest_checkpoint(run_of(cluster) / "checkpoint"))
    first = latest_checkpoint(run_of(cluster) / "checkpoint")
    with cluster.full_disk():
        wait_long(lambda: "no checkpoint of step 20: No space left on device" in one.log.read_text())
        assert latest_checkpoint(run_of(cluster) / "checkpoint") == first
    wait_long(lambda: last_step(cluster) > 20)

    launches[1].kill()
    cluster.set_pace(0.3)  # the host must be back before the last step
    wait_long(lambda: num_ranks(cluster) == 1)
    assert "lost rank 1: " in one.log.read_text()
    launches[1] = launch(two, **elastic)
    wait_long(lambda: num_ranks(cluster) == 2)
    cluster.set_pace(None)
    assert ends_of(launches) == [0, 0]
    assert_as_if_nothing_happened(run_of(cluster), reference)


# torchrun numbers hosts by name, so rank 0 is on the host that is cut off.
@pytest.mark.parametrize("cluster", [("two", "one")], indirect=True)
def test_a_cut_link_is_named_and_two_fixed_hosts_wait_for_each_other(cluster: Cluster, reference: Path) -> None:
    cluster.set_pace(0.04)
    fixed = {"NNODES": "2", "MAX_RESTARTS": "1", "RDZV_CONF": f"{QUICK},read_timeout=600"}
    launches = [launch(host, **fixed) for host in cluster.hosts]
    wait_long(lambda: last_step(cluster) > 10)
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


def test_a_host_whose_clock_is_an_hour_behind_is_left_out_and_changes_nothing(
    cluster: Cluster, reference: Path
) -> None:
    cluster.hosts[1].clock_off_s = -3600
    cluster.set_pace(0.02)
    launches = [launch(host, NNODES="1:2", RDZV_CONF=QUICK) for host in cluster.hosts]
    wait_long(lambda: last_step(cluster) > 0)
    assert num_ranks(cluster) == 1
    cluster.set_pace(None)
    assert launches[0].wait(timeout=PATIENCE_S) == 0
    assert_as_if_nothing_happened(run_of(cluster), reference)
