# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Shared by all tests: tiers, processes and threads, and scripts that run in this process or on gloo ranks."""

from __future__ import annotations

import gc
import getpass
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from unittest.mock import Mock

import forked_scripts
import pytest
import tiny_runs
import zoo as zoo_of_runs

if TYPE_CHECKING:
    from torchditan.models.flops import ModelFlops
    from torchditan.models.spec import ModelSpec

# Set before torch is imported: ranks of a multi-process test share few cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Jobs keep compiled code in their dump folder. Those of tests share torch's usual place, so that tests compile less.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")

pytest.register_assert_rewrite("refusals")

REPOSITORY = Path(__file__).resolve().parent.parent

# A shell that starts pytest in the background has it ignore Ctrl-C, and what a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests of ranks and precision compare CPU runs, also on a machine with a GPU; tests/trainer/test_gpu.py is for that.
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}

RunDistributed = Callable[..., "subprocess.CompletedProcess[str]"]
RunAlone = Callable[..., str]


class Outcome(NamedTuple):
    """How a script ended, and all it wrote to stdout and stderr."""

    code: int
    out: str
    err: str


class RunScript(Protocol):
    def __call__(self, script: str, *arguments: object) -> Outcome: ...


Train = Callable[..., Outcome]


MAX_WORKERS = 8  # each holds torch, diffusers and pandas: 1 to 2 GiB


def names_tests(config: pytest.Config) -> bool:
    """Whether the command names single tests: `pytest tests/trainer/test_gpu.py::test_this`."""
    return all("::" in argument for argument in config.args)


def pytest_configure(config: pytest.Config) -> None:
    defaults = config.getini("addopts")
    if names_tests(config) and config.option.markexpr == defaults[defaults.index("-m") + 1]:
        config.option.markexpr = ""  # a test that you name runs, whatever its tier


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process per core. With named tests or `-s`, all in this process: no start-up, output at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1 or names_tests(config) or config.option.capture == "no":
        return 0
    return min(cores, MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # a full collection would visit half a million objects of imported modules


_FLOPS: dict[str, ModelFlops] = {}


def count_flops_once(spec: ModelSpec) -> ModelFlops:
    """`count_model_flops`, once per process for each model: it takes a sixth of a short run."""
    import torch

    from torchditan.models.flops import count_model_flops

    with torch.device("meta"):
        model = spec.build()
        inputs = spec.example_inputs(batch_size=1)
    parameters = {name: (tuple(value.shape), value.requires_grad) for name, value in model.named_parameters()}
    key = f"{model} {parameters} {inputs}"
    if key not in _FLOPS:
        _FLOPS[key] = count_model_flops(spec)
    return _FLOPS[key]


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> RunScript:
    """`run_script("torchditan", "generate", "a run", "--step=7")`: the installed command in this process.

    `run_script("train.py", ...)` is a script of the repository.

    It finds a CPU, one rank and an empty working folder, `tmp_path`.
    """
    import torch
    import torch.distributed as dist

    import torchditan.__main__
    from torchditan import trainer
    from torchditan.run import progress
    from torchditan.supervision import exit_status

    monkeypatch.setattr(exit_status, "gc", Mock())  # the end of a process, which this one does not reach
    monkeypatch.setattr(trainer, "count_model_flops", count_flops_once)
    monkeypatch.setattr(progress, "QUIET_S", 3600.0)  # lines about slow work depend on the load of the machine
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    def run(script: str, *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as stop:
                if script == "torchditan":
                    sys.exit(torchditan.__main__.main())
                runpy.run_path(str(REPOSITORY / script), run_name="__main__")
        finally:
            gc.enable()
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
            if dist.is_initialized():
                dist.destroy_process_group()
        assert isinstance(stop.value.code, int)
        return Outcome(stop.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def train(run_script: RunScript, tmp_path: Path) -> Train:
    """`train("run", "--training.steps=9")`: a run of tiny_runs.py in `tmp_path`, in this process. It has to succeed."""

    def run(name: str, *flags: str) -> Outcome:
        outcome = run_script("train.py", *tiny_runs.job(tmp_path / name, *flags))
        assert outcome.code == 0, outcome.err
        return outcome

    return run


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Processes start at once with `torch.multiprocessing` and the start method "forkserver"."""
    forked_scripts.start_server()


@pytest.fixture(scope="session")
def run_distributed(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> RunDistributed:
    """`run_distributed(["train.py", "--training.steps", "2"], world_size=2)`: a script on gloo ranks.

    Returns the finished process with its output as text; the caller looks at `returncode`. A relative script
    is one of the repository, and "torchditan" the installed command. With `world_size` None it runs as
    `python train.py` does.
    """

    def run(
        script_args: Sequence[str | Path],
        world_size: int | None,
        *,
        timeout: float = 360.0,
        cwd: Path = REPOSITORY,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        script, *rest = map(str, script_args)
        arguments = [script if script == "torchditan" else str(REPOSITORY / script), *rest]
        folders = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(folders).rstrip(os.pathsep)
        env = {**os.environ, **WITHOUT_GPU, "PYTHONPATH": path, **(env or {})}
        output = tmp_path_factory.mktemp("output")
        return forked_scripts.run_forked(arguments, world_size, env=env, cwd=cwd, output=output, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def run_alone(run_distributed: RunDistributed) -> RunAlone:
    """`run_alone("train.py", "--training.steps=2", cwd=folder)`: what a script prints, which has to succeed.

    For fixtures of modules, which cannot use `run_script`; it runs in a process, not as a rank.
    """

    def run(script: str | Path, *arguments: object, cwd: Path = REPOSITORY) -> str:
        finished = run_distributed([script, *map(str, arguments)], None, cwd=cwd)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    return run


@pytest.fixture(scope="session")
def zoo(
    run_alone: RunAlone, run_distributed: RunDistributed, tmp_path_factory: pytest.TempPathFactory
) -> zoo_of_runs.Zoo:
    """`zoo("digits")`: the folder of a trained run of zoo.py, to be read only."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # shared by the processes of one pytest run

    return lambda name: zoo_of_runs.train(name, place / "zoo", run_alone, run_distributed)
