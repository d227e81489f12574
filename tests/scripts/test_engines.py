# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""scripts/skypilot.yaml and trainjob.yaml: the engines accept them, start launch.sh on every machine, and continue
interrupted jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import KEEP, assert_same_state, job

from torchditan.config.loader import load_config
from torchditan.run.reading import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
SKYPILOT = REPOSITORY / "scripts" / "skypilot.yaml"
TRAINJOB = REPOSITORY / "scripts" / "trainjob.yaml"
INTERRUPTED = 75

TORCHRUN = """#!/bin/sh
printf "%s\\n" "$@" > arguments
echo '{"rank": 0, "state": "interrupted", "reason": "step 7", "time": 1}' > "$TORCHDITAN_RANKS_FOLDER/rank-00000.json"
"""


def skypilot() -> tuple[list[str], dict[str, str]]:
    """What the second of two machines runs, and its variables. SkyPilot appends commands to the script."""
    task = yaml.safe_load(SKYPILOT.read_text())
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "first\nsecond"}
    return ["bash", "-c", f"{task['run']}\nexit $?"], {**task["envs"], **variables}


def kubeflow() -> tuple[list[str], dict[str, str]]:
    """The same for Kubeflow."""
    trainer = list(yaml.safe_load_all(TRAINJOB.read_text()))[1]["spec"]["trainer"]
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29500"}
    return [*trainer["command"], *trainer["args"]], variables


@pytest.mark.parametrize("engine", [skypilot, kubeflow])
def test_an_engine_starts_every_machine_and_gets_the_exit_code(tmp_path: Path, engine: Any) -> None:
    (tmp_path / "scripts").symlink_to(SKYPILOT.parent)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(TORCHRUN)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    command, variables = engine()
    path = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "NGPU": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path, **variables}, stderr=subprocess.PIPE)
    assert ended.returncode == INTERRUPTED, ended.stderr
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert {"--nnodes=2", "--rdzv_endpoint=first:29500", "--rdzv_conf=is_host=0"} <= set(arguments)
    config = load_config(arguments[arguments.index(str(tmp_path / "train.py")) + 1 :])
    assert config.checkpoint.enable_checkpoint and config.dataset.root_dir == "/data"


def test_interrupted_jobs_start_again_and_mistakes_do_not() -> None:
    recovery = yaml.safe_load(SKYPILOT.read_text())["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [INTERRUPTED]}
    runtime = next(yaml.safe_load_all(TRAINJOB.read_text()))
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in node["podFailurePolicy"]["rules"][::2]]
    assert rules == [("Ignore", [INTERRUPTED]), ("FailJob", [2, 3])]


@pytest.mark.nightly
def test_skypilot_reads_the_task() -> None:
    """Not an extra: it needs 400 MB and old versions of what others need. The nightly workflow installs it."""
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(SKYPILOT))
    (resources,) = task.resources
    assert resources.use_spot and resources.job_recovery["recover_on_exit_codes"] == [INTERRUPTED]
    assert task.storage_mounts["/outputs"].mode == sky.StorageMode.MOUNT_CACHED


@pytest.mark.nightly
def test_kubeflow_reads_the_job_and_its_runtime() -> None:
    from kubeflow_trainer_api import models

    for resource in yaml.safe_load_all(TRAINJOB.read_text()):
        read = getattr(models, f"TrainerV1alpha1{resource['kind']}").from_dict(resource)
        assert read.to_dict() == resource


def run(parameters: dict) -> None:
    """What the job does. It gets the source of this function only."""
    import subprocess
    import sys
    from pathlib import Path

    process = subprocess.Popen(parameters["command"], cwd=parameters["folder"])
    Path(parameters["pid"]).write_text(str(process.pid))
    sys.exit(process.wait())


@pytest.mark.nightly
def test_a_job_of_kubeflow_that_is_terminated_continues_exactly(tmp_path: Path) -> None:
    """By its local backend: the command of trainjob.yaml in a process, which gets SIGTERM as a pod does."""
    from kubeflow import trainer

    client = trainer.TrainerClient(backend_config=trainer.LocalProcessBackendConfig())
    runtime = client.get_runtime("torch-distributed")
    runtime.trainer.framework = "python"  # the job has torch already; launch.sh calls torchrun
    command, variables = kubeflow()
    variables |= {"PET_NNODES": "1", "PET_NODE_RANK": "0", "NGPU": "2", "OMP_NUM_THREADS": "1"}
    variables |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    variables |= {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), sysconfig.get_path("purelib")])}

    def arguments(run: Path) -> list[str]:
        flags = ["--job.config_file=quickstart", "--dataset.root_dir=none", "--training.steps=40"]
        return [*command, *job(run, *KEEP, *flags)]

    def start() -> str:
        parameters = {"command": arguments(stopped), "folder": str(REPOSITORY), "pid": str(tmp_path / "pid")}
        return client.train(runtime=runtime, trainer=trainer.CustomTrainer(run, func_args=parameters, env=variables))

    def end(name: str, status: str) -> str:
        client.wait_for_job_status(name, status={status}, timeout=300)
        return "\n".join(client.get_job_logs(name))

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    name = start()
    while not (stopped.exists() and len(read_metrics(stopped)) > 3):
        time.sleep(0.1)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    assert f"Completed with code {INTERRUPTED}" in end(name, "Failed")
    assert "40 steps, resumed at step" in end(start(), "Complete")
    subprocess.run(arguments(whole), cwd=REPOSITORY, env=variables, check=True)
    assert_same_state(stopped, whole, step=40)
