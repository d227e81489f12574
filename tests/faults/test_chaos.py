# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""chaos.py: its plans cover every fault, its checks see each kind of damage, and a few real runs survive."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chaos
import chaos_attempts
import chaos_checks
import chaos_plans
import chaos_results
import pytest
import torch
from refusals import assert_refused

from torchditan.ablation.launch import end_processes, processes_of
from torchditan.run.rank_status import RANKS_VARIABLE, write_rank_status
from torchditan.run.training_progress import Progress

PACE = chaos_plans.Pace(start_up_s=4.0, step_s=0.25, ending_s=1.0)
ALL_OF_ONE = chaos_plans.Kill(target="all", rank=0, aim="training", moment=0.5, delay_s=0.0)


def curve(**changes: Any) -> list[dict[str, Any]]:
    """A metrics file; `loss_7=1.5` changes one number."""
    records = [
        {"step": step, "images_seen": 12 * step, "lr": 1e-3, "loss": 1 / step, "grad_norm": 1.0}
        for step in range(1, chaos_attempts.STEPS + 1)
    ]
    for name, value in changes.items():
        key, _, step = name.rpartition("_")
        records[int(step) - 1][key] = value
    return records


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Any]:
    """Of one process that trains for a minute: a stand-in that writes what a rank writes."""
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    process = sleeper(ranks)
    layout = chaos_plans.LAYOUTS["one"]
    yield chaos_attempts.Attempt(
        tmp_path / "run", layout, ranks, tmp_path / "log", process, time.time() - 5, Progress()
    )
    end_processes(ranks, process)


def sleeper(ranks: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, RANKS_VARIABLE: str(ranks)})
    while process.pid not in processes_of(ranks):
        time.sleep(0.01)
    return process


def begin_training(attempt: Any, monkeypatch: pytest.MonkeyPatch, *, num_steps: int) -> None:
    """As if the attempt had logged so many steps."""
    monkeypatch.setenv(RANKS_VARIABLE, str(attempt.ranks))
    write_rank_status("running", first_step_at=time.time())
    attempt.run.mkdir()
    lines = (json.dumps(record) + "\n" for record in curve()[:num_steps])
    (attempt.run / "metrics.jsonl").write_text("".join(lines))


def test_a_plan_depends_on_seed_and_number_alone() -> None:
    plans = [chaos_plans.plan_of(0, number) for number in range(20)]
    random.random()
    assert plans == [chaos_plans.plan_of(0, number) for number in range(20)]
    assert len(set(plans)) == 20
    assert plans != [chaos_plans.plan_of(1, number) for number in range(20)]


def test_two_hundred_plans_hold_every_fault() -> None:
    plans = [chaos_plans.plan_of(0, number) for number in range(200)]
    assert {len(plan.kills) for plan in plans} == {1, 2, 3, 4, 5}
    assert {layout for plan in plans for layout in plan.layouts} == set(chaos_plans.LAYOUTS)
    assert {plan.layouts[0] for plan in plans if not plan.is_elastic} == set(chaos_plans.LAYOUTS)
    kills = [kill for plan in plans for kill in plan.kills]
    assert {(kill.target, kill.aim) for kill in kills} == {
        (target, aim) for target in chaos_plans.TARGETS for aim in ("life", "training", "save")
    }
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    assert 50 < sum(plan.is_elastic for plan in plans) < 85
    values = Counter(flag for plan in plans for flag in plan.flags)
    assert min(values.values()) >= 20, values


def test_an_elastic_plan_changes_the_mesh_after_every_kill_and_others_never() -> None:
    for plan in (chaos_plans.plan_of(0, number) for number in range(200)):
        meshes = [chaos_plans.mesh_of(layout) for layout in plan.layouts]
        changes = [before != after for before, after in itertools.pairwise(meshes)]
        assert len(changes) == len(plan.kills)
        assert all(changes) if plan.is_elastic else not any(changes)
        assert plan.reference == ("one" if plan.is_elastic else plan.layouts[0])


def test_a_process_without_torchrun_is_killed_as_a_whole() -> None:
    for plan in (chaos_plans.plan_of(0, number) for number in range(200)):
        for layout, kill in zip(plan.layouts, plan.kills, strict=False):
            assert kill.rank < chaos_plans.LAYOUTS[layout].world_size
            assert kill.target == "all" or chaos_plans.LAYOUTS[layout].is_under_torchrun


