# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Every run gets its status and the grid a complete ledger: after crashes, hangs, kills and with a second runner.

Most tests make their runs in this process (jobs_here.py).
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from jobs_here import CPU

from torchditan.errors import ConfigError
from torchditan.extras.ablation import launch, maker, runner
from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import Grid, load_grid
from torchditan.extras.ablation.launch import Job, Launcher, LocalLauncher, SlurmLauncher, execute, judge, processes_of
from torchditan.extras.ablation.ledger import read_ledger
from torchditan.extras.ablation.runner import GridFolder, run_grid
from torchditan.supervision.exit_status import verdict_of
from torchditan.supervision.rank_status import RANKS_VARIABLE

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[3]
TIMINGS = ("start_up_s", "elapsed_s", "started")
Table = list[dict[str, Any]]
RunHere = Callable[..., Table]


def small_grid(**axes: list[Any]) -> Grid:
    """Two ranks, four steps; batches 8 and 16 unless told otherwise."""
    grid = load_grid("debug", overrides={"steps": 4, "window": 2, "timeout_s": 30})
    standard = {"parallel": ["1,2"], "model.flavor": ["debugmodel"], "precision": ["float32"]}
    standard |= {"training.batch_size": [8, 16], "model.patch_size": [2]}
    return replace(grid, name="g", axes={**standard, **axes}, exclude=[])


def statuses(rows: Table) -> list[tuple[int, str]]:
    return [(row["training.batch_size"], row["status"]) for row in rows]


def without_timings(rows: Table) -> Table:
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]


def test_a_row_holds_what_the_window_measured(run_here: RunHere, tmp_path: Path) -> None:
    first, second = run_here(small_grid())
    assert first["run_name"] == "debugmodel_bs8_ps2_actnone_cfalse_dfloat32_p1,2"
    assert (first["status"], first["reason"], first["num_devices"], first["repeat"]) == ("completed", None, 2, 1)
    assert (first["step_time_s_mean"], first["step_time_s_std"]) == (0.5, 0.0), "step 1 took 5 s and is in no window"
    assert first["images_per_second_mean"] == 8 * 2 / 0.5
    assert first["images_per_second_per_device_mean"] == 8 / 0.5
    assert first["tflops_per_device_mean"] == 2.0 and first.get("mfu_mean") is None
    assert (first["loss_last"], first["loss_mean"]) == (1 / 4, (1 / 3 + 1 / 4) / 2)
    assert first["compile_s"] == 4.5
    assert first["peak_memory_gib"] == 8 / 8 + 1, "rank 1 took more than rank 0, which wrote the metrics"
    assert first["start_up_s"] > 0 and first["elapsed_s"] == 1
    made_by = [first[name] for name in ("git_commit", "torch_version", "device", "host")]
    assert made_by == ["abc", "2", "a CPU", "here"]
    assert second["images_per_second_mean"] == 2 * first["images_per_second_mean"]
    assert read_ledger(tmp_path / "outputs" / "g", axes=small_grid().columns) == [first, second]


def test_out_of_memory_on_any_rank_skips_the_larger_batches_of_that_cell_alone(run_here: RunHere) -> None:
    grid = small_grid(**{"training.compile": [False, True], "training.batch_size": [16, 32, 64, 128]})
    rows = run_here(replace(grid, exclude=[{"training.compile": True, "training.batch_size": [64, 128]}]))
    assert statuses(rows[:4]) == [(16, "completed"), (32, "oom"), (64, "skipped"), (128, "skipped")]
    assert rows[1]["reason"] == "rank 1: no memory for a batch of 32"
    assert rows[2]["reason"] == "training.batch_size 32 of this cell ran out of memory"
    assert statuses(rows[4:]) == [(16, "completed"), (32, "oom")], "the other cell is tried"
    assert all(row.get("images_per_second_mean") is None for row in rows if row["status"] != "completed")


def test_a_float8_cell_is_skipped_where_the_device_has_none(run_here: RunHere) -> None:
    rows = run_here(small_grid(precision=["float32", "bfloat16_f8"]))
    assert [row["status"] for row in rows] == ["completed"] * 2 + ["skipped"] * 2
    assert rows[2]["reason"] == CPU.no_float8
    assert rows[2]["precision"] == "bfloat16_f8"


