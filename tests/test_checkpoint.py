# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The checkpoint manager: memory of copies that are written beside the training, and deletion of old checkpoints."""

from __future__ import annotations

import gc
import itertools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.cuda._pin_memory_utils as pin_memory_utils
import torch.distributed as dist
from torch import nn

from torchditan.checkpoint import CheckpointManager, Progress, read_state
from torchditan.config import Config

MakeManager = Callable[[Config], CheckpointManager]


@pytest.fixture
def make_manager(tmp_path: Path) -> Iterator[MakeManager]:
    """`make_manager(config)`: that of a small model, in one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(config: Config) -> CheckpointManager:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 70), nn.LayerNorm(70), nn.Linear(70, 3))
        optimizer = torch.optim.AdamW(model.parameters())
        return CheckpointManager(
            tmp_path, model=model, ema=None, optimizer=optimizer, config=config, timeout_seconds=60
        )

    yield make
    dist.destroy_process_group()


def test_pinned_copies_share_no_memory_page_and_are_allocated_once(
    make_manager: MakeManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, int] = {}
    unpinned: list[int] = []
    monkeypatch.setattr(pin_memory_utils, "pin_memory", lambda pointer, size: pinned.update({pointer: size}))
    monkeypatch.setattr(pin_memory_utils, "unpin_memory", unpinned.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    config = Config()
    config.checkpoint.async_mode = "async_with_pinned_mem"
    manager = make_manager(config)
    for step in (1, 2):
        torch.nn.init.constant_(next(manager.model.parameters()), step)
        manager.save(Progress(step=step))
        manager.wait()
        assert torch.all(read_state(tmp_path / f"step-{step:08d}", "model.")["model.0.weight"] == step)
        if step == 1:
            first = dict(pinned)
    assert len(first) == 18  # 6 parameters with two moments each; steps are too small to pin
    assert pinned == first and not unpinned
    assert all(pointer % mmap.PAGESIZE == 0 for pointer in first)
    pages = [range(pointer // mmap.PAGESIZE, -(-(pointer + size) // mmap.PAGESIZE)) for pointer, size in first.items()]
    assert not any(set(one) & set(other) for one, other in itertools.combinations(pages, 2))
    del manager
    gc.collect()
    assert sorted(unpinned) == sorted(first)
