# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Contents of a checkpoint: an object that is registered once is saved, resumed and rolled back with the run."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from tiny_runs import KEEP, TINY
from torch import nn

from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.run_state import ModelState, OptimizerState, RunState, Snapshot
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.run.reading import read_metrics
from torchditan.run.training_progress import Progress
from torchditan.trainer import Trainer

if TYPE_CHECKING:
    from tests.conftest import RunScript

BATCH = 4
SMALL = [
    *TINY,
    *KEEP,
    f"--training.global_batch_size={BATCH}",
    "--metrics.experiment_name=run",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=0",
    "--training.on_nonfinite=rollback",
]
CountSteps = Callable[[], "list[Counter]"]


class Counter:
    """Counts steps in a number."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["counted"]


class TensorCounter(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"counted": torch.tensor(self.count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = int(state_dict["counted"])


@pytest.fixture
def count_steps(monkeypatch: pytest.MonkeyPatch) -> CountSteps:
    """`count_steps()`: three counters of the steps of later jobs, one in each group of their state."""
    run_state, count_step = Trainer.run_state, Trainer.count_step

    def add() -> list[Counter]:
        tensor, number, of_rank = TensorCounter(), Counter(), Counter()

        def with_counters(self: Trainer) -> RunState:
            usual = run_state(self)
            return RunState(
                self.progress,
                tensors={**usual.tensors, "counter": tensor},
                numbers=[*usual.numbers[1:], number],
                per_rank={**usual.per_rank, "counter": of_rank},
            )

        def count(self: Trainer) -> None:
            count_step(self)
            for counter in (tensor, number, of_rank):
                counter.count += 1

        monkeypatch.setattr(Trainer, "run_state", with_counters)
        monkeypatch.setattr(Trainer, "count_step", count)
        return [tensor, number, of_rank]

    return add


def stored_counts(checkpoint: Path) -> list[int]:
    in_json = [json.loads((checkpoint / name).read_text()) for name in ("progress.json", "counter_rank0.json")]
    return [int(read_state(checkpoint, "counter.")["counter.counted"]), *(int(stored["counted"]) for stored in in_json)]


def spoil_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of a sample of that step is not a number."""
    loss = FlowMatching.loss

    def spoilt(self: Any, model: nn.Module, batch: Any, randomness: Any) -> Any:
        factors = torch.where(batch["index"] == (step - 1) * BATCH, torch.nan, 1.0)  # (B,)
        return loss(self, model, batch, randomness) * factors

    monkeypatch.setattr(FlowMatching, "loss", spoilt)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_what_is_registered_is_saved_rolled_back_and_resumed(
    async_mode: str,
    tmp_path: Path,
    run_script: RunScript,
    count_steps: CountSteps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [*SMALL, f"--checkpoint.async_mode={async_mode}"]
    checkpoints = tmp_path / "outputs" / "run" / "checkpoint"
    spoil_step(4, monkeypatch)
    counters = count_steps()
    code, out, err = run_script("train.py", *flags, "--training.steps=4")
    assert code == 0, err
    assert "back to step 2" in out  # after 3 steps, of which the counters forget one
    assert [stored_counts(checkpoints / f"step-0000000{step}") for step in (2, 4)] == [[2] * 3, [4] * 3]
    again = count_steps()
    assert run_script("train.py", *flags, "--training.steps=6").code == 0
    assert [counter.count for counter in (*counters, *again)] == [4] * 3 + [6] * 3


def test_a_streamed_source_continues_where_its_rank_was(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("torchdata")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = []
    for number in range(40):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (6 * number, 0, 0)).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": f"{number}.png"})
    (tmp_path / "hub").mkdir()
    table = pyarrow.table({"image": images, "label": [number % 2 for number in range(40)]})
    parquet.write_table(table, tmp_path / "hub" / "train.parquet")
    flags = [*SMALL, "--training.on_nonfinite=stop", "--dataset.dataset_name=imagenet_hub", "--dataset.hub_name=hub"]
    flags += ["--dataset.streaming", "--dataset.image_size=8", "--dataset.num_classes=2", "--validation.freq=0"]
    flags += ["--metrics.log_freq=1"]
    losses = []
    for _ in range(2):
        code, out, err = run_script("train.py", *flags, "--training.steps=4")
        assert code == 0, err
        losses.append([record["loss"] for record in read_metrics(tmp_path / "outputs/run")])
        state = json.loads((tmp_path / "outputs/run/checkpoint/step-00000004/loader_rank0.json").read_text())
        shutil.rmtree(tmp_path / "outputs/run/checkpoint/step-00000004")  # as if the run had been killed after step 3
    assert "resumed at step 2" in out and losses[0] == losses[1] and len(losses[0]) == 4
    assert state.keys() == {"world_size", "num_workers", "loader"}


def test_a_checkpoint_from_before_a_number_was_registered_gives_it_its_first_value() -> None:
    counter = Counter()
    counter.count = 100
    state = RunState(Progress(), tensors={}, numbers=[counter])
    counter.count = 7
    state.load(Snapshot({}, Progress(step=2).state_dict(), {}))
    assert (state.progress.step, counter.count) == (2, 100)


class CountingSGD(torch.optim.SGD):
    """Counts steps in its groups, as Prodigy and ScheduleFree do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([{"params": parameters, "count": 0}], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 1 + group["count"]
            group["count"] += 1


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.5),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.1, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
        CountingSGD,
    ],
    ids=["SGD", "NAdam", "AdamW", "CountingSGD"],
)
def test_a_checkpoint_before_the_first_step_changes_no_training(make: Any) -> None:
    """The state that torch makes for a checkpoint is not always that of a new optimizer."""
    weights = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = make(model.parameters())
        if saves:
            tensors = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}
            state = RunState(Progress(), tensors=tensors)
            snapshot = state.snapshot()
            assert not optimizer.state
            state.load(snapshot)
            assert not optimizer.state
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), step + 1.0)).square().sum().backward()
            optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
