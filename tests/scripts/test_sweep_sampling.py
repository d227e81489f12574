# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torchditan sweep: points, resuming, stopping and failures, with a stand-in for the evaluation."""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import assert_refused

from torchditan.ablation import launch
from torchditan.ablation.launch import processes_of
from torchditan.checkpoint.files import save_tensors, write_json, write_manifest
from torchditan.commands import sweep_sampling
from torchditan.config.loader import to_dict
from torchditan.config.options import Config
from torchditan.report import sweep_folder

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript

REPOSITORY = Path(__file__).resolve().parents[2]

EVALUATE = '''
"""Draws four parts, which it keeps, and writes a card. The number of steps selects how it fails."""
import argparse, json, os, signal, sys, time
from pathlib import Path
from cards import card, figure
from torchditan.config.command_line import RunParser
from torchditan.config.errors import option_error
from torchditan.evaluation.card import save_json
from torchditan.supervision.exit_status import OutOfMemory, run_job

def parse(argv):
    parser = RunParser(None)
    parser.add_argument("--weights")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--metrics", nargs="+")
    parser.add_argument("--num_samples", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=10)
    return parser.parse(argv)

def main():
    args, flags = parse(sys.argv[1:])
    given = dict(flag.removeprefix("--sampling.").split("=") for flag in flags)
    steps, scale = int(given["num_steps"]), float(given["guidance_scale"])
    interval = [float(end) for end in given["guidance_interval"].split(",")]
    if args.num_samples < 4:
        raise option_error("--num_samples", args.num_samples, "must be at least 4, for 3 neighbours")
    if steps == 102:
        raise option_error("sampling.num_steps", steps, "is not what this sampler can do")
    if steps == 103:
        raise MemoryError("no memory for a batch")
    if steps == 106:
        raise OutOfMemory("out of memory at --batch_size = 10: run the same command with a smaller --batch_size")
    if steps == 104:
        raise RuntimeError("a tensor of the wrong shape | with a bar")
    if steps == 109:
        os.kill(os.getpid(), signal.SIGKILL)
    (args.out / "parts").mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", 0))
    for part in range(rank, 4, int(os.environ.get("WORLD_SIZE", 1))):
        file = args.out / "parts" / str(part)
        if file.exists():
            continue
        with open(os.environ["DRAWN"], "a") as drawn:
            drawn.write(f"{args.out.name} {part}" + chr(10))
        time.sleep(float(os.environ.get("SECONDS_PER_PART", 0)))
        file.touch()
    if rank == 0 and steps != 105:
        value = 10 + 100 / steps + (scale - 2) ** 2 + (args.weights == "raw")
        sampling = {**given, "num_steps": steps, "guidance_scale": scale, "guidance_interval": interval}
        figures = {"FD-EffNetLite0": figure(value, 0.1), "KID-EffNetLite0": figure(0.0)}
        metrics = args.metrics or os.environ.get("DEFAULT_METRICS", "effnet classifier").split()
        changes = {"step": args.step, "weights": args.weights, "sampling": sampling, "model_evaluations": steps}
        changes["metrics"] = metrics
        save_json(args.out / "card.json", card(figures=figures, num_samples=args.num_samples, **changes))

if __name__ == "__main__":
    sys.exit(run_job(main))
'''

SWEEP = """
import runpy, sys
from pathlib import Path
from torchditan.__main__ import run
from torchditan.commands import evaluate, sweep_sampling

stand_in = str(Path(__file__).with_name("evaluate.py"))
sweep_sampling.EVALUATE = (stand_in,)
evaluate.parse = runpy.run_path(stand_in)["parse"]
sys.exit(run("sweep"))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep whose points are evaluated by a stand-in, in this process and as a script."""
    evaluate = tmp_path / "evaluate.py"
    evaluate.write_text(EVALUATE)
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    monkeypatch.setattr(sweep_sampling, "EVALUATE", (str(evaluate),))
    monkeypatch.setattr("torchditan.commands.evaluate.parse", runpy.run_path(str(evaluate))["parse"])
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("DRAWN", str(tmp_path / "drawn"))
    monkeypatch.delenv("TORCHDITAN_RANKS_FOLDER", raising=False)
    return script