def test_moments_are_uniform_over_start_up_steps_and_end() -> None:
    """A life of 10 seconds: 4 of start-up, 20 steps in 5, and 1 of ending."""
    kills = [replace(ALL_OF_ONE, aim="life", moment=(i + 0.5) / 1000) for i in range(1000)]
    moments = [chaos_plans.moment_of(kill, PACE, 20) for kill in kills]
    start_up = [seconds for seconds, _, _ in moments if seconds is not None]
    assert len(start_up) == 400
    assert sum(start_up) / 400 == pytest.approx(2.0)
    steps = Counter(step for seconds, step, _ in moments if seconds is None)
    assert [steps[step] for step in range(21)] == [25] * 20 + [100]
    assert max(rest for _, step, rest in moments if step == 20) == pytest.approx(1.0, abs=0.01)
    assert chaos_plans.moment_of(replace(ALL_OF_ONE, moment=0.99), PACE, 20) == (None, 19, pytest.approx(0.2))
    assert chaos_plans.moment_of(ALL_OF_ONE, PACE, 0) == (None, 0, 0.0), "nothing is left to train"


def test_a_missing_a_doubled_and_a_misplaced_step_are_found() -> None:
    steps = list(range(1, chaos_attempts.STEPS + 1))
    assert chaos_checks.wrong_steps(steps) is None
    assert chaos_checks.wrong_steps(steps[:6] + steps[7:]) == "missing [7], doubled []"
    assert chaos_checks.wrong_steps([*steps[:7], *steps[6:]]) == "missing [], doubled [7]"
    assert "in another order" in chaos_checks.wrong_steps([2, 1, *steps[2:]])


def test_the_last_bit_of_a_curve_counts() -> None:
    assert chaos_checks.first_difference(curve(), curve()) is None
    changed = curve(loss_7=1 / 7 + 2**-55)
    assert changed[6]["loss"] != 1 / 7
    found = chaos_checks.first_difference(changed, curve())
    assert found.startswith("loss of step 7 is 0.1428571428571")
    assert chaos_checks.largest_difference(changed, curve()) < 1e-15
    assert "grad_norm of step 3" in chaos_checks.first_difference(curve(grad_norm_3=None), curve())


def test_a_validation_loss_is_compared_where_one_was_taken() -> None:
    expected = curve(validation_loss_5=1.25)
    assert chaos_checks.first_difference(curve(), expected) is None
    assert chaos_checks.first_difference(curve(validation_loss_5=1.25), expected) is None
    assert "validation_loss of step 5 is 1.5, not 1.25" in chaos_checks.first_difference(
        curve(validation_loss_5=1.5), expected
    )


def test_the_largest_difference_is_relative_and_a_missing_step_is_infinite() -> None:
    assert chaos_checks.largest_difference(curve(loss_10=0.1 * (1 + 3e-5)), curve()) == pytest.approx(3e-5)
    assert chaos_checks.largest_difference(curve()[:-1], curve()) == float("inf")
    assert chaos_checks.largest_difference(curve(loss_10=None), curve()) == float("inf"), "a NaN is written as null"


def test_a_changed_a_missing_and_an_additional_tensor_are_found() -> None:
    def state() -> dict[str, torch.Tensor]:
        return {"model.w": torch.tensor([1.0, float("nan"), 0.0]), "ema.w": torch.zeros(3), "step": torch.tensor(7.0)}

    assert chaos_checks.differing_tensors(state(), state()) == []
    changed = state()
    changed["model.w"][2] = -0.0
    assert chaos_checks.differing_tensors(changed, state()) == ["model.w"]
    assert chaos_checks.differing_tensors({**state(), "ema.w": torch.zeros(3, dtype=torch.int32)}, state()) == ["ema.w"]
    shorter = state()
    del shorter["step"]
    assert (
        chaos_checks.differing_tensors(shorter, state()) == chaos_checks.differing_tensors(state(), shorter) == ["step"]
    )