def test_an_axis_that_no_run_can_honour_here_is_refused_before_anything_is_written(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^g: .*run can .*made .*float8\.enable_float8_linear = true"):
        run_here(small_grid(precision=["bfloat16_f8"]))
    monkeypatch.setattr(Device, "here", lambda: replace(CPU, type="cuda", count=2))
    with pytest.raises(ConfigError, match=r"parallel 1,8 .*8 devices, .*machine .*2$"):
        run_here(small_grid(parallel=["1,8"]))
    assert not (tmp_path / "outputs").exists()


def test_the_same_command_again_makes_only_what_is_missing_or_failed(run_here: RunHere) -> None:
    grid = small_grid(**{"model.patch_size": [2, 4], "training.batch_size": [8, 32, 64]})
    first = run_here(grid)
    again = run_here(grid)
    assert [row["status"] for row in first] == ["completed", "oom", "skipped", "error", "oom", "skipped"]
    assert without_timings(again) == without_timings(first)
    started = {row["run_name"]: row["start_up_s"] for row in first}
    made = [row["run_name"] for row in again if row["start_up_s"] != started[row["run_name"]]]
    assert made == [first[3]["run_name"]], "the error alone; oom and skipped stay"


def test_further_seeds_are_added_to_the_grid_and_share_what_ran_out_of_memory(run_here: RunHere) -> None:
    axes = {"training.batch_size": [8, 32, 64], "training.seed": [0]}
    first = run_here(small_grid(**axes))
    assert [row["status"] for row in first] == ["completed", "oom", "skipped"]
    more = run_here(small_grid(**{**axes, "training.seed": [0, 1]}))
    assert [(row["training.seed"], row["status"]) for row in more[3:]] == [
        (1, "completed"), (1, "oom"), (1, "skipped")
    ]  # fmt: skip
    assert [row["start_up_s"] for row in more[:2]] == [row["start_up_s"] for row in first[:2]], "not made again"
    assert more[3]["run_name"] == first[0]["run_name"].replace("seed-0", "seed-1")


def test_a_grown_grid_goes_on_in_its_folder_and_another_grid_is_refused(run_here: RunHere, tmp_path: Path) -> None:
    first = run_here(small_grid())
    grown = run_here(small_grid(**{"training.batch_size": [4, 8, 16]}))
    assert [row["training.batch_size"] for row in grown] == [4, 8, 16]
    assert [row["start_up_s"] for row in grown[1:]] == [row["start_up_s"] for row in first]
    shrunk = run_here(small_grid(**{"training.batch_size": [16]}))
    assert len(shrunk) == 1
    assert len(read_ledger(tmp_path / "outputs" / "g", axes=list(small_grid().axes))) == 3, "no row is lost"
    with pytest.raises(ConfigError, match=r"g .*another grid: steps .*4 .*5 .*name .*new folder"):
        run_here(replace(small_grid(), steps=5))
    with pytest.raises(ConfigError, match=r"another grid: axes .*\[.*\] .*\[.*optimizer.lr.*\]"):
        run_here(small_grid(**{"optimizer.lr": [1e-4]}))
    base = tmp_path / "base.toml"
    for rate in ("1e-3", "2e-3"):
        base.write_text(f'[dataset]\ndataset_name = "dummy"\n[optimizer]\nlr = {rate}\n')
        folder = GridFolder(tmp_path / "of_base", replace(small_grid(), base=str(base)), log_folder="logs")
        other = pytest.raises(ConfigError, match=r"another grid: optimizer.lr of the base is 0\.001 there and 0\.002")
        with other if rate == "2e-3" else nullcontext(), folder.hold():
            pass


def test_a_grid_of_single_changes_keeps_its_baseline(run_here: RunHere) -> None:
    """Its runs are named by what they change: with another baseline, the old runs would pass for the new ones."""

    def grid(values: list[str], *, one_at_a_time: bool = True) -> Grid:
        axes: dict[str, list[Any]] = {"training.batch_size": [8], "training.seed": [0], "model.mlp": values}
        return replace(small_grid(**axes), one_at_a_time=one_at_a_time)

    assert [row["model.mlp"] for row in run_here(grid(["gelu", "swiglu"]))] == ["gelu", "swiglu"]
    with pytest.raises(ConfigError, match=r"another grid: the first value of model\.mlp is .gelu. there and .swiglu"):
        run_here(grid(["swiglu", "gelu"]))
    with pytest.raises(ConfigError, match="another grid: one_at_a_time is true there and false here"):
        run_here(grid(["gelu", "swiglu"], one_at_a_time=False))
    more = replace(grid(["gelu", "swiglu"]), axes={**grid(["gelu", "swiglu"]).axes, "training.seed": [1, 0]})
    assert len(run_here(more)) == 4, "further seeds in any order"


def test_a_folder_that_is_no_grid_is_refused_and_left_alone(run_here: RunHere, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "g"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"g .*grid folder .*grid\.json.*; name another .*--name$"):
        run_here(small_grid())
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


RUNNER = """
import io, sys
from pathlib import Path
from jobs_here import CPU
from test_runner import grid_of_kills
from torchditan.errors import ConfigError
from torchditan.extras.ablation import launch, runner
from torchditan.extras.ablation.device import Device
launch.TORCHRUN = (sys.executable, "-c", "import time; time.sleep(60)")
Device.here = lambda: CPU
path = Path(sys.argv[1])
try:
    runner.run_grid(grid_of_kills(), path=path, launcher=launch.LocalLauncher(path), stream=io.StringIO())
except ConfigError as error:
    sys.exit(f"error: {error}")
"""


def grid_of_kills() -> Grid:
    return small_grid(**{"model.patch_size": [2, 4], "training.batch_size": [8, 32, 64]})


def start_runner(folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(str(REPOSITORY / place) for place in ("", "tests", "tests/extras/ablation"))
    command = [sys.executable, "-c", RUNNER, str(folder)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)


def test_a_second_runner_is_refused_and_a_killed_one_leaves_no_process_and_goes_on(
    run_here: RunHere, tmp_path: Path
) -> None:
    undisturbed = without_timings(run_here(grid_of_kills()))
    folder = tmp_path / "outputs" / "g"
    folder.rename(tmp_path / "undisturbed")
    first = start_runner(folder)
    ranks = folder / "runs" / undisturbed[0]["run_name"] / "ranks"
    while not processes_of(ranks):
        assert first.poll() is None
        time.sleep(0.02)
    second = start_runner(folder)
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 1
    assert errors.startswith(f"error: {folder} is in use by runner PID {first.pid} on ")
    assert errors.endswith("; wait for it, or name a new folder with --name\n")
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while processes_of(ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(ranks), "the launcher dies with its runner"
    assert without_timings(run_here(grid_of_kills())) == undisturbed


class StandInExecutor:
    """submitit's AutoExecutor, which runs a job in this process when it is asked for the result."""

    lost = refused = ""
    submitted: list[dict[str, Any]]

    def __init__(self, *, folder: Path, cluster: str) -> None:
        assert (folder.name, cluster) == ("slurm", "slurm")
        self.parameters: dict[str, Any] = {}
        self.submitted = []

    def update_parameters(self, **parameters: Any) -> None:
        self.parameters |= parameters

    def submit(self, function: Callable[[], Any]) -> StandInJob:
        self.submitted.append(dict(self.parameters))
        if self.parameters["name"] == self.refused:
            raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        pickle.dumps(function)
        return StandInJob(function, is_lost=self.parameters["name"] == self.lost)


class StandInJob:
    job_id = "7_0"

    def __init__(self, work: Callable[[], Any], *, is_lost: bool) -> None:
        self.work, self.is_lost = work, is_lost

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass

    def result(self) -> Any:
        if self.is_lost:
            raise RuntimeError("Job (task=0) failed during processing\nNODE_FAIL")
        return self.work()


def test_slurm_gets_a_job_per_run_with_its_devices_and_a_lost_job_is_an_error(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submitit = ModuleType("submitit")
    submitit.AutoExecutor = StandInExecutor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", submitit)
    grid = small_grid(**{"parallel": ["1,2", "2,1"], "training.batch_size": [8, 32, 64]})
    launcher = SlurmLauncher(tmp_path / "g", parameters={"slurm_partition": "gpu"}, max_parallel=4)
    launcher.executor.lost = "debugmodel_bs8_ps2_actnone_cfalse_dfloat32_p2,1"
    launcher.executor.refused = "debugmodel_bs64_ps2_actnone_cfalse_dfloat32_p2,1"
    rows = run_here(replace(grid, exclude=[{"parallel": "2,1", "training.batch_size": 32}]), launcher=launcher)
    found = [(8, "completed"), (32, "oom"), (64, "skipped"), (8, "error"), (64, "error")]
    assert statuses(rows) == found
    assert rows[3]["reason"] == "job 7_0: NODE_FAIL"
    assert rows[4]["reason"] == "not submitted: sbatch: error: QOSMaxSubmitJobPerUserLimit"
    submitted = launcher.executor.submitted
    assert [parameters["name"] for parameters in submitted] == [rows[at]["run_name"] for at in (0, 3, 1, 4)]
    wanted = {"gpus_per_node": 2, "nodes": 1, "tasks_per_node": 1, "slurm_partition": "gpu", "timeout_min": 6}
    assert all(parameters.items() >= wanted.items() for parameters in submitted)


class TwoAtATime(Launcher):
    """As in docs/extending.md, but in threads, which see what the fixtures replaced."""

    log_folder = "logs"

    def __init__(self, folder: Path, *, parameters: Any, max_parallel: int) -> None:
        super().__init__(folder, parameters=parameters, max_parallel=2)
        self.pool = ThreadPoolExecutor(2)

    def submit(self, work: Callable[[], Any], **resources: Any) -> Any:
        return self.pool.submit(work)


def test_a_launcher_of_ones_own_makes_two_runs_at_a_time_beside_its_log_folder(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    (tmp_path / "outputs" / "g" / "logs").mkdir(parents=True)
    rows = run_here(small_grid(parallel=["1,2", "2,1"]), launcher=TwoAtATime(tmp_path, parameters={}, max_parallel=16))
    assert statuses(rows) == [(8, "completed"), (16, "completed")] * 2


def test_slurm_without_submitit_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"needs submitit; pip install 'torchditan\[slurm\]'$"):
        SlurmLauncher(tmp_path, parameters={}, max_parallel=1)


def rank(number: int, state: str, reason: str | None = None, *, at: float = 0.0, pid: int = 1) -> dict[str, Any]:
    return {"rank": number, "state": state, "reason": reason, "time": at, "pid": pid}


@pytest.mark.parametrize(
    ("ranks", "exit_code", "log", "verdict"),
    [
        ([rank(0, "completed"), rank(1, "completed")], 0, "", ("completed", None)),
        ([rank(0, "error", "lost", at=1), rank(1, "oom", "full", at=2)], 1, "", ("oom", "rank 1: full")),
        ([rank(0, "running"), rank(1, "error", "bug")], None, "", ("error", "rank 1: bug")),
        (
            [rank(0, "running"), rank(1, "completed")],
            None,
            "",
            ("timeout", "not finished after 9 s: 0 step(s) done, rank(s) 0 unfinished"),
        ),
        (
            [],
            1,
            "Traceback\nModuleNotFoundError: No module named 'x'\n  bye\n",
            ("error", "rank(s) 0, 1 exited without reporting an error: ModuleNotFoundError: No module named 'x'"),
        ),
        (
            [rank(0, "error", "RuntimeError: Connection closed by peer"), rank(1, "running", pid=77)],
            1,
            "traceback : Signal 9 (SIGKILL) received by PID 77",
            ("error", "rank 1: ended by SIGKILL, as by the system when memory ran out"),
        ),
        (
            [rank(0, "error", "a bug"), rank(1, "running", pid=77)],
            1,
            "traceback : Signal 9 (SIGKILL) received by PID 77",
            ("error", "rank 0: a bug"),
        ),
    ],
)
def test_the_verdict_of_the_ranks(
    ranks: list[dict[str, Any]], exit_code: int | None, log: str, verdict: tuple[str, str | None], tmp_path: Path
) -> None:
    job = Job((), tmp_path, num_ranks=2, timeout_s=9)
    assert judge(job, ranks, exit_code=exit_code, log=log) == verdict


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("print('done')", ("completed", None)),
        ("print('before'); raise ValueError('no kernel')", ("error", "exit code 1: ValueError: no kernel")),
        ("import os; os.kill(os.getpid(), 9)", ("error", "SIGKILL: no output")),
        (
            "import subprocess, sys; subprocess.run(['sleep', '60'])",
            ("timeout", "not finished after 1 s: 0 step(s) done, rank(s) 0 unfinished"),
        ),
    ],
)
def test_the_verdict_of_a_program_that_reports_nothing(code: str, verdict: tuple[str, str], tmp_path: Path) -> None:
    job = Job(("-c", code), tmp_path / "job", timeout_s=1 if verdict[0] == "timeout" else 60)
    outcome = execute(job)
    assert (outcome.status, outcome.reason) == verdict
    assert processes_of(job.ranks) == []


def test_what_onednn_says_without_memory_is_an_error_unless_memory_was_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RuntimeError("could not create a primitive")
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert verdict_of(failure).status == "error"
    monkeypatch.setattr("resource.getrlimit", lambda _: (1 << 30, 1 << 30))
    assert verdict_of(failure).status == "oom"
    assert verdict_of(RuntimeError("a bug")).status == "error"


def test_another_process_with_a_recorded_id_is_not_touched(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / "rank-00000.json").write_text(json.dumps(rank(0, "running", pid=stranger.pid)))
        assert processes_of(tmp_path) == []
    finally:
        stranger.kill()
        stranger.wait()


def test_a_launch_inherits_nothing_of_an_outer_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    for name in (*outer, "ROLE_NAME", "TORCHELASTIC_RUN_ID", "MY_RANK"):
        monkeypatch.setenv(name, "1")
    made = Job((), tmp_path).environment()
    assert not {*outer, "ROLE_NAME", "TORCHELASTIC_RUN_ID"} & made.keys()
    assert made["MY_RANK"] == "1"
    assert made[RANKS_VARIABLE] == str(tmp_path / "ranks")


def test_a_real_grid_has_a_ledger_and_a_report(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    grid, path = small_grid(parallel=["1,1"], **{"training.batch_size": [8]}), tmp_path / "g"
    (row,) = run_grid(grid, path=path, launcher=LocalLauncher(path), stream=io.StringIO())
    assert row["status"] == "completed", row["reason"]
    assert row["images_per_second_mean"] > 0 and math.isfinite(row["loss_last"]) and row["start_up_s"] > 0
    assert read_ledger(path, axes=grid.columns) == [row]
    assert run_script("optimization_analysis.py", path).code == 0
    assert "debugmodel" in (path / "analysis" / "report.html").read_text()


FAULTS = """
import os, runpy, sys, time
from torchditan.periodic_tasks import PeriodicTasks
log = PeriodicTasks.log
def faulty(self, result):
    log(self, result)
    step = self.progress.step
    patch = self.config.model.patch_size
    if patch == 4 and step == 3 and self.rank.rank == 1:
        raise RuntimeError("a crash on rank 1")
    if patch == 8 and step == 3 and self.rank.rank == 0:
        time.sleep(600)
PeriodicTasks.log = faulty
sys.argv[0] = os.environ["TRAIN"]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
def test_real_runs_that_run_out_of_memory_crash_and_hang_leave_the_other_rows_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.setenv("TRAIN", str(REPOSITORY / "train.py"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    grid = small_grid(**{"model.patch_size": [2, 4], "training.batch_size": [8, 8192]})
    exclude = [{"model.patch_size": 4, "training.batch_size": 8192}]
    rows = real_runs(replace(grid, timeout_s=300, memory_limit_gib=2.0, exclude=exclude), tmp_path)
    # A hang is told by a time that depends on the machine: three times what the same ranks took to do their steps.
    grid = small_grid(**{"model.patch_size": [8], "training.batch_size": [8]})
    timeout_s = round(3 * rows[0]["elapsed_s"])
    rows += real_runs(replace(grid, name="hang", timeout_s=timeout_s), tmp_path)
    assert [row["status"] for row in rows] == ["completed", "oom", "error", "timeout"], [row["reason"] for row in rows]
    assert "memory" in rows[1]["reason"]
    assert rows[2]["reason"] == "rank 1: RuntimeError: a crash on rank 1"
    assert rows[3]["reason"].startswith(f"not finished after {timeout_s} s: 3 step(s) done, rank(s) 0")
    assert rows[0]["images_per_second_mean"] > 0 and rows[0]["peak_memory_gib"] > 0
    assert rows[0]["start_up_s"] > 1
    assert not any(processes_of(folder) for folder in tmp_path.glob("*/runs/*/ranks"))


def real_runs(grid: Grid, folder: Path) -> Table:
    path = folder / grid.name
    program = (str(folder / "faults.py"),)
    return run_grid(grid, path=path, program=program, launcher=LocalLauncher(path), stream=io.StringIO())


def test_a_launch_that_cannot_start_is_a_row_like_any_other(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maker, "execute", execute)
    monkeypatch.setattr(launch, "TORCHRUN", ("no-such-program",))
    rows = run_here(small_grid())
    assert statuses(rows) == [(8, "error"), (16, "error")]
    assert "no-such-program" in rows[0]["reason"]


def test_executing_a_job_ends_it_when_the_runner_is_interrupted(tmp_path: Path) -> None:
    job = Job(("-c", "import subprocess; subprocess.run(['sleep', '60'])"), tmp_path)
    ticks = iter(range(1000))

    def interrupt() -> None:
        if next(ticks) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(job, on_tick=interrupt)
    assert processes_of(job.ranks) == []
