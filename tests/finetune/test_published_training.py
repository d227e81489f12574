# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Every published family trains: 20 steps of a tiny random model in one process, and sharded over two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("diffusers")

if TYPE_CHECKING:
    from tests.conftest import RunDistributed

HERE = Path(__file__).resolve().parent
TRAIN = f"""
import json, sys
from pathlib import Path
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent.parent)!r}]
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from debugmodels import MODELS, spec_of
from torchditan.config.options import Diffusion, Optimizer
from torchditan.diffusion.objectives import build_objective
from torchditan.distributed.parallelize import parallelize
from torchditan.optim.optimizers import clip_grad_norm
from torchditan.optim.optimizers import build_optimizer
from torchditan.randomness import draw, normal

STEPS, GLOBAL_BATCH, IMAGES = 20, 4, 4
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
share, found = GLOBAL_BATCH // world_size, {{}}
for name, flavor in MODELS:
    spec = spec_of(name, flavor)
    model = spec.build()
    parallelize(model, blocks=spec.blocks(model), mesh=mesh, param_dtype=torch.float32)
    model.to_empty(device="cpu")
    model.init_weights(0)
    optimizer = build_optimizer(model, Optimizer(lr=2e-3))
    objective = build_objective(Diffusion(label_dropout=0.1, timestep_shift=1.0), spec)
    losses = []
    for step in range(STEPS):
        positions = [step * GLOBAL_BATCH + rank * share + i for i in range(share)]
        images = [position % IMAGES for position in positions]
        batch = {{"sample": normal(0, "image", images, spec.sample_shape), "index": torch.tensor(positions)}}
        for key, (shape, dtype) in spec.conditioning.tensors.items():
            value = normal(0, key, images, shape)
            batch[key] = value.to(dtype) if dtype.is_floating_point else torch.ones_like(value, dtype=dtype)
        loss = objective.loss(model, batch, draw(0, positions, spec.sample_shape)).sum() / share
        loss.backward()
        clip_grad_norm([parameter for parameter in model.parameters() if parameter.requires_grad], max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        losses.append(total.item())
    found[f"{{name}} {{flavor}}"] = losses
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_twenty_steps_in_one_process_and_sharded_over_two(run_distributed: RunDistributed, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    curves = []
    for world_size in (1, 2):
        out = tmp_path / f"{world_size}.json"
        result = run_distributed([script, out], world_size, timeout=400, env={"OMP_NUM_THREADS": "1"})
        assert result.returncode == 0, result.stderr
        curves.append(json.loads(out.read_text()))
    for model, alone in curves[0].items():
        largest = max(abs(a - b) / a for a, b in zip(alone, curves[1][model], strict=True))
        print(f"{model}: loss {alone[0]:.3f} -> {alone[-1]:.3f}, two ranks within {largest:.1e}")
    for model, alone in curves[0].items():
        assert curves[1][model] == pytest.approx(alone, rel=1e-5), model
        assert sum(alone[-4:]) < sum(alone[:4]), model