def test_tensorboard_steps_are_those_that_it_shows(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for first, purge_step in ((1, None), (3, 3)):  # the second writer takes step 3 back
        with SummaryWriter(str(tmp_path), purge_step=purge_step) as writer:
            for step in range(first, first + 3):
                writer.add_scalar("loss", 1.0, step)
        time.sleep(1.1)  # files are ordered by the second in their name
    assert chaos_checks.tensorboard_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert chaos_checks.tensorboard_steps(tmp_path / "none") == []


def test_debris_is_found_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-00000016").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-00000020").mkdir()
    assert chaos_checks.debris(tmp_path) == []
    (tmp_path / ".status.json.vm-1.partial").touch()
    (tmp_path / "checkpoint" / "step-00000020.partial").mkdir()
    (tmp_path / "checkpoint" / "step-00000012").mkdir()
    (tmp_path / "checkpoint" / "other").mkdir()
    names = [".status.json.vm-1.partial", "3 checkpoints", "checkpoint/other", "checkpoint/step-00000020.partial"]
    assert chaos_checks.debris(tmp_path) == names


def test_a_process_that_stays_fails_the_run(attempt: Any) -> None:
    leftover = sleeper(attempt.ranks)
    attempt.process.kill()
    with pytest.raises(chaos_attempts.RunFailedError) as caught:
        chaos_attempts.wait_for_end(attempt, limit_s=0.2, after="all was killed in training")
    assert caught.value.args[0] == "processes"
    assert caught.value.args[1] == f"log: left 0.2 s after all was killed in training: {leftover.pid}: sleep 60"
    chaos.end(attempt)
    chaos_attempts.wait_for_end(attempt, limit_s=5, after="the end")
    assert leftover.wait() == -9


def test_an_attempt_that_fails_before_its_kill_fails_the_run(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, str(attempt.ranks))
    write_rank_status("error", "ValueError: a damaged checkpoint")
    attempt.process.kill()
    with pytest.raises(chaos_attempts.RunFailedError) as caught:
        chaos_attempts.strike(attempt, ALL_OF_ONE, PACE)
    assert caught.value.args == ("exit", "log: exit -9: rank 0: ValueError: a damaged checkpoint")


def test_a_hanging_attempt_fails_the_run(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_attempts, "_LIMIT_S", 1.0)
    with pytest.raises(chaos_attempts.RunFailedError, match="done after 1 s"):
        chaos_attempts.finish(attempt)


