# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The checkpoint manager: copies written during training, deletion of old checkpoints, ranks that load together."""

from __future__ import annotations

import gc
import io
import itertools
import mmap
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.cuda._pin_memory_utils as pin_memory_utils
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from torchditan.checkpoint import manager as checkpoint
from torchditan.checkpoint.files import list_checkpoints, remove, save_tensors
from torchditan.checkpoint.loading import CheckpointReader, DamagedCheckpointError, _IndexUnpickler, read_state
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_state import ModelState, OptimizerState, RunState
from torchditan.config.options import Checkpoint, Config
from torchditan.run.training_progress import Progress

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
        tensors = {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}
        return CheckpointManager(
            tmp_path, RunState(Progress(), tensors=tensors), config=config, trajectory={}, timeout_seconds=60
        )

    yield make
    dist.destroy_process_group()


def save(manager: CheckpointManager, step: int) -> None:
    manager.state.progress.step = step
    manager.save()


def test_pinned_copies_share_no_memory_page_and_are_allocated_once(
    make_manager: MakeManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, int] = {}
    unpinned: list[int] = []
    monkeypatch.setattr(pin_memory_utils, "pin_memory", lambda pointer, size: pinned.update({pointer: size}))
    monkeypatch.setattr(pin_memory_utils, "unpin_memory", unpinned.append)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        manager = make_manager(Config(checkpoint=Checkpoint(async_mode="async_with_pinned_mem")))
    optimizer = manager.state.tensors["optimizer"]
    assert isinstance(optimizer, OptimizerState)
    optimizer.make()  # as the first step does; a CUDA build asks an accelerator that it has for its stream
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    for step in (1, 2):
        manager.state.tensors["model"].state_dict()["0.weight"].fill_(step)
        save(manager, step)
        manager.wait()
        assert torch.all(read_state(tmp_path / f"step-{step:08d}", "model.")["model.0.weight"] == step)
        if step == 1:
            first = dict(pinned)
    assert len(first) == 18  # 6 parameters with two moments each; steps are too small to pin
    assert pinned == first and not unpinned
    assert all(pointer % mmap.PAGESIZE == 0 for pointer in first)
    pages = [range(pointer // mmap.PAGESIZE, -(-(pointer + size) // mmap.PAGESIZE)) for pointer, size in first.items()]
    assert not any(set(one) & set(other) for one, other in itertools.combinations(pages, 2))
    if manager._cleaning is not None:
        manager._cleaning.join()  # this thread refers to the manager
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
        save(manager, step)
    assert found == [("step-00000001", ["step-00000001", "step-00000002"])]
    may_go_on.set()
    manager.close()
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
    state = RunState(Progress(), tensors={"model": ModelState(model)})
    manager = CheckpointManager(
        Path(folder) / "checkpoint", state, config=Config(), trajectory={}, timeout_seconds=20, warn=warnings.append
    )
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
    assert state.progress.step == 1
    assert torch.all(model.weight == 1)
    if rank == 0:
        assert [text.partition("step-00000002 ")[2] for text in warnings] == [
            "is not used: .metadata cannot be read (OSError); continuing from step-00000001"
        ]
    dist.destroy_process_group()


def save_and_load_with_two_threads(rank: int, folder: str) -> None:
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))  # its plan is large enough for a parallel copy
    state = RunState(Progress(), tensors={"model": ModelState(model)})
    manager = CheckpointManager(Path(folder), state, config=Config(), trajectory={}, timeout_seconds=20)
    torch.ones(100_000).add(1)  # starts the worker of this thread
    before = number_of_threads()
    for step in (1, 2):
        save(manager, step)
    assert manager.load_latest()
    manager.close()
    deadline = time.monotonic() + 5  # the system may still remove threads that have ended
    while number_of_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert number_of_threads() == before
    dist.destroy_process_group()


def number_of_threads() -> int:
    """Threads of this process, with those that Python did not start."""
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
@pytest.mark.usefixtures("fork_server")
def test_one_process_starts_no_openmp_workers_besides_those_of_training(tmp_path: Path) -> None:
    """With more threads than cores, GNU OpenMP lets all workers sleep between regions, and training slows down."""
    mp.start_processes(save_and_load_with_two_threads, args=(str(tmp_path),), nprocs=1, start_method="forkserver")


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_ranks_agree_on_the_index_before_they_load(tmp_path: Path) -> None:
    """A rank that cannot read it leaves no other rank waiting in the collectives of the load."""
    mp.start_processes(load_what_one_rank_cannot_read, args=(2, str(tmp_path)), nprocs=2, start_method="forkserver")


SLOW_STORAGE = """
import sys, time
sys.path.insert(0, {repository!r})
sys.argv = ["train.py", *{arguments!r}]
import resource
import shutil
import signal
from torchditan.commands import train
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


@pytest.mark.parametrize(
    "async_mode", [pytest.param("disabled", marks=pytest.mark.nightly), pytest.param("async", marks=pytest.mark.slow)]
)
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
    with pytest.raises(KeyError):
        _IndexUnpickler(io.BytesIO(pickle.dumps(_Attribute(_MEM_FORMAT_ENCODING, "TORCH_OTHER")))).load()
