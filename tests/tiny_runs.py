# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Flags for runs of a tiny model on digits. The fixture `train` of conftest.py has them too."""

from __future__ import annotations

from pathlib import Path

TINY = [
    "--model.flavor=debugmodel",
    "--model.patch_size=2",
    "--dataset.num_workers=0",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=8",
    "--training.steps=6",
    "--optimizer.lr=1e-3",
    "--metrics.log_freq=1",
    "--metrics.enable_sampling=false",
    "--validation.freq=0",
    "--checkpoint.save_final=false",
]
KEEP = ["--checkpoint.enable_checkpoint", "--checkpoint.save_final=true"]
"""Writes checkpoints in place of nothing."""


def job(run: Path, *flags: str) -> list[str]:
    """The flags of train.py for a run in this folder. The last of equal flags counts."""
    return [*TINY, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


def assert_same_state(one: Path, two: Path, *, step: int) -> None:
    """The checkpoints of two runs at this step are equal to the bit."""
    import torch  # here, because conftest.py imports this file before it limits torch's threads

    from torchditan.checkpoint.loading import read_state

    expected, found = (read_state(run / f"checkpoint/step-{step:08d}") for run in (one, two))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