def make_run(path: Path, *, steps: tuple[int, ...] = (4,), **options: Any) -> Path:
    """A run directory with checkpoints of one number."""
    shape = {"dataset.image_size": [8, 8], "dataset.num_classes": 10, "model.input_channels": 1, "model.patch_size": 1}
    shape["model.sample_size"] = [8, 8]
    config = Config().replace({"model.flavor": "debugmodel", **shape, **options})
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"run_id": f"id of {path.name}", "config": to_dict(config)}))
    for step in steps:
        checkpoint = path / "checkpoint" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save_tensors({"weight": torch.zeros(1)}, checkpoint)
        write_json(checkpoint / "progress.json", {"step": step})
        write_manifest(checkpoint, step=step, trajectory={})
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "outputs" / "digits")


class Sweep:
    """Runs the script in this process, and reads what it left."""

    def __init__(self, script: Path, run: Path, run_script: RunScript) -> None:
        self.script, self.run, self.run_script = script, run, run_script
        self.folder = run / "evaluation" / "sweep"

    def __call__(self, *arguments: object) -> Outcome:
        return self.run_script("torchditan", "sweep", self.run, *arguments)

    def points(self) -> dict[tuple[int, float], dict[str, Any]]:
        """By steps and guidance."""
        points = json.loads((self.folder / "sweep.json").read_text())["points"]
        return {(point["point"]["num_steps"], point["point"]["guidance_scale"]): point for point in points}

    def drawn(self) -> list[str]:
        """Each part that the stand-in drew, in order."""
        file = Path(os.environ["DRAWN"])
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def sweep_with_plots(script: Path, run: Path, run_script: RunScript) -> Sweep:
    return Sweep(script, run, run_script)


