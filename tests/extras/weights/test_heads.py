# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Weights of a run whose loss has a head: samples, exports and new runs leave the head out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from minimal_parts import ALIGNED
from tiny_runs import KEEP

import torchditan
from torchditan.checkpoint.loading import read_state

if TYPE_CHECKING:
    from tests.conftest import RunScript, Train
    from tests.zoo import Zoo


def test_the_weights_go_everywhere_without_the_head(
    zoo: Zoo, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    with_head = f"--diffusion.ingredients={ALIGNED}"
    train("with head", with_head, "--training.steps=2", *KEEP)
    assert run_script("torchditan", "export", "with head", "w.safetensors").code == 0
    stored = read_state(tmp_path / "with head/checkpoint/step-00000002", "ema.")
    expected = {name: value for name, value in stored.items() if not name.startswith("ema.heads.")}
    for source in ("with head", "w.safetensors"):
        model = torchditan.load(source).model
        assert {f"ema.{name}" for name in model.state_dict()} == expected.keys() != stored.keys()
        assert all(torch.equal(model.state_dict()[name.removeprefix("ema.")], expected[name]) for name in expected)

    start = ["--training.steps=1", "--checkpoint.initial_load_path"]
    out = train("plain", *start, "with head").out
    assert "started from the weights of with head, " in out and "new heads" not in out
    out = train("new head", with_head, *start, str(zoo("digits"))).out
    assert f"started from the weights of {zoo('digits')}, " in out and "; new heads.early\n" in out
