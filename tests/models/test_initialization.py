# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Initial weights: complete, distributed as documented, and the same on every mesh."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchditan.models import Head
from torchditan.models.dit import PRESETS, DiT, DiTConfig


def tiny_config(**options) -> DiTConfig:
    """10 label rows + 1 and 3 x 2 x 2 output rows do not divide by the ranks of every mesh: uneven shards."""
    options = {"num_classes": 10, "norm_type": "layernorm", "position": "sincos", "depth": 2} | options
    sizes = {"width": 36, "num_heads": 3, "patch_size": 2, "input_channels": 3}
    return DiTConfig(image_size=(8, 12), **sizes, **options)


def build_on_meta(config: DiTConfig) -> DiT:
    with torch.device("meta"):
        return DiT(config)


def hash_weights(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(name.encode() + full.contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("conditioning", ["adaln", "adaln_single", "in_context"])
def test_init_weights_leaves_nothing_unset_with_any_options(conditioning):
    for preset, num_classes, norm_type in itertools.product(PRESETS, [0, 5], ["layernorm", "rmsnorm"]):
        options = PRESETS[preset] | {"conditioning": conditioning, "num_classes": num_classes, "norm_type": norm_type}
        model = build_on_meta(tiny_config(**options)).to_empty(device="cpu")
        with torch.no_grad():
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                tensor.fill_(math.nan)
        model.init_weights(seed=0)
        unset = [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]
        assert unset == [], options
        assert not any(tensor.isnan().any() for tensor in model.buffers())


def test_initial_weights_follow_the_documented_distributions():
    config = DiTConfig(
        depth=2, width=256, num_heads=4, patch_size=2, input_channels=4, image_size=(8, 8), num_classes=100
    )
    model = DiT(config)
    model.init_weights(seed=0)
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.endswith("bias") or "adaLN" in name or name == "final_layer.linear.weight":
            assert not weight.any(), name
        elif weight.ndim == 1:
            assert (weight == 1).all(), name
        elif name.startswith(("t_embedder", "y_embedder")):
            assert weight.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(weight.mean().item()) < 0.001, name
        else:
            matrix = weight.flatten(1)
            bound = math.sqrt(6 / sum(matrix.shape))
            assert 0.98 * bound < weight.abs().max().item() <= bound * (1 + 1e-6), name
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name


def with_head(config):
    model = DiT(config)
    model.add_heads({"projection": Head("blocks.0", lambda: torch.nn.Linear(config.width, config.width))})
    return model


@pytest.mark.parametrize("build", [DiT, with_head])
def test_construction_on_a_real_device_initializes(build):
    config = tiny_config(depth=3)
    torch.manual_seed(7)
    model, repeated = build(config), build(config)
    repeated.init_weights(seed=0)
    assert hash_weights(model) == hash_weights(repeated)
    repeated.init_weights(seed=1)
    assert hash_weights(model) != hash_weights(repeated)
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in build(config).parameters())


def test_in_context_residual_projections_start_small():
    model = DiT(tiny_config(conditioning="in_context"))
    model.init_weights(seed=0)
    for block in model.blocks:
        for linear in (block.attn.proj, block.mlp.w3):
            assert linear.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.1)


def test_initial_weights_depend_on_seed_and_name_alone():
    model = DiT(tiny_config())
    model.init_weights(seed=0)
    first = hash_weights(model)
    torch.manual_seed(7)
    torch.rand(3)
    model.init_weights(seed=0)
    assert hash_weights(model) == first
    model.init_weights(seed=1)
    assert hash_weights(model) != first
    assert not torch.equal(model.blocks[0].attn.qkv.weight, model.blocks[1].attn.qkv.weight)

    shallow, deep = DiT(tiny_config()), DiT(DiTConfig(**vars(tiny_config()) | {"depth": 4}))
    shallow.init_weights(0)
    deep.init_weights(0)
    for name, weight in shallow.state_dict().items():
        assert torch.equal(weight, deep.state_dict()[name]), name


def hash_on_meshes(rank: int, world_size: int, meshes: list[tuple[int, int]], folder: str) -> None:
    store = dist.FileStore(f"{folder}/store-{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    hashes = {}
    for degrees in meshes:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard"))
        model = build_on_meta(tiny_config())
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights(seed=3)
        hashes[str(degrees)] = hash_weights(model)
    Path(folder, f"hashes-{world_size}-{rank}.json").write_text(json.dumps(hashes))
    dist.destroy_process_group()


@pytest.mark.usefixtures("fork_server")
def test_weight_hashes_are_equal_on_every_mesh(tmp_path):
    hash_on_meshes(0, 1, [(1, 1)], str(tmp_path))
    mp.start_processes(
        hash_on_meshes, args=(4, [(1, 4), (2, 2), (4, 1)], str(tmp_path)), nprocs=4, start_method="forkserver"
    )
    plain = DiT(tiny_config())
    plain.init_weights(seed=3)
    files = sorted(tmp_path.glob("hashes-*.json"))
    assert len(files) == 5
    for file in files:
        for degrees, digest in json.loads(file.read_text()).items():
            assert digest == hash_weights(plain), (file.name, degrees)