@pytest.fixture
def sweep(sweep_with_plots: Sweep, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Without plots, which take most of the time."""
    monkeypatch.setattr(sweep_folder, "save_plots", lambda *arguments, **options: [])
    return sweep_with_plots


def test_a_sweep_has_a_table_and_two_plots_of_all_points(sweep_with_plots: Sweep) -> None:
    sweep = sweep_with_plots
    code, out, err = sweep("--num_steps", 10, 20, "--num_samples=50")
    assert code == 0, err
    assert {key: point["status"] for key, point in sweep.points().items()} == {
        (10, 2.0): "finished",
        (20, 2.0): "finished",
    }
    table = (sweep.folder / "sweep.md").read_text()
    assert out.startswith(table[: table.index("!")])
    assert "| best | euler   | 20    | 20                | 2        | ema     | 15 [14.9, 15.1]" in table
    for name in ("quality_over_evaluations.png", "quality_over_guidance.png"):
        assert (sweep.folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in table
    assert err.splitlines()[0].startswith("[1/2] digits, euler, 10 steps, guidance 2, ema: ")


def test_a_repeated_sweep_draws_nothing_and_a_larger_one_only_what_is_new(sweep: Sweep) -> None:
    assert sweep("--num_steps", 10).code == 0
    first = sweep.drawn()
    again = sweep("--num_steps", 10, "--batch_size", 5)
    assert again.code == 0 and "finished before" in again.err
    assert sweep.drawn() == first
    assert sweep("--num_steps", 20).code == 0
    assert len(sweep.drawn()) == 2 * len(first)
    assert list(sweep.points()) == [(20, 2.0), (10, 2.0)], "earlier points stay in the results"


def test_guidance_1_is_evaluated_once_for_all_intervals(sweep: Sweep) -> None:
    flags = ["--guidance_scale", 1, 2, 2.0, "--guidance_interval", "0,1", "0.25,0.75", "--num_steps", 8]
    code, out, _ = sweep(*flags, "--dry_run")
    assert code == 0
    assert [int(line.rsplit(": ", 1)[1]) for line in out.splitlines()[:-1]] == [8, 16, 8 + 5]


def test_the_dry_run_counts_heun_twice_and_guided_steps_twice(sweep: Sweep) -> None:
    samplers = ("euler", "heun", "dpmpp_2m")
    code, out, _ = sweep("--dry_run", "--sampler", *samplers, "--guidance_scale", 1, 4, "--num_steps", 10)
    assert code == 0
    assert [int(line.rsplit(": ", 1)[1]) for line in out.splitlines()[:-1]] == [10, 20, 20, 40, 10, 20]
    assert not sweep.folder.exists() and sweep.drawn() == []


def test_a_failed_point_has_its_reason_and_the_others_are_evaluated(sweep: Sweep) -> None:
    code, out, err = sweep("--num_steps", 102, 103, 104, 105, 106, 109, 10)
    assert code == 3
    reasons = {steps: point["reason"] for (steps, _), point in sweep.points().items()}
    assert reasons == {
        102: "sampling.num_steps = 102: is not what this sampler can do",
        103: "out of memory: no memory for a batch",
        104: "RuntimeError: a tensor of the wrong shape | with a bar",
        105: "torchditan evaluate wrote no card with the settings of this point",
        106: "out of memory at --batch_size = 10: run the same command with a smaller --batch_size",
        109: "ended by SIGKILL, as by the system when memory runs out",
        10: None,
    }
    assert "failed: RuntimeError: a tensor of the wrong shape \\| with a bar" in out
    assert err.splitlines()[-1] == "error: points that failed: 6; the same command tries them again"
    assert sweep("--num_steps", 104, 10).code == 1
    assert sweep("--num_steps", 102, 10).code == 2


def test_a_mistake_that_concerns_all_points_stops_the_sweep_at_once(sweep: Sweep) -> None:
    code, out, err = sweep("--num_steps", 10, 20, "--num_samples=3")
    assert (code, out) == (2, "")
    assert_refused(err, "--num_samples = 3", ["4"])
    assert not (sweep.folder / "logs" / "digits_euler_20_steps_guidance_2.0_ema").exists()
    assert sweep("--num_steps", 10, "--num_samples=4").code == 0, "nothing was evaluated, so the options may change"


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["--sampler", "huen"], '--sampler = "huen"', ["heun?"]),
        (["--num_steps", "10", "0"], "--num_steps = 0", ["1"]),
        (["--num_steps", "10", "ten"], '--num_steps = "ten"', ["integer"]),
        (["--num_steps"], "--num_steps", []),
        (["--guidance_scale", "-1"], "--guidance_scale = -1.0", ["0"]),
        (["--guidance_scale", "nan"], "--guidance_scale", ["number"]),
        (["--guidance_interval", "0.8,0.2"], "--guidance_interval = [0.8, 0.2]", []),
        (["--weights", "emma"], '--weights = "emma"', ["ema?"]),
        (["--metrics"], "--metrics", []),
        (["--nproc_per_node", "0"], "--nproc_per_node", ["1"]),
        (["--num_sample", "4"], "--num_sample", ["--num_samples?"]),
        (["--sampling.num_steps=4"], "--sampling.num_steps", ["--num_steps VALUE"]),
        (["--sampling.num_step=4"], "sampling.num_step", ["sampling.num_steps?"]),
        (["--card=card.json"], "--card", ["torchditan evaluate"]),
        (["--step", "3"], "--step = 3", ["[4]"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(
    arguments: list[str], about: str, mentions: list[str], sweep: Sweep
) -> None:
    code, out, err = sweep(*arguments)
    assert (code, out) == (2, "")
    assert_refused(err, about, mentions)
    assert not sweep.folder.exists()


def test_runs_that_cannot_be_swept_are_one_line(
    sweep: Sweep, run_script: RunScript, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> str:
        code, out, err = run_script(str(script), *arguments)
        assert (code, out) == (2, "")
        return err

    assert_refused(refused(), "", ["outputs/quickstart"])
    assert_refused(refused("--num_steps", 10, sweep.run), "", ["outputs/quickstart"])
    assert_refused(refused(sweep.run.with_name("digit")), str(sweep.run.with_name("digit")), [f"{sweep.run}?"])
    other = make_run(tmp_path / "outputs" / "other", **{"ema.enable": False, "dataset.num_classes": 0})
    assert_refused(refused(sweep.run, other), "--out", [])
    assert_refused(refused(sweep.run, other, f"--out={tmp_path / 'all'}"), "--metrics", ["classes", "effnet"])
    assert_refused(refused(other, "--weights", "raw", "ema"), '--weights = "ema"', ["raw"])
    assert_refused(refused(other, "--guidance_scale", "1", "2"), '--guidance_scale = "1 2"', ["classes"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert_refused(refused(sweep.run), "", ["--nproc_per_node"])


def test_a_folder_with_other_content_is_refused_and_left_alone(sweep: Sweep, tmp_path: Path) -> None:
    assert sweep("--num_steps", 10).code == 0
    before = (sweep.folder / "sweep.json").read_bytes()
    for arguments, mentions in (
        ([f"--out={tmp_path / 'outputs'}"], ["sweep.json"]),
        ([f"--out={sweep.run / 'config.json'}"], ["folder"]),
        (["--num_samples=50"], ["--num_samples", "50", "100"]),
        (["--sampling.guidance_channels=1"], ["--flags"]),
    ):
        code, _, err = sweep("--num_steps", 10, *arguments)
        assert code == 2
        assert_refused(err, "--out", mentions)
    sweep.run = make_run(tmp_path / "outputs" / "other")
    code, _, err = sweep(f"--out={sweep.folder}")
    assert code == 2
    assert_refused(err, f'--out = "{sweep.folder}"', ["digits"])
    assert (sweep.folder / "sweep.json").read_bytes() == before
    (sweep.folder / "sweep.json").write_text("{")
    assert_refused(sweep(f"--out={sweep.folder}").err, f'--out = "{sweep.folder}"', ["sweep.json"])


def test_a_sweep_keeps_its_checkpoint_if_the_training_goes_on(sweep: Sweep) -> None:
    assert sweep("--num_steps", 10).code == 0
    make_run(sweep.run, steps=(8,))
    assert sweep("--num_steps", 20).code == 0
    cards = [json.loads(path.read_text()) for path in sweep.folder.glob("points/*/card.json")]
    assert [card["step"] for card in cards] == [4, 4]
    assert_refused(sweep("--num_steps", 20, "--step", 8).err, "--out", ["4", "8"])


def test_several_runs_share_one_table(sweep: Sweep, run_script: RunScript, script: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "digits", **{"ema.enable": False})
    runs = [sweep.run, tmp_path / "a" / "digits", sweep.run]
    code, out, err = run_script(str(script), *runs, f"--out={tmp_path / 'all'}", "--num_steps", 10)
    assert code == 0, err
    assert [line.split("|")[2].strip() for line in out.splitlines() if "| euler" in line] == [
        "outputs-digits",
        "a-digits",
    ]


def metrics_of(sweep: Sweep) -> list[list[str]]:
    return [json.loads(path.read_text())["metrics"] for path in sorted(sweep.folder.glob("points/*/card.json"))]


def test_points_of_one_table_have_the_same_metrics(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep("--num_steps", 10).code == 0
    assert json.loads((sweep.folder / "sweep.json").read_text())["options"]["metrics"] == ["effnet", "classifier"]
    code, _, err = sweep("--num_steps", 20, "--metrics", "effnet")
    assert code == 2
    assert_refused(err, "--out", ["--metrics", '["effnet", "classifier"]', '["effnet"]'])
    monkeypatch.setenv("DEFAULT_METRICS", "effnet")  # as after a package was removed
    assert sweep("--num_steps", 20).code == 0
    assert sweep("--num_steps", 25, "--metrics", "effnet", "classifier").code == 0, "given as they were resolved"
    assert metrics_of(sweep) == [["effnet", "classifier"]] * 3


def test_a_point_with_other_metrics_is_evaluated_again(sweep: Sweep) -> None:
    assert sweep("--num_steps", 10, 20).code == 0
    path = sweep.folder / "points" / "digits_euler_20_steps_guidance_2.0_ema" / "card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": ["effnet"]}))
    assert sweep("--num_steps", 10, 20).code == 0
    assert metrics_of(sweep) == [["effnet", "classifier"]] * 2


def test_an_unknown_figure_is_refused_with_those_of_the_cards(sweep: Sweep) -> None:
    code, _, err = sweep("--num_steps", 10, 20, "--figure=KID-EffNet")
    assert code == 2
    assert_refused(err.splitlines()[-1], '--figure = "KID-EffNet"', ["FD-EffNetLite0", "KID-EffNetLite0?"])
    assert len(sweep.drawn()) == 4, "of the first point only"
    assert [point["status"] for point in sweep.points().values()] == ["finished", "missing"]
    table = (sweep.folder / "sweep.md").read_text()
    assert "FD-EffNetLite0" in table and "| not evaluated" in table, "the table is that of the default figure"
    code, _, err = sweep("--num_steps", 10, 20, "--figure=KID-EffNet")
    assert code == 2 and len(sweep.drawn()) == 4, "with a card, the figure is checked before the next point"
    assert (sweep.folder / "sweep.md").read_text() == table
    code, out, _ = sweep("--num_steps", 10, "--figure=KID-EffNetLite0")
    assert code == 0 and "KID-EffNetLite0" in out
    assert len(sweep.drawn()) == 4, "the finished point stays"


def test_without_matplotlib_there_is_a_table_and_a_line_about_plots(
    sweep_with_plots: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = sweep_with_plots
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = sweep("--num_steps", 10)
    assert code == 0
    assert "No plots: the package matplotlib is missing: pip install" in out
    assert not list(sweep.folder.glob("*.png"))


def wait_for_parts(sweep: Sweep, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(sweep.drawn()) < number and time.monotonic() < deadline:
        time.sleep(0.01)


def check_that_it_continues(sweep: Sweep, arguments: list[object]) -> None:
    """The sweep stopped in the second part of its second point."""
    assert not any(processes_of(ranks) for ranks in sweep.folder.glob("logs/*/ranks"))
    code, _, err = sweep(*arguments)
    assert code == 0, err
    assert [point["status"] for point in sweep.points().values()] == ["finished"] * 2
    assert len(set(sweep.drawn())) == 8
    assert len(sweep.drawn()) <= 9, "only the running part is drawn again"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_stopped_sweep_exits_with_75_and_continues(
    number: signal.Signals, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        wait_for_parts(sweep, 6)
        os.kill(os.getpid(), number)

    arguments: list[object] = ["--num_steps", 10, 20]
    with monkeypatch.context() as environment:
        environment.setenv("SECONDS_PER_PART", "0.3")
        stopping = threading.Thread(target=stop)
        stopping.start()
        code, _, err = sweep(*arguments)
        stopping.join()
    assert code == 75
    assert err.splitlines()[-1] == "interrupted with 1 of 2 points finished; the same command continues"
    assert [point["status"] for point in sweep.points().values()] == ["finished", "missing"]
    check_that_it_continues(sweep, arguments)


@pytest.mark.nightly
def test_a_killed_sweep_continues_and_loses_at_most_the_running_batch(sweep: Sweep) -> None:
    arguments: list[object] = ["--num_steps", 10, 20]
    command = [sys.executable, str(sweep.script), str(sweep.run), *map(str, arguments)]
    process = subprocess.Popen(command, env={**os.environ, "SECONDS_PER_PART": "0.3"})
    wait_for_parts(sweep, 6)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(processes_of(ranks) for ranks in sweep.folder.glob("logs/*/ranks")) and time.monotonic() < deadline:
        time.sleep(0.01)
    check_that_it_continues(sweep, arguments)


def test_a_second_sweep_in_the_folder_is_refused(sweep: Sweep) -> None:
    sweep.folder.mkdir(parents=True)
    with open(sweep.folder / ".lock", "w") as lock:
        lock.write("PID 7 on a machine\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = sweep()
    assert code == 2
    assert_refused(err, str(sweep.folder), ["PID 7", "--out"])


@pytest.mark.parametrize("torchrun", ["stand-in", pytest.param("real", marks=pytest.mark.nightly)])
def test_the_ranks_of_a_point_draw_it_together(
    torchrun: str, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torchrun == "stand-in":
        stand_ins = runpy.run_path(str(REPOSITORY / "tests" / "ablation" / "stand_ins.py"))
        (tmp_path / "torchrun.py").write_text(stand_ins["TORCHRUN"])
        monkeypatch.setattr(launch, "TORCHRUN", (sys.executable, str(tmp_path / "torchrun.py")))
    code, _, err = sweep("--nproc_per_node", 2, "--num_steps", 10, 103)
    assert code == 3, err
    statuses = {steps: point["reason"] or point["status"] for (steps, _), point in sweep.points().items()}
    assert statuses[10] == "finished"
    assert statuses[103].endswith("no memory for a batch")
    assert len(set(sweep.drawn())) == 4
