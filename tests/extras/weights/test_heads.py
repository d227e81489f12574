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


def test_the_weights_go_everywhere_without_the_head(tmp_path: Path, train: Train, run_script: RunScript) -> None:
    with_head = f"--diffusion.ingredients={ALIGNED}"
    train("with head", with_head, "--training.steps=2", *KEEP)
    train("plain", "--training.steps=1", *KEEP)
    assert run_script("torchditan", "generate", "with head", "--classes=1", "--sampling.num_steps=2").code == 0
    assert run_script("torchditan", "export", "with head", "w.safetensors").code == 0
    assert run_script("torchditan", "import", "w.safetensors", "imported").code == 0
    stored = read_state(tmp_path / "with head/checkpoint/step-00000002", "ema.")
    model = torchditan.load("imported").model
    expected = {name: value for name, value in stored.items() if not name.startswith("ema.heads.")}
    assert {f"ema.{name}" for name in model.state_dict()} == expected.keys() != stored.keys()
    assert all(torch.equal(model.state_dict()[name.removeprefix("ema.")], value) for name, value in expected.items())

    start = ["--training.steps=1", "--checkpoint.initial_load_path"]
    for name, source, flags in [
        ("plain from a run with a head", "with head", []),
        ("plain from a file", "w.safetensors", []),
        ("with a head from plain", "plain", [with_head]),
        ("with a head from an import", "imported", [with_head]),
        ("with a head from a file", "w.safetensors", [with_head]),
    ]:
        out = train(name, *flags, *start, source).out
        assert f"started from the weights of {source}, " in out
        assert ("; new heads.early\n" in out) == bool(flags), out
