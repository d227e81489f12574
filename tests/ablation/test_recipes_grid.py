# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The ablation grid that measured the ingredients of docs/recipes.md."""

from __future__ import annotations

from torchditan.ablation.grid import load_grid


def test_the_grid_of_the_recipes_page_keeps_what_was_measured() -> None:
    configs = [run.config for run in load_grid("recipes").runs()]  # their base, earth, has another recipe by now
    assert len(configs) == 24
    assert {(config.optimizer.lr, config.optimizer.beta2) for config in configs} == {(1e-3, 0.99)}
    assert {(config.optimizer.ns_dtype, config.lr_scheduler.warmup_steps) for config in configs} == {("bfloat16", 100)}
    assert sum(config.diffusion.timestep_sampling == "logit_normal" for config in configs) == 21
    assert sum(config.optimizer.name == "AdamW" for config in configs) == 21
    assert {(config.training.global_batch_size, config.training.steps) for config in configs} == {(32, 640)}
