# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The checkpoint manager: deletion of old checkpoints, full disks, ranks that load together; and the index."""

from __future__ import annotations

import io
import pickle
import resource
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_runs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from torchditan.checkpoint import manager as checkpoint
from torchditan.checkpoint.files import remove_discarded, save_tensors
from torchditan.checkpoint.loading import CheckpointReader, DamagedCheckpointError, _IndexUnpickler
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_state import ModelState, RunState
from torchditan.config.options import Checkpoint, Config
from torchditan.run.training_progress import Progress

if TYPE_CHECKING:
    from tests.conftest import RunDistributed

REPOSITORY = Path(__file__).resolve().parents[2]


def make_manager(folder: Path, model: nn.Module, **options: Any) -> CheckpointManager:
    state = RunState(Progress(), tensors={"model": ModelState(model)})
    config = Config(checkpoint=Checkpoint(keep_latest_k=options.pop("keep_latest_k", 2)))
    return CheckpointManager(folder, state, config=config, trajectory={}, timeout_seconds=20, **options)


def save(manager: CheckpointManager, step: int) -> None:
    manager.state.progress.step = step
    manager.save()


def test_old_checkpoints_are_deleted_beside_the_training_once_the_new_one_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, found = threading.Event(), []

    def remove_slowly(folder: Path) -> None:
        names = {path.name for path in folder.iterdir()}
        if "step-00000001.deleted" in names:
            found.append("step-00000002" in names)
            assert may_go_on.wait(60)
        remove_discarded(folder)

    monkeypatch.setattr(checkpoint, "remove_discarded", remove_slowly)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        manager = make_manager(tmp_path, nn.Linear(8, 4), keep_latest_k=1)
        for step in (1, 2, 3):  # which none of the deletions holds up
            save(manager, step)
        may_go_on.set()
        manager.close()
    finally:
        dist.destroy_process_group()
    assert found == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("num_values", [10, 5_000_000])
def test_the_error_of_a_full_disk_is_known_for_small_and_for_large_tensors(num_values: int, tmp_path: Path) -> None:
    """torch.save hides it for a tensor that is larger than the buffer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            save_tensors({"weight": torch.zeros(num_values)}, tmp_path, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def load_what_one_rank_cannot_read(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    warnings: list[str] = []
    model = nn.Linear(8, 4)
    manager = make_manager(Path(folder) / "checkpoint", model, warn=warnings.append)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        save(manager, step)
    read_metadata = CheckpointReader.read_metadata

    def fail(self: CheckpointReader) -> Any:
        if rank == 1 and Path(self.path).name == "step-00000002":
            raise DamagedCheckpointError(".metadata cannot be read (OSError)")
        return read_metadata(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "read_metadata", fail)
        assert manager.load_latest()
    assert manager.state.progress.step == 1
    assert torch.all(model.weight == 1)
    assert [text.partition("step-00000002 ")[2] for text in warnings] == [
        "is not used: .metadata cannot be read (OSError); continuing from step-00000001"
    ] * (rank == 0)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_ranks_agree_on_the_index_before_they_load(tmp_path: Path) -> None:
    """A rank that cannot read it leaves no other rank waiting in the collectives of the load."""
    mp.start_processes(load_what_one_rank_cannot_read, args=(2, str(tmp_path)), nprocs=2, start_method="forkserver")


SLOW_STORAGE = """
import shutil, sys, time
from torchditan.checkpoint import files
from torchditan.commands import train
from torchditan.supervision.exit_status import run_job

rmtree, slept = shutil.rmtree, []

def slow_rmtree(path, **options):
    if str(path).endswith(".deleted") and path.exists() and not slept:
        slept.append(path)
        time.sleep(8)
    rmtree(path, **options)

files.shutil.rmtree = slow_rmtree
sys.exit(run_job(train.main))
"""


@pytest.mark.slow
def test_slow_deletion_times_no_rank_out(tmp_path: Path, run_distributed: RunDistributed) -> None:
    flags = [*tiny_runs.KEEP, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"]
    flags += ["--checkpoint.async_mode=async", "--comm.train_timeout_seconds=3"]
    (tmp_path / "slow_storage.py").write_text(SLOW_STORAGE)
    job = tiny_runs.job(tmp_path / "run", *flags)
    result = run_distributed([tmp_path / "slow_storage.py", *job], 2)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["step-00000006"]


class _Attribute:
    """Pickled as `getattr(owner, name)`."""

    def __init__(self, owner: Any, name: str) -> None:
        self.parts = (owner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.parts


def test_an_index_that_python_3_11_2_wrote_is_read_and_other_attributes_are_refused() -> None:
    """Debian's Python pickles a member of an enumeration by `getattr`; 3.11.7 does not."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    stored = pickle.dumps(_Attribute(_MEM_FORMAT_ENCODING, member.name))
    assert _IndexUnpickler(io.BytesIO(stored)).load() is member
    for hostile in (_Attribute(torch.Size, "__new__"), _Attribute(_Attribute(Metadata, "__init__"), "__globals__")):
        with pytest.raises(DamagedCheckpointError, match=r"asks for builtins\.getattr, which no checkpoint needs"):
            _IndexUnpickler(io.BytesIO(pickle.dumps(hostile))).load()
