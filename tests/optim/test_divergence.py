# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""After a NaN or a spike of the loss, a run returns to its last checkpoint and skips the data that caused it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_runs import KEEP, TINY

from torchditan.checkpoint.loading import read_numbers, read_progress, read_state
from torchditan.data_stream.loader import TrainingStream
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.optim.divergence import LossSpikes
from torchditan.run.reading import read_metrics, read_status
from torchditan.supervision.supervision import Supervision

if TYPE_CHECKING:
    from tests.conftest import RunScript

BATCH = 4
SMALL = [
    *TINY,
    *KEEP,
    f"--training.global_batch_size={BATCH}",
    "--metrics.experiment_name=run",
    "--checkpoint.interval=10",
    "--training.on_nonfinite=rollback",
]
Spoil = Callable[[Callable[[int], float]], None]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """`spoil(factor)`: the loss of the sample at position p of the stream comes out factor(p) times as large."""
    loss = FlowMatching.loss

    def choose(factor: Callable[[int], float]) -> None:
        def spoilt(self: Any, model: Any, batch: Any, randomness: Any) -> Any:
            if batch["index"].is_meta:  # for MFU
                return loss(self, model, batch, randomness)
            factors = torch.tensor([factor(position) for position in batch["index"].tolist()])
            return loss(self, model, batch, randomness) * factors

        monkeypatch.setattr(FlowMatching, "loss", spoilt)

    return choose


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the stream that were trained on, in order."""
    found: list[int] = []
    batches = TrainingStream.batches

    def recorded(self: Any, position: int) -> Any:
        for batch, randomness in batches(self, position):
            found.extend(batch["index"].tolist())
            yield batch, randomness

    monkeypatch.setattr(TrainingStream, "batches", recorded)
    return found


def nan_in_step(step: int) -> Callable[[int], float]:
    """Of a run that has skipped nothing."""
    return lambda position: float("nan") if position == (step - 1) * BATCH + 2 else 1.0


def test_a_nan_takes_the_run_back_and_past_its_data(
    tmp_path: Path, run_script: RunScript, spoil: Spoil, positions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(nan_in_step(13))
    code, _, err = run_script("train.py", *SMALL, "--training.steps=15", "--metrics.enable_tensorboard")
    assert code == 0, err
    assert err == ""
    # Steps 11 to 13 are lost with their images, 40 to 51; the next ones follow.
    assert positions == [*range(52), *range(52, 72)]
    run = tmp_path / "outputs" / "run"
    records = read_metrics(run)
    assert [record["step"] for record in records] == list(range(1, 16))
    assert [record["images_seen"] for record in records] == list(range(BATCH, 16 * BATCH, BATCH))
    assert [record.get("rollbacks") for record in records] == [None] * 10 + [1] * 5
    progress = read_progress(run / "checkpoint" / "step-00000015")
    assert (progress.images_seen, progress.position, progress.rollbacks) == (60, 72, 1)
    assert tensorboard_steps(run) == list(range(1, 16))

    # What follows is what a run without that data learns, also one that stops at a NaN.
    batches = TrainingStream.batches
    monkeypatch.setattr(
        TrainingStream, "batches", lambda self, position: batches(self, position + (12 if position >= 40 else 0))
    )
    for steps in (10, 15):
        flags = [f"--training.steps={steps}", "--training.on_nonfinite=stop", "--metrics.experiment_name=without"]
        assert run_script("train.py", *SMALL, *flags).code == 0
    without = read_metrics(tmp_path / "outputs" / "without")
    assert [record["loss"] for record in records] == [record["loss"] for record in without]


def tensorboard_steps(run: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(run / "tensorboard")).Reload().Scalars("loss")]


def test_a_run_that_was_rolled_back_resumes_to_the_bit(tmp_path: Path, run_script: RunScript, spoil: Spoil) -> None:
    spoil(nan_in_step(13))
    flags = [*SMALL, "--ema.width=0.1"]
    for steps in (17, 20):
        assert run_script("train.py", *flags, f"--training.steps={steps}").code == 0
    assert run_script("train.py", *flags, "--training.steps=20", "--metrics.experiment_name=whole").code == 0
    states = [read_state(tmp_path / "outputs" / name / "checkpoint" / "step-00000020") for name in ("run", "whole")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_a_spike_counts_too_and_the_mean_survives_a_resume(tmp_path: Path, run_script: RunScript, spoil: Spoil) -> None:
    def spike(position: int) -> float:
        return 20.0 if position // BATCH in (3, 24) else 1.0  # the first comes before the mean has seen enough

    spoil(spike)
    flags = ["--checkpoint.async_mode=async", "--checkpoint.keep_latest_k=0"]
    code, out, err = run_script("train.py", *SMALL, *flags, "--training.steps=30")
    assert code == 0, err
    said = [line for line in out.splitlines() if line.startswith("warning")]
    assert said == [
        "warning: step 25: the loss jumped; back to step 20, without images 80 to 99 of the stream (rollback 1)"
    ]
    whole = read_numbers(tmp_path / "outputs" / "run" / "checkpoint" / "step-00000030")
    for step in (20, 30):  # as if killed at step 29
        shutil.rmtree(tmp_path / "outputs" / "run" / "checkpoint" / f"step-000000{step}")
    assert run_script("train.py", *SMALL, *flags, "--training.steps=30").code == 0
    again = read_numbers(tmp_path / "outputs" / "run" / "checkpoint" / "step-00000030")
    again["elapsed_s"] = whole["elapsed_s"]
    assert again == whole
    assert whole["mean_loss_steps"] == 30  # the first spike came before there was a mean to tell it by


def test_it_gives_up_after_so_many_returns_to_one_checkpoint(
    tmp_path: Path, run_script: RunScript, spoil: Spoil
) -> None:
    spoil(lambda position: float("nan") if position >= 12 * BATCH else 1.0)
    code, out, _ = run_script("train.py", *SMALL, "--training.steps=15")
    assert code == 1
    assert out.count("back to step 10") == 3
    status = read_status(tmp_path / "outputs" / "run")
    assert status["state"] == "error"
    reason = "step 11: the gradient is not finite, after 3 rollback(s) to step 10, each with other data; its update"
    assert reason in status["reason"]
    states = read_state(tmp_path / "outputs" / "run" / "checkpoint" / "step-00000010")
    assert all(tensor.isfinite().all() for name, tensor in states.items() if name.startswith("model."))


def test_a_run_that_diverges_before_its_first_checkpoint_returns_to_its_begin(
    tmp_path: Path, run_script: RunScript, spoil: Spoil
) -> None:
    spoil(nan_in_step(2))
    code, out, err = run_script("train.py", *SMALL, "--training.steps=4")
    assert code == 0, err
    assert "back to step 0, without images 0 to 7" in out
    assert [record["step"] for record in read_metrics(tmp_path / "outputs" / "run")] == [1, 2, 3, 4]


def test_a_sigterm_does_not_cut_short_a_rank_that_writes_down_why_it_failed(
    tmp_path: Path, run_script: RunScript, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends it to the others when one rank fails."""
    handlers = []
    record_failure = Supervision.record_failure

    def remember(self: Supervision, error: BaseException) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        record_failure(self, error)

    monkeypatch.setattr(Supervision, "record_failure", remember)
    spoil(nan_in_step(2))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert run_script("train.py", *SMALL, "--training.steps=3", "--training.on_nonfinite=stop").code == 1
        status = read_status(tmp_path / "outputs" / "run")
        assert "step 2: the gradient is not finite; its update" in status["reason"]
        assert len(handlers) == 1 and handlers[0] != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_running_mean_ignores_spikes_and_follows_a_slow_rise() -> None:
    spikes = LossSpikes(torch.device("cpu"))
    losses = [1.0] * 20 + [2.9, 3.5, 1.0] + [1.0 + 0.02 * step for step in range(200)]
    found = [bool(spikes.judge(torch.tensor(loss))) for loss in losses]
    assert [step for step, is_spike in enumerate(found) if is_spike] == [21]
    state = spikes.state_dict()
    assert 2.5 < state["mean_loss"] < losses[-1]
    assert state["mean_loss_steps"] == len(losses) - 1
    again = LossSpikes(torch.device("cpu"))
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert not bool(again.judge(torch.tensor(float("nan"))))  # the gradient's norm tells it
    assert again.state_dict() == state
