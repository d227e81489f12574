# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A dump folder that is not the same folder on all machines is refused, and one that shows files late is not."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tiny_runs

from torchditan import trainer
from torchditan.distributed.process_group import Rank
from torchditan.run.directory import RunDirectory

if TYPE_CHECKING:
    from tests.conftest import RunDistributed

SCRIPT = """
import os, runpy, sys
from torchditan import trainer
trainer._SHARED_WITHIN_S = 0.1
sys.argv += [f"--job.dump_folder={os.environ['RANK']}"]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """The run directory of rank 0. What the ranks send each other is what rank 0 and this rank have."""
    directory = RunDirectory(tmp_path / "shared" / "run", is_writer=True)
    directory.open({}, trajectory={})
    monkeypatch.setattr(trainer, "from_rank_0", lambda value: directory.start_mark())
    monkeypatch.setattr(trainer, "raise_on_all_ranks", lambda error: raise_if(error))
    return directory


def raise_if(error: Exception | None) -> None:
    if error is not None:
        raise error


def job_of_rank_1(folder: Path) -> Any:
    directory = RunDirectory(folder / "run", is_writer=False)
    config = SimpleNamespace(job=SimpleNamespace(dump_folder=str(folder)))
    return SimpleNamespace(rank=Rank(rank=1, local_rank=0, world_size=2), run_directory=directory, config=config)


def test_a_file_server_may_show_the_run_late(opened: RunDirectory, tmp_path: Path) -> None:
    late = tmp_path / "late"
    showing = threading.Timer(0.3, lambda: late.symlink_to(tmp_path / "shared"))
    showing.start()
    trainer.check_shared_folder(job_of_rank_1(late))
    showing.join()


def test_ranks_with_folders_of_their_own_do_not_train(tmp_path: Path, run_distributed: RunDistributed) -> None:
    (tmp_path / "of_rank.py").write_text(SCRIPT)
    train = Path(__file__).parents[2] / "train.py"
    finished = run_distributed([tmp_path / "of_rank.py", train, *tiny_runs.TINY], 2, cwd=tmp_path)
    assert finished.returncode != 0
    assert 'job.dump_folder = "1": rank 1 on ' in finished.stderr
    assert not list(tmp_path.glob("*/*/metrics.jsonl"))
