# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The versions of torch that the package accepts, and what differs between them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchditan.config.errors import ConfigError
from torchditan.distributed.torch_versions import check_torch, is_within, set_group_timeout

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0a0+1234abc.nv26.10", True),  # as in a container of NVIDIA
        ("2.16.0.dev20261101", False),
    ],
)
def test_the_range_of_the_metadata_decides(version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["torchao>=3", "torch<2.16,>=2.11", "numpy>=1.26"])
    monkeypatch.setattr(metadata, "version", {"torch": version}.get)
    assert is_within(version, "torch<2.16,>=2.11") is accepted
    if accepted:
        check_torch()
        return
    with pytest.raises(
        ConfigError, match=r"^torch = .*must be >=2\.11,<2\.16.*pip install 'torch>=2\.11,<2\.16'"
    ) as found:
        check_torch()
    assert "\n" not in str(found.value) and version in str(found.value)


def test_a_clone_that_is_not_installed_accepts_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(package: str) -> Any:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "requires", requires)
    monkeypatch.setattr(metadata, "version", lambda _: "9.9")
    check_torch()


def test_a_run_with_a_torch_outside_the_range_ends_with_one_line_before_it_imports_torch(tmp_path: Path) -> None:
    for name, lines in {
        "torch": "Version: 9.9",
        "torchditan": "Version: 0.1.0\nRequires-Dist: torch<2.16,>=2.11",
    }.items():
        folder = tmp_path / f"{name}-{'9.9' if name == 'torch' else '0.1.0'}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n{lines}\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    command = [sys.executable, "-m", "torchditan", "train", "quickstart"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith('error: torch = "9.9": must be >=2.11,<2.16')
    assert len(run.stderr.splitlines()) == 1 and not run.stdout


def test_the_timeout_of_one_group_changes_without_a_warning() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=100))
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=50))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            set_group_timeout(group, timedelta(seconds=7))
        timeouts: list[Any] = [one._get_backend(torch.device("cpu")) for one in (group, dist.group.WORLD)]
        assert [backend.options._timeout.total_seconds() for backend in timeouts] == [7, 100]
    finally:
        dist.destroy_process_group()
