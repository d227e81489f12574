# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The checkpoint manager: memory of copies written during training, and deletion of old checkpoints."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.cuda._pin_memory_utils as pin_memory_utils
import torch.distributed as dist
from torch import nn

from torchditan.checkpoint import manager as checkpoint
from torchditan.checkpoint.files import list_checkpoints, remove
from torchditan.checkpoint.loading import Progress, read_state
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.config.options import Checkpoint, Config

if TYPE_CHECKING:
    from tests.conftest import RunDistributed

REPOSITORY = Path(__file__).resolve().parents[2]

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
    manager = make_manager(Config(checkpoint=Checkpoint(async_mode="async_with_pinned_mem")))
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


def test_old_checkpoints_are_deleted_beside_the_training_once_the_new_one_is_published(
    make_manager: MakeManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, found = threading.Event(), []

    def remove_slowly(old: Path) -> None:
        found.append((old.name, [path.name for path in list_checkpoints(tmp_path)]))
        assert may_go_on.wait(60)
        remove(old)

    monkeypatch.setattr(checkpoint, "remove", remove_slowly)
    manager = make_manager(Config(checkpoint=Checkpoint(keep_latest_k=1)))
    for step in (1, 2, 3):  # which none of the deletions holds up
        manager.save(Progress(step=step))
    assert found == [("step-00000001", ["step-00000001", "step-00000002"])]
    may_go_on.set()
    manager.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


SLOW_STORAGE = """
import sys, time
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *{arguments!r}]
import shutil
import train
from torchditan.checkpoint import files as checkpoint_files
from torchditan.supervision.exit_status import run_job

rmtree, slept = shutil.rmtree, []

def slow_rmtree(path, **options):
    if str(path).endswith(".deleted") and path.exists() and not slept:
        slept.append(path)
        time.sleep(8)
    rmtree(path, **options)

checkpoint_files.shutil.rmtree = slow_rmtree
sys.exit(run_job(train.main))
"""


@pytest.mark.slow
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_slow_deletion_times_no_rank_out(async_mode: str, tmp_path: Path, run_distributed: RunDistributed) -> None:
    arguments = ["--model.flavor=debugmodel", "--dataset.dataset_name=digits", "--dataset.num_workers=0"]
    arguments += ["--training.steps=10", "--training.batch_size=4", "--metrics.enable_sampling=false"]
    arguments += ["--checkpoint.enable_checkpoint", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"]
    arguments += [f"--checkpoint.async_mode={async_mode}", "--comm.train_timeout_seconds=3"]
    arguments += [f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run"]
    script = tmp_path / "slow_storage.py"
    script.write_text(SLOW_STORAGE.format(repository=str(REPOSITORY), arguments=arguments))
    result = run_distributed([script], 2)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-00000010"]
