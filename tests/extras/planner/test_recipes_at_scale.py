# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/recipes.md: memory and lower bounds of train_configs/recipes/ are those of the planner, in some of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchditan.config.loader import load_config
from torchditan.extras.planner.plan import plan_run

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"


def row(recipe: str, flavor: str, device: str, num_devices: int, batch_size: int) -> str:
    flags = ["--model.flavor", flavor, "--training.batch_size", str(batch_size)]
    config = load_config(["--job.config_file", f"recipes/{recipe}", *flags])
    assert config.training.global_batch_size == 256
    plan = plan_run(config, device=device, num_devices=num_devices)
    assert plan.fits and plan.min_step_time_s is not None
    hours = plan.min_step_time_s * config.training.steps / 3600
    name = f"{flavor}/{config.model.patch_size}, {recipe.removeprefix('imagenet256_')}"
    cells = [name, f"{num_devices} x {device}", batch_size, f"{plan.peak_memory_gib:.1f} GiB"]
    cells += [f"{1e3 * plan.min_step_time_s:,.1f} ms", f"{hours:.1f} h"]
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize(
    ("recipe", "flavor", "device", "num_devices", "batch_size"),
    [
        ("imagenet256_latents", "DiT-B", "h100", 8, 32),
        ("imagenet256_latents", "DiT-XL", "rtx4090", 1, 8),
        ("imagenet256_pixels", "DiT-L", "h100", 8, 32),
    ],
)
def test_memory_and_lower_bounds_are_those_of_the_planner(
    recipe: str, flavor: str, device: str, num_devices: int, batch_size: int
) -> None:
    expected = row(recipe, flavor, device, num_devices, batch_size)
    assert expected in PAGE.read_text(encoding="utf-8").splitlines(), expected


@pytest.mark.parametrize("recipe", ["sit_b2", "meanflow_cifar10"])
def test_the_step_of_a_published_recipe_is_that_of_the_planner(recipe: str) -> None:
    plan = plan_run(load_config(["--job.config_file", f"recipes/{recipe}"]), device="h100", num_devices=8)
    assert plan.fits and plan.min_step_time_s is not None
    line = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"[`recipes/{recipe}`]" in line)
    assert line.endswith(f"| {1e3 * plan.min_step_time_s:.1f} ms |"), line
