# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`training.float32_matmul_precision`: set in the run and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchditan.extras.evaluation.evaluator import Evaluator
from torchditan.extras.evaluation.metric import Pictures
from torchditan.extras.latents.latent_space import decode_with
from torchditan.run.reading import read_config
from torchditan.trainer import Trainer

if TYPE_CHECKING:
    from tests.conftest import Train

BACKENDS: Any = torch.backends
SETTINGS = {"highest": ("ieee", "ieee"), "medium": ("tf32", "bf16")}
"""Precision of products on CUDA and on a CPU."""


def settings() -> tuple[str, str]:
    return BACKENDS.cuda.matmul.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision


@pytest.fixture
def in_medium() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_run_computes_in_its_precision_records_it_and_resets_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def train_step(*arguments: Any) -> Any:
        seen.append(settings())
        return plain_step(*arguments)

    plain_step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", train_step)
    torch.set_float32_matmul_precision("high")  # as the container images of a vendor set it
    train("run", "--training.float32_matmul_precision=medium", "--training.steps=2")
    assert seen == [SETTINGS["medium"]] * 2
    assert settings() == SETTINGS["highest"]
    stored = read_config(tmp_path / "run")
    assert stored["trajectory"]["training.float32_matmul_precision"] == "medium"


class Recorder:
    """In place of a metric or an autoencoder: the precision at each call."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def update(self, pictures: Pictures) -> None:
        self.seen.append(settings())

    def compute(self) -> dict[str, Any]:
        self.seen.append(settings())
        return {}

    def forget(self, source: str) -> None:
        pass

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.seen.append(settings())
        return latents


@pytest.mark.usefixtures("in_medium")
def test_metrics_and_autoencoders_compute_in_float32_inside_a_run() -> None:
    recorder: Any = Recorder()

    def drawn() -> Iterator[Pictures]:
        assert settings() == SETTINGS["medium"], "the model draws in the precision of the run"
        yield Pictures(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), None, torch.tensor([0]), "generated")
        assert settings() == SETTINGS["medium"]

    given: dict[str, Any] = {"class_names": [], "prompts_of": None, "num_samples": 1, "image_size": (8, 8), "seed": 0}
    evaluator = Evaluator(None, [], {}, decode=recorder.decode, device=torch.device("cpu"), **given)
    evaluator.metrics = [recorder]
    evaluator.show(drawn())
    evaluator.compute()
    decode_with(recorder, torch.zeros(1, 4, 2, 2))
    assert recorder.seen == [SETTINGS["highest"]] * 3
    assert settings() == SETTINGS["medium"]
