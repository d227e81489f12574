# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Apple GPUs (mps) and AMD GPUs (cuda, with torch.version.hip), without either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import assert_refused

from torchditan.config.options import Float8
from torchditan.distributed.float8 import check_float8
from torchditan.distributed.precision import precision_for
from torchditan.distributed.process_group import Rank, check_devices
from torchditan.errors import ConfigError
from torchditan.extras.weights.trained_model import _device
from torchditan.optim.divergence import LossSpikes

if TYPE_CHECKING:
    from tests.conftest import RunScript

MPS, CUDA = torch.device("mps"), torch.device("cuda", 0)


def test_mps_refuses_in_one_line_what_it_lacks(monkeypatch: pytest.MonkeyPatch, run_script: RunScript) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    outcome = run_script("torchditan", "train", "quickstart", "--training.compile")
    assert outcome.code == 2
    assert_refused(outcome.err, "training.compile = true", ["MPS"])


def test_sums_in_float64_are_on_the_cpu_for_mps() -> None:
    spikes = LossSpikes(MPS)
    assert [spikes.judge(torch.tensor(loss)).item() for loss in [1.0] * 25 + [9.0]] == [False] * 25 + [True]


def test_mps_refuses_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    check_devices(Rank(0, 0, 1))
    with pytest.raises(ConfigError, match=r"nproc_per_node.*= 2: .*must be 1"):
        check_devices(Rank(1, 1, 2))


def test_mps_is_used_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert Rank(0, 0, 1).device.type == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert Rank(0, 0, 1).device.type == _device(None).type == _device("mps").type == "mps"
    assert precision_for(MPS) == "float32"


def amd(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    properties: Any = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # of an MI250X
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct")


def test_float8_needs_an_amd_gpu_that_multiplies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    config = Float8(enable_float8_linear=True)
    amd(monkeypatch, "gfx942")
    check_float8(config, device=CUDA)
    amd(monkeypatch, "gfx90a")
    with pytest.raises(ConfigError, match="AMD Instinct has no float8 products; needs one of gfx942"):
        check_float8(config, device=CUDA)


def test_amd_multiplies_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    amd(monkeypatch, "gfx942")
    assert precision_for(CUDA) == "bfloat16"
