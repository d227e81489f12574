# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""kills.py: its plans cover every fault, its checks see each kind of damage, and a few real runs survive."""

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
from unittest.mock import Mock

import kills
import kills_attempts
import kills_checks
import kills_plans
import kills_report
import pytest
import torch
from refusals import assert_refused

from torchditan.ablation.launch import end_processes, processes_of
from torchditan.run.rank_status import RANKS_VARIABLE, write_rank_status
from torchditan.run.training_progress import Progress

pytestmark = pytest.mark.nightly

PACE = kills_plans.Pace(start_up_s=4.0, step_s=0.25)
KILL = kills_plans.Kill(target="launcher", rank=0, signal="SIGKILL", aim="step", moment=0.5, delay_s=0.0)
PLANS = [kills_plans.plan_of(0, number) for number in range(60)]


def curve(**changes: Any) -> list[dict[str, Any]]:
    """A metrics file; `loss_7=1.5` changes one number."""
    records = [
        {"step": step, "images_seen": 12 * step, "lr": 1e-3, "loss": 1 / step, "grad_norm": 1.0}
        for step in range(1, kills_attempts.STEPS + 1)
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
    (tmp_path / "log").touch()
    layout = kills_plans.LAYOUTS["one"]
    yield kills_attempts.Attempt(
        tmp_path / "run", layout, ranks, tmp_path / "log", process, [], time.time() - 5, Progress()
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
    random.random()
    assert [kills_plans.plan_of(0, number) for number in range(60)] == PLANS
    assert len(set(PLANS)) == 60
    assert [kills_plans.plan_of(1, number) for number in range(60)] != PLANS


def test_the_plans_of_two_hundred_kills_hold_every_fault() -> None:
    counts = itertools.accumulate(len(plan.kills) for plan in PLANS)
    plans = [plan for plan, count in zip(PLANS, counts, strict=True) if count <= 200]
    assert 40 < len(plans) < 60
    variants = Counter(plan.variant for plan in plans)
    assert variants.keys() == kills_plans.VARIANTS.keys()
    assert min(variants.values()) >= 7
    assert {layout for plan in plans for layout in plan.layouts} == set(kills_plans.LAYOUTS)
    kills = [kill for plan in plans for kill in plan.kills]
    assert {(kill.signal, kill.target) for kill in kills} == {
        (signal, target) for signal in ("SIGKILL", "SIGTERM") for target in kills_plans.TARGETS
    }
    assert min(Counter(kill.aim for kill in kills)[aim] for aim in kills_plans.AIMS) >= 5
    assert 15 < sum(plan.is_elastic for plan in plans) < 30
    assert 15 < sum(plan.saves_in_background() for plan in plans) < 35
    assert 0 < sum(not plan.is_forked for plan in plans) < 10


def test_an_elastic_plan_changes_the_mesh_after_every_kill_and_others_never() -> None:
    for plan in PLANS:
        meshes = [kills_plans.mesh_of(layout) for layout in plan.layouts]
        changes = [before != after for before, after in itertools.pairwise(meshes)]
        assert len(changes) == len(plan.kills)
        assert all(changes) if plan.is_elastic else not any(changes)
        assert kills_plans.mesh_of(plan.reference) == ((1, 1) if plan.is_elastic else meshes[0])


def test_a_kill_hits_a_rank_that_is_there_and_an_evaluation_where_there_are_some() -> None:
    for plan in PLANS:
        for layout, kill in zip(plan.layouts, plan.kills, strict=False):
            assert kill.rank < kills_plans.LAYOUTS[layout].world_size
            assert kill.target == "launcher" or kills_plans.LAYOUTS[layout].is_under_torchrun
            assert kill.aim != "evaluation" or plan.variant == "evaluation"


def test_the_batch_divides_by_any_number_of_ranks() -> None:
    for plan in PLANS:
        per_rank = 2 if plan.variant == "one-step" else 1
        assert all(plan.batch_size % (per_rank * layout.world_size) == 0 for layout in kills_plans.LAYOUTS.values())


def test_a_plan_can_be_cut_to_the_kills_that_are_missing() -> None:
    plan = next(plan for plan in PLANS if len(plan.kills) == 5)
    assert plan.first(9) == plan
    assert plan.first(2) == replace(plan, kills=plan.kills[:2], layouts=plan.layouts[:3])


def test_a_missing_a_doubled_and_a_misplaced_step_are_found() -> None:
    steps = list(range(1, kills_attempts.STEPS + 1))
    assert kills_checks.wrong_steps(steps) is None
    assert kills_checks.wrong_steps(steps[:6] + steps[7:]) == "missing [7], doubled []"
    assert kills_checks.wrong_steps([*steps[:7], *steps[6:]]) == "missing [], doubled [7]"
    assert "in another order" in kills_checks.wrong_steps([2, 1, *steps[2:]])


def test_the_last_bit_of_a_curve_counts() -> None:
    assert kills_checks.first_difference(curve(), curve()) is None
    changed = curve(loss_7=1 / 7 + 2**-55)
    assert changed[6]["loss"] != 1 / 7
    found = kills_checks.first_difference(changed, curve())
    assert found.startswith("loss of step 7 is 0.1428571428571")
    assert kills_checks.largest_difference(changed, curve()) < 1e-15
    assert "grad_norm of step 3" in kills_checks.first_difference(curve(grad_norm_3=None), curve())


def test_a_validation_loss_is_compared_where_one_was_taken() -> None:
    expected = curve(validation_loss_5=1.25)
    assert kills_checks.first_difference(curve(), expected) is None
    assert kills_checks.first_difference(curve(validation_loss_5=1.25), expected) is None
    assert "validation_loss of step 5 is 1.5, not 1.25" in kills_checks.first_difference(
        curve(validation_loss_5=1.5), expected
    )


def test_the_largest_difference_is_relative_and_a_missing_step_is_infinite() -> None:
    assert kills_checks.largest_difference(curve(loss_10=0.1 * (1 + 3e-5)), curve()) == pytest.approx(3e-5)
    assert kills_checks.largest_difference(curve()[:-1], curve()) == float("inf")
    assert kills_checks.largest_difference(curve(loss_10=None), curve()) == float("inf"), "a NaN is written as null"


def test_a_changed_a_missing_and_an_additional_tensor_are_found() -> None:
    def state() -> dict[str, torch.Tensor]:
        return {"model.w": torch.tensor([1.0, float("nan"), 0.0]), "ema.w": torch.zeros(3), "step": torch.tensor(7.0)}

    assert kills_checks.differing_tensors(state(), state()) == []
    changed = state()
    changed["model.w"][2] = -0.0
    assert kills_checks.differing_tensors(changed, state()) == ["model.w"]
    assert kills_checks.differing_tensors({**state(), "ema.w": torch.zeros(3, dtype=torch.int32)}, state()) == ["ema.w"]
    shorter = state()
    del shorter["step"]
    assert (
        kills_checks.differing_tensors(shorter, state()) == kills_checks.differing_tensors(state(), shorter) == ["step"]
    )


def test_tensorboard_steps_are_those_that_it_shows(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for first, purge_step in ((1, None), (3, 3)):  # the second writer takes step 3 back
        with SummaryWriter(str(tmp_path), purge_step=purge_step) as writer:
            for step in range(first, first + 3):
                writer.add_scalar("loss", 1.0, step)
        time.sleep(1.1)  # files are ordered by the second in their name
    assert kills_checks.tensorboard_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert kills_checks.tensorboard_steps(tmp_path / "none") == []


def test_debris_is_found_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-00000016").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-00000020").mkdir()
    assert kills_checks.debris(tmp_path) == []
    (tmp_path / ".status.json.vm-1.partial").touch()
    (tmp_path / "checkpoint" / "step-00000020.partial").mkdir()
    (tmp_path / "checkpoint" / "step-00000012").mkdir()
    (tmp_path / "checkpoint" / "other").mkdir()
    (tmp_path / "checkpoint" / "step-00000019.deleted").mkdir()
    assert kills_checks.debris(tmp_path) == [
        ".status.json.vm-1.partial",
        "3 checkpoints",
        "checkpoint/other",
        "checkpoint/step-00000019.deleted",
        "checkpoint/step-00000020.partial",
    ]


def test_a_process_that_stays_fails_the_run(attempt: Any) -> None:
    leftover = sleeper(attempt.ranks)
    attempt.process.kill()
    with pytest.raises(kills_attempts.RunFailedError) as caught:
        kills_attempts.wait_for_end(attempt, limit_s=0.2, after="SIGKILL to all")
    assert caught.value.args[0] == "processes"
    assert caught.value.args[1] == f"log: left 0.2 s after SIGKILL to all: {leftover.pid}: sleep 60"
    kills.end(attempt)
    kills_attempts.wait_for_end(attempt, limit_s=5, after="the end")
    assert leftover.wait() == -9


def test_an_attempt_that_fails_before_its_kill_fails_the_run(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, str(attempt.ranks))
    write_rank_status("error", "ValueError: a damaged checkpoint")
    attempt.process.kill()
    with pytest.raises(kills_attempts.RunFailedError) as caught:
        kills_attempts.strike(attempt, KILL, PACE)
    assert caught.value.args == ("exit", "log: exit -9: rank 0: ValueError: a damaged checkpoint")


def test_a_hanging_attempt_fails_the_run(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills_attempts, "_LIMIT_S", 1.0)
    with pytest.raises(kills_attempts.RunFailedError, match="done after 1 s"):
        kills_attempts.finish(attempt)


def test_a_kill_knows_its_phase_its_step_and_the_work_it_cost(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_training(attempt, monkeypatch, num_steps=11)
    monkeypatch.setattr(kills_attempts, "progress_of", lambda run: Progress(step=8, images_seen=96, elapsed_s=100.0))
    attempt.resumed = Progress(step=4, images_seen=48, elapsed_s=200.0)
    seen = kills_attempts.strike(attempt, replace(KILL, moment=0.3), PACE)
    assert attempt.process.returncode == -9
    assert (seen["phase"], seen["step"], seen["saved_step"]) == ("step", 11, 8)
    # The run had trained for 200 s when this attempt began, and for 100 s when it saved step 8.
    assert 100 < seen["lost_s"] < 130


def test_a_sigterm_that_costs_a_step_fails_the_run(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_training(attempt, monkeypatch, num_steps=11)
    monkeypatch.setattr(kills_attempts, "progress_of", lambda run: Progress(step=8))
    with pytest.raises(kills_attempts.RunFailedError) as caught:
        kills_attempts.strike(attempt, replace(KILL, signal="SIGTERM", moment=0.3), PACE)
    assert caught.value.args == ("stop", "log: SIGTERM after step 11, and 8 is saved")
    assert attempt.process.returncode == -15


@pytest.mark.parametrize("aim", ["save", "clean-up", "evaluation", "end"])
def test_a_kill_waits_for_what_it_aims_at(attempt: Any, monkeypatch: pytest.MonkeyPatch, aim: str) -> None:
    begin_training(attempt, monkeypatch, num_steps=11)
    (attempt.checkpoints / "step-00000008").mkdir(parents=True)
    if aim == "evaluation":
        attempt.flags = [f"--evaluation.freq={kills_plans.EVALUATION_FREQ}"]
    monkeypatch.setattr(kills_attempts, "_LIMIT_S", 5.5)
    with pytest.raises(kills_attempts.RunFailedError, match="not done"):
        kills_attempts.wait_for_moment(attempt, replace(KILL, aim=aim), PACE)
    if aim == "evaluation":
        with open(attempt.run / "metrics.jsonl", "a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in curve()[11:15]))
    elif aim == "end":
        (attempt.run / "status.json").write_text('{"state": "completed"}')
    elif aim == "clean-up":
        (attempt.checkpoints / "step-00000004.deleted").mkdir()
    monkeypatch.setattr(kills_attempts, "_LIMIT_S", 60)
    if aim == "save":
        monkeypatch.setattr(kills_attempts, "names_in", Mock(side_effect=[{"a"}, {"a"}, {"a", "b"}]))
    assert kills_attempts.wait_for_moment(attempt, replace(KILL, aim=aim), PACE)


def test_a_rank_is_a_child_of_torchrun_and_all_are_of_its_session() -> None:
    script = "sleep 60 & sleep 60 & echo ready; wait"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        layout = kills_plans.LAYOUTS["ddp2"]
        nowhere = Path("nowhere")
        attempt = kills_attempts.Attempt(nowhere, layout, nowhere, nowhere, process, [], 0.0, Progress())
        found = attempt.targets(replace(KILL, target="all"))
        first, second = (attempt.targets(replace(KILL, target="rank", rank=rank)) for rank in (0, 1))
        assert sorted([process.pid, *first, *second]) == found
        assert attempt.targets(KILL) == [process.pid]
        kills.end(attempt)
        assert kills_attempts.processes_of_session(process.pid) == []


def test_each_phase_is_recognised(attempt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt.phase() == "start-up"
    begin_training(attempt, monkeypatch, num_steps=14)
    assert attempt.phase() == "step"
    attempt.flags = ["--metrics.enable_sampling=true"]
    assert attempt.phase() == "grid", "step 14 is due, and its grid not drawn"
    lines = [json.dumps(record) for record in curve(sampling_s_14=1.0)[:14]]
    (attempt.run / "metrics.jsonl").write_text("\n".join(lines))
    assert attempt.phase() == "step"
    partial = attempt.checkpoints / "step-00000015.partial"
    partial.mkdir(parents=True)
    assert attempt.phase() == "save"
    partial.rename(attempt.checkpoints / "step-00000015.deleted")
    assert attempt.phase() == "clean-up"
    attempt.flags = []
    attempt.started += 3600
    assert attempt.phase() == "step", "an earlier attempt left it"
    attempt.flags = [f"--evaluation.freq={kills_plans.EVALUATION_FREQ}"]
    assert attempt.phase() == "step"
    lines = [json.dumps(record) for record in curve(evaluation_s_5=1.0)[:5]]
    (attempt.run / "metrics.jsonl").write_text("\n".join(lines))
    assert attempt.phase() == "step"
    lines = [json.dumps(record) for record in curve()[:5]]
    (attempt.run / "metrics.jsonl").write_text("\n".join(lines))
    assert attempt.phase() == "evaluation"
    (attempt.run / "status.json").write_text('{"state": "completed"}')
    assert attempt.phase() == "end"


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check a finished run whose state is `state`, whose records are `records`, under a plan."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("run", "reference"):
        for step in (16, 20):
            (tmp_path / name / "checkpoint" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / name / "status.json").write_text('{"state": "completed", "step": 20}')
    numbers = {"step": 20, "images_seen": 240, "position": 240, "elapsed_s": 1.0}
    monkeypatch.setattr("torchditan.checkpoint.loading.read_numbers", lambda path: numbers)
    monkeypatch.setattr("torchditan.checkpoint.loading.read_state", lambda path: states[path.parent.parent.name])

    def check(
        plan: kills_plans.Plan, change: float = 0.0, records: list[dict[str, Any]] | None = None, **progress: int
    ) -> Any:
        for name, size in (("run", 1.0 + change), ("reference", 1.0)):
            states[name] = {"model.w": torch.ones(4) * size, "optimizer.state.w.exp_avg": torch.ones(4)}
        numbers.update(progress)
        for name, lines in (("run", records or curve()), ("reference", curve())):
            (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return kills_checks.compare(tmp_path / "run", tmp_path / "reference", plan)

    return check


BITWISE = kills_plans.Plan(5, "adamw", True, ("one", "one"), (KILL,), ())
ELASTIC = replace(BITWISE, layouts=("one", "ddp2"))


def test_one_changed_bit_of_the_final_state_fails_a_run_on_the_same_ranks(finished: Any) -> None:
    assert finished(BITWISE) == ({}, {})
    problems, _ = finished(BITWISE, change=2e-7)
    assert problems == {"tensors": "1 differ, model.w first"}


def test_a_change_above_the_tolerance_fails_a_run_on_other_ranks(finished: Any) -> None:
    problems, differences = finished(ELASTIC, change=5e-6)
    assert (problems, differences["loss"]) == ({}, 0.0)
    assert differences["state"] == pytest.approx(5e-6, rel=0.1)
    problems, _ = finished(ELASTIC, change=2e-5)
    assert problems == {"elastic state": "off by 2.0e-05 in model"}
    problems, _ = finished(ELASTIC, records=curve(loss_7=1 / 7 * (1 + 2e-5)))
    assert problems == {"elastic loss": "off by 2.0e-05"}


def test_lost_and_repeated_samples_fail_a_run(finished: Any) -> None:
    problems, _ = finished(ELASTIC, records=curve(images_seen_7=96))
    assert problems == {"samples": "96 images after step 7"}
    problems, _ = finished(ELASTIC, position=252)
    assert problems == {"samples": "the stream stands at 252, not 240"}


def test_missing_evaluations_fail_a_run(finished: Any) -> None:
    problems, _ = finished(replace(BITWISE, variant="evaluation"))
    assert problems == {"evaluations": "no evaluation of step [5, 10, 15, 20]"}


def test_a_changed_evaluation_is_found() -> None:
    expected = curve(brightness_generated_5=0.25)
    assert "brightness_generated of step 5" in kills_checks.first_difference(
        curve(brightness_generated_5=0.5), expected
    )


def test_the_difference_of_a_state_is_that_of_its_worst_part() -> None:
    state = {"model.a": torch.ones(100), "optimizer.state.a.exp_avg": torch.ones(4) * 1e-6, "ema.a": torch.ones(2)}
    changed = {**state, "optimizer.state.a.exp_avg": torch.ones(4) * 1.1e-6}
    difference, part = kills_checks.state_difference(changed, state)
    assert (difference, part) == (pytest.approx(0.1, rel=1e-3), "optimizer.exp_avg")
    assert kills_checks.state_difference(state, state)[0] == 0.0
    del changed["ema.a"]
    assert kills_checks.state_difference(changed, state) == (float("inf"), "ema.a")
    broken = {**state, "model.a": torch.full((100,), float("nan"))}
    assert kills_checks.state_difference(broken, state) == (float("inf"), "model")
    assert kills_checks.state_difference({**state, "model.a": torch.ones(99)}, state) == (float("inf"), "model.a")


def result_of(number: int, *, is_elastic: bool = False, **problems: str) -> dict[str, Any]:
    hit = {"target": "all", "signal": "SIGKILL", "phase": "step", "lost_s": 1.0 + number, "ended_s": 0.5}
    in_start_up = {"target": "rank", "signal": "SIGTERM", "phase": "start-up", "lost_s": 0.0, "ended_s": 4.0}
    missed = {"target": "launcher", "signal": "SIGKILL", "phase": "ended already"}
    return {
        "number": number,
        "variant": "muon" if number else "adamw",
        "layouts": ["one", "ddp2" if is_elastic else "one"],
        "is_forked": True,
        "is_elastic": is_elastic,
        "saves_in_background": number == 1,
        "problems": problems,
        "folder": "somewhere",
        "differences": {"loss": 2e-7, "state": 3e-6} if is_elastic else {},
        "kills": [hit, in_start_up, missed],
        "resumes_s": [3.0 + number],
        "elapsed_s": 10.0,
    }


def test_the_report_counts_what_happened() -> None:
    results = [result_of(0), result_of(1, curve="x"), result_of(2, exit="x"), result_of(3, debris="x")]
    results += [result_of(4, is_elastic=True), result_of(5, is_elastic=True, samples="x", **{"elastic loss": "x"})]
    text = kills_report.report(results, {"seed": 3})
    assert "- seed: 3\n" in text
    assert "| adamw | 1 | 2 | 1 of 1 | 0 of 0 | - | - | 0 | 0 | 0 |" in text
    assert "| muon | 5 | 10 | 1 of 3 | 1 of 2 | 2.0e-07 | 3.0e-06 | 1 | 1 | 1 |" in text
    assert "| saves in the background | 1 | 2 | 0 of 1 |" in text
    assert "| all | 6 | 12 | 2 of 4 | 1 of 2 |" in text
    assert "| step | 0 | 0 | 6 | 0 | 0 | 0 |" in text
    assert "| start-up | 0 | 0 | 0 | 0 | 6 | 0 |" in text
    assert "the run had ended: 6, not counted" in text
    assert "lost per SIGKILL: 3.5 median, 6.0 at most" in text
    assert "run 2  muon  one  SIGKILL all in step, SIGTERM rank in start-up" in text
    assert "    exit: x\n    kept in somewhere" in text


def test_a_campaign_continues_from_its_results_and_refuses_those_of_another_seed(
    tmp_path: Path, run_script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = kills_report.Results(tmp_path, seed=3, num_kills=4)
    results.add(result_of(0))
    results.add(result_of(1))
    monkeypatch.setattr("forked_scripts.start_server", Mock())
    finished = run_script("tests/faults/kills.py", "--kills=4", "--seed=3", f"--folder={tmp_path}")
    assert (finished.code, finished.err) == (0, "")
    assert "- kills: 4 of 4\n" in (tmp_path / "report.md").read_text()
    assert "python tests/faults/kills.py --kills 4 --seed 3\n" in finished.out
    refused = run_script("tests/faults/kills.py", "--kills=4", "--seed=4", f"--folder={tmp_path}")
    assert_refused(refused.err, "--seed = 4", [str(tmp_path), "seed 3"])
    assert refused.code == 2


def test_a_failed_run_ends_the_script_with_1_and_is_named(
    tmp_path: Path, run_script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = kills_report.Results(tmp_path, seed=0, num_kills=2)
    results.add(result_of(0, curve="loss of step 7"))
    monkeypatch.setattr("forked_scripts.start_server", Mock())
    finished = run_script("tests/faults/kills.py", "--kills=2", f"--folder={tmp_path}")
    assert finished.code == 1
    assert finished.err == "error: run 0 failed: see above, and the folders named there\n"


@pytest.mark.parametrize(
    ("argument", "about", "mentions"),
    [
        ("--kills=0", "--kills", ["0", "1"]),
        ("--seed=x", "--seed", ["value"]),
        ("--kill=3", "--kill", ["--kills?"]),
        ("extra", "extra", ["option"]),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, run_script: Any, argument: str, about: str, mentions: list[str]
) -> None:
    code, out, err = run_script("tests/faults/kills.py", argument)
    assert (code, out) == (2, "")
    assert_refused(err, about, mentions)
    assert not list(tmp_path.iterdir())


def test_five_kills_lose_nothing(tmp_path: Path) -> None:
    """More with `python tests/faults/kills.py --kills 200`."""
    command = [sys.executable, kills.__file__, "--kills=5", "--seed=0", f"--folder={tmp_path}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(kills_report.hits(results)) == 5
    assert not any(result["problems"] for result in results)
    assert not list(tmp_path.glob("run-*")), "the folders of runs that passed are deleted"
