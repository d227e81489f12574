# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Launchers of a grid: locally one run at a time, or as Slurm jobs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torchditan.ablation.device import Device, probe
from torchditan.ablation.grid import Run
from torchditan.ablation.ledger import Row
from torchditan.ablation.maker import Maker, Watch
from torchditan.config.errors import ConfigError

SLURM_FOLDER = "slurm"


class Pending(Protocol):
    """A submitted run."""

    def done(self) -> bool: ...

    def result(self) -> Row: ...

    def cancel(self) -> None: ...


class Launcher(Protocol):
    """Submits runs."""

    max_parallel: int

    def submit(self, maker: Maker, run: Run, *, device: Device | None, watch: Watch) -> Pending: ...


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    row: Row

    def done(self) -> bool:
        return True

    def result(self) -> Row:
        return self.row

    def cancel(self) -> None:
        pass


class LocalLauncher:
    """Runs on this machine, one at a time."""

    max_parallel = 1

    def submit(self, maker: Maker, run: Run, *, device: Device | None, watch: Watch) -> Finished:
        assert device is not None, "local runs need a known device"
        return Finished(maker.make(run, device=device, watch=watch))


class SlurmLauncher:
    """Submits each run as a separate job through submitit.

    Args:
        executor: submitit's AutoExecutor, or a replacement in tests.
        parameters: arguments of `update_parameters`, such as the partition. Devices and time are set for each run.
        max_parallel: maximum number of queued and running jobs.
    """

    def __init__(self, executor: Any, *, parameters: dict[str, Any], max_parallel: int) -> None:
        self.executor = executor
        self.parameters = parameters
        self.max_parallel = max_parallel

    def submit(self, maker: Maker, run: Run, *, device: Device | None, watch: Watch) -> Pending:
        minutes = -(-int(maker.timeout_s) // 60) + 5
        own = {"name": run.name, "timeout_min": minutes, "nodes": 1, "tasks_per_node": 1}
        self.executor.update_parameters(**{**own, "gpus_per_node": run.num_devices, **self.parameters})
        try:
            job = self.executor.submit(_make_there, maker, run)
        except Exception as error:
            return Finished(_error_row(maker, run, f"not submitted: {_last_line(error)}"))
        return SlurmJob(job, maker, run)


def _make_there(maker: Maker, run: Run) -> Row:
    """Make a run on a node of the cluster. Its devices are detected there."""
    device = probe()
    refusal = device.refuses(run)
    return maker.skipped_row(run, refusal, device=device) if refusal else maker.make(run, device=device)


class SlurmJob:
    """A submitted job. If the cluster loses the job, its row has the status error."""

    def __init__(self, job: Any, maker: Maker, run: Run) -> None:
        self._job, self._maker, self._run = job, maker, run

    def done(self) -> bool:
        return bool(self._job.done())

    def result(self) -> Row:
        try:
            row: Row = self._job.result()
        except Exception as error:
            # submitit raises various exceptions: the job was preempted, its node failed, or its time limit expired.
            row = _error_row(self._maker, self._run, f"slurm job {self._job.job_id}: {_last_line(error)}")
        return row

    def cancel(self) -> None:
        self._job.cancel()


def _error_row(maker: Maker, run: Run, reason: str) -> Row:
    return {**maker.skipped_row(run, reason, device=None), "status": "error"}


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def slurm_launcher(folder: Path, *, parameters: dict[str, Any], max_parallel: int) -> SlurmLauncher:
    """A launcher for Slurm with logs in `<folder>/slurm/`.

    Raises:
        ConfigError: submitit or Slurm is not installed.
    """
    try:
        submitit = import_module("submitit")
    except ImportError:
        raise ConfigError("--launcher = \"slurm\": needs submitit; pip install 'torchditan[slurm]'") from None
    if shutil.which("sbatch") is None:
        raise ConfigError('--launcher = "slurm": this machine has no sbatch; must be a login node of the cluster')
    return SlurmLauncher(
        submitit.AutoExecutor(folder=folder / SLURM_FOLDER, cluster="slurm"),
        parameters=parameters,
        max_parallel=max_parallel,
    )
