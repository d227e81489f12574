# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torch.compile of blocks and of the whole model: what is refused, and the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from refusals import refused
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchditan.config.loader import load_config
from torchditan.config.options import Compile, Model
from torchditan.distributed.compilation import check_compile
from torchditan.distributed.parallelize import parallelize
from torchditan.models import build_model_spec

BATCH = 2


@pytest.fixture(autouse=True)
def new_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def built(mesh: DeviceMesh, **options: Any) -> Any:
    """A model of two blocks with random weights. The official preset has a frozen parameter outside them."""
    spec = build_model_spec(
        Model(flavor="debugmodel", preset="official", patch_size=4, overrides=("depth=2",)),
        sample_shape=(4, 8, 8),
        num_classes=10,
    )
    with torch.device("meta"):
        model: Any = spec.build()
    parallelize(model, blocks=spec.blocks(model), mesh=mesh, **{"param_dtype": torch.float32, **options})
    model.to_empty(device="cpu")
    model.init_weights(0)
    with torch.no_grad():  # adaLN-zero would hide most gradients
        for number, parameter in enumerate(model.parameters()):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.requires_grad:
                local.add_(torch.randn(local.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    return model


def loss_of(model: Any, seed: int, batch: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_t, target = torch.randn(2, batch, 4, 8, 8, generator=generator)
    label = torch.randint(0, 11, (batch,), generator=generator)
    prediction = model(x_t, torch.rand(batch, generator=generator), {"class_label": label})
    return (prediction[:, :4].float() - target).square().mean()


def check(*flags: str, num_shards: int = 1) -> None:
    check_compile(load_config(["--training.compile", *flags]), num_shards=num_shards)


MODEL = "--compile.scope=model"


def test_what_cannot_be_compiled_together_is_refused() -> None:
    check(MODEL)
    with refused('compile.backend = "inductr"', "inductor"):
        check("--compile.backend=inductr")
    with refused('compile.mode = "reduce-overhead"', "default"):
        check("--compile.mode=reduce-overhead")
    for flags, mention, where in (
        ([], "4 ranks", {"num_shards": 4}),
        (["--training.enable_cpu_offload"], "training.enable_cpu_offload", {}),
        (["--lora.rank=4", "--model.name=flux", "--model.flavor=debugmodel"], "LoRA", {}),
    ):
        with refused('compile.scope = "model"', mention, "block"):
            check(MODEL, *flags, **where)


def start(_rank: int, number: int, folder: str) -> None:
    """One step of compiled blocks in a new process, with the checkpointing that is hardest to cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        options = {"activation_checkpoint": "selective", "selective_ac_option": "op"}
        loss_of(built(mesh, compile=Compile(), **options), 0).backward()
    finally:
        dist.destroy_process_group()
    found = {name: dict(counters[name]) for name in ("aot_autograd", "inductor")}
    Path(folder, f"{number}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server")
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    for number in range(2):  # one after the other: a restart, or a rank that starts later
        mp.start_processes(start, (number, str(tmp_path)), nprocs=1, start_method="forkserver")
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert first["aot_autograd"]["autograd_cache_miss"] == 1 and first["aot_autograd"]["autograd_cache_saved"] == 1
    assert second["aot_autograd"]["autograd_cache_hit"] == 1
    assert not second["aot_autograd"].get("autograd_cache_miss") and not second["inductor"].get("fxgraph_cache_miss")