def test_a_kill_knows_its_phase_its_step_and_the_work_it_cost(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_training(attempt, monkeypatch, num_steps=11)
    saved = attempt.checkpoints / "step-00000008"
    saved.mkdir(parents=True)
    monkeypatch.setattr(chaos_attempts, "progress_of", lambda run: Progress(step=8, images_seen=96, elapsed_s=100.0))
    attempt.resumed = Progress(step=4, images_seen=48, elapsed_s=200.0)
    seen = chaos_attempts.strike(attempt, replace(ALL_OF_ONE, moment=0.3), PACE)
    assert attempt.process.returncode == -9
    assert (seen["phase"], seen["step"], seen["saved_step"]) == ("training", 11, 8)
    # The clock of the run stood at 200 when this attempt began, and at 100 when step 8 was saved.
    assert 100 < seen["lost_s"] < 130


def test_each_phase_is_recognised(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt.phase() == "start-up"
    begin_training(attempt, monkeypatch, num_steps=14)
    assert attempt.phase() == "training"
    attempt.process.args = ["train.py", "--metrics.enable_sampling=true"]
    assert attempt.phase() == "sampling", "step 14 is due, and its grid not drawn"
    grid = attempt.run / "samples" / "step_00000014.png"
    grid.parent.mkdir()
    grid.touch()
    assert attempt.phase() == "training"
    (attempt.checkpoints / "step-00000015.partial").mkdir(parents=True)
    assert attempt.phase() == "checkpoint writing"
    os.utime(attempt.checkpoints / "step-00000015.partial", (0, 0))
    assert attempt.phase() == "training", "an earlier attempt left it"
    (attempt.run / "status.json").write_text('{"state": "completed"}')
    assert attempt.phase() == "shut-down"


def result_of(number: int, *, is_elastic: bool = False, **problems: str) -> dict[str, Any]:
    kill = {"target": "all", "phase": "training", "lost_s": 1.0 + number, "ended_s": 0.5}
    in_start_up = {"target": "rank", "phase": "start-up", "lost_s": 0.0, "ended_s": 4.0}
    missed = {"target": "torchrun", "phase": "ended already"}
    return {
        "number": number,
        "is_elastic": is_elastic,
        "problems": problems,
        "loss_difference": 2e-7 if is_elastic else 0.0,
        "kills": [kill, in_start_up, missed],
        "resumes_s": [3.0 + number],
        "elapsed_s": 10.0,
    }


def test_the_summary_counts_what_happened() -> None:
    results = [result_of(0), result_of(1, curve="x"), result_of(2, exit="x"), result_of(3, debris="x")]
    results += [result_of(4, is_elastic=True), result_of(5, is_elastic=True, elastic="x", tensorboard="x")]
    summary = chaos_results.summarize(results)
    assert (summary["num_runs"], summary["passed"], summary["survived"]) == (6, 2, 5)
    assert (summary["bitwise_runs"], summary["bitwise_equal"]) == (4, 2)
    assert (summary["elastic_runs"], summary["elastic_within_tolerance"]) == (2, 1)
    assert summary["num_kills"] == 18
    assert summary["kills_by_target"] == {"torchrun": 0, "rank": 6, "all": 6}
    assert summary["kills_by_phase"]["ended already"] == 6
    assert summary["lost_s"] == {"median": 0.5, "max": 6.0}
    assert summary["lost_after_start_up_s"] == {"median": 3.5, "max": 6.0}
    assert summary["resume_to_first_step_s"] == {"median": 5.5, "max": 8.0}
    text = chaos_results.table(summary)
    assert "survived                      5 of 6\n" in text
    assert "elastic within 1e-05          1 of 2, 2.0e-07 at most\n" in text


def test_results_of_another_seed_are_refused_and_none_is_repeated(tmp_path: Path, run_script: Any) -> None:
    results = chaos_results.Results(tmp_path, seed=3)
    for number in (1, 0):
        results.add({**result_of(number), "folder": None, "layouts": ["one"]})
    finished = run_script("tests/faults/chaos.py", "--num_runs=2", "--seed=3", f"--folder={tmp_path}")
    assert (finished.code, finished.err) == (0, "")
    assert json.loads((tmp_path / "summary.json").read_text())["passed"] == 2
    refused = run_script("tests/faults/chaos.py", "--num_runs=2", "--seed=4", f"--folder={tmp_path}")
    assert_refused(refused.err, "--seed = 4", [str(tmp_path), "seed 3"])
    assert refused.code == 2


def test_a_failed_run_ends_the_script_with_1_and_is_named(tmp_path: Path, run_script: Any) -> None:
    results = chaos_results.Results(tmp_path, seed=0)
    results.add({**result_of(0, curve="loss of step 7"), "folder": "somewhere"})
    finished = run_script("tests/faults/chaos.py", "--num_runs=1", f"--folder={tmp_path}")
    assert finished.code == 1
    assert finished.err == "error: run 0 failed: see above, and the folders named there\n"


@pytest.mark.parametrize(
    ("argument", "about", "mentions"),
    [
        ("--num_runs=0", "--num_runs", ["0", "1"]),
        ("--jobs=x", "--jobs", ["1", "integer"]),
        ("--seed=x", "--seed", ["value"]),
        ("--num_run=3", "--num_run", ["--num_runs?"]),
        ("extra", "extra", ["option"]),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, run_script: Any, argument: str, about: str, mentions: list[str]
) -> None:
    code, out, err = run_script("tests/faults/chaos.py", argument)
    assert (code, out) == (2, "")
    assert_refused(err, about, mentions)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_runs_end_as_if_never_stopped(tmp_path: Path) -> None:
    """One on two ranks, one alone and one elastic; more with `CHAOS_RUNS=10 pytest tests/faults -m slow`."""
    num_runs = os.environ.get("CHAOS_RUNS", "3")
    command = [sys.executable, chaos.__file__, f"--num_runs={num_runs}", "--seed=1524", f"--folder={tmp_path}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] == summary["num_runs"] == int(num_runs)
    assert summary["num_kills"] > summary["kills_by_phase"]["ended already"]
    assert not list(tmp_path.glob("run-*")), "the folders of runs that passed are deleted"
