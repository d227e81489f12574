# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What an objective declares: scalar conditions of the model, heads, and which model lacks them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from refusals import refused

from torchditan.config.loader import load_config
from torchditan.config.options import Config, Diffusion, Model
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.loss_flops import training_flops
from torchditan.diffusion.objectives import Ingredient, Losses, Objective, build_objective
from torchditan.models import Head, ModelSpec, build_model_spec, model_spec_of
from torchditan.models.flops import count_model_flops


class WithLevel(FlowMatching):
    @classmethod
    def scalars(cls, config: Diffusion) -> Mapping[str, float]:
        return {"level": 10.0}


class WithHead(FlowMatching):
    @property
    def heads(self) -> Mapping[str, Head]:
        return {"mean": Head("blocks.1", lambda: torch.nn.Linear(64, 2))}


class Own(Ingredient):
    pass


class NeedsAnAverage(Ingredient):
    @classmethod
    def mistakes(cls, config: Config, objective: type[Objective]) -> Iterator[tuple[str, str]]:
        if not config.ema.enable:
            yield "ema.enable", "must be true"


class OfSize(Ingredient):
    @classmethod
    def scalars(cls, config: Diffusion) -> Mapping[str, float]:
        return {"size": 1.0}


class CallsItsOwnNetwork(FlowMatching):
    """Its loss does not run on the meta device."""

    network = torch.nn.Linear(1, 1)

    def loss(self, *arguments: Any) -> torch.Tensor | Losses:
        _, batch, *_ = arguments
        error: Any = super().loss(*arguments)
        return error + self.network(batch["sample"].mean((1, 2, 3))[:, None])[:, 0]


def spec_of(**options: Any) -> ModelSpec:
    return build_model_spec(Model(flavor="debugmodel"), sample_shape=(2, 8, 8), num_classes=10, **options)


def flux() -> ModelSpec:
    return build_model_spec(Model(name="flux", flavor="debugmodel"), sample_shape=(16, 16, 16), num_classes=0)


@pytest.mark.parametrize("conditioning", ["adaln", "adaln_single", "in_context"])
def test_a_scalar_has_no_effect_before_the_first_step_and_then_one(conditioning: str) -> None:
    model = Model(flavor="debugmodel", conditioning=conditioning)  # type: ignore[arg-type]
    shapes: dict[str, Any] = {"sample_shape": (2, 8, 8), "num_classes": 10}
    plain, scaled = (build_model_spec(model, scalars=found, **shapes) for found in ({}, {"level": 10.0}))
    one, two = plain.build(), scaled.build()
    for parameter in one.parameters():  # no zeros, so that every embedder has an effect
        parameter.data.normal_(std=0.1)
    two.load_state_dict(one.state_dict(), strict=False)
    x, t, cond = torch.randn(3, 2, 8, 8), torch.rand(3), {"class_label": torch.arange(3)}
    levels = [torch.full((3,), value) for value in (0.0, 0.7)]
    for level in levels:
        assert torch.equal(two(x, t, {**cond, "level": level}), one(x, t, cond))
    embedder: Any = two.scalar_embedders
    embedder["level"].mlp[2].weight.data.normal_()
    results = [two(x, t, {**cond, "level": level}) for level in levels]
    assert not torch.allclose(results[0], results[1])
    assert count_model_flops(scaled).total > count_model_flops(plain).total


@pytest.mark.parametrize(("name", "mention"), [("WithLevel", "level"), ("WithHead", "heads")])
def test_a_model_without_room_is_refused_in_one_line(name: str, mention: str) -> None:
    objective = f"{__name__}:{name}"
    with refused(f'diffusion.objective = "{objective}"', mention, "flux"):
        build_objective(Diffusion(objective=objective), flux())
    build_objective(Diffusion(objective=objective), spec_of(scalars={"level": 10.0}))


def test_an_ingredient_without_changes_is_its_base() -> None:
    spec, text = spec_of(), f"{__name__}:Own"
    plain = build_objective(Diffusion(), spec)
    wrapped = build_objective(Diffusion(ingredients=[text, text]), spec)
    assert isinstance(wrapped, Own) and wrapped.root == plain
    for name in ("numbers", "features", "heads", "computes_more"):
        assert getattr(wrapped, name) == getattr(plain, name), name
    sampling = Config().sampling
    assert wrapped.num_evaluations(sampling) == plain.num_evaluations(sampling)


def test_an_ingredient_refuses_options_itself() -> None:
    flag = f"--diffusion.ingredients={__name__}:NeedsAnAverage"
    load_config([flag])
    with refused("ema.enable = false", "true"):
        load_config([flag, "--ema.enable=false"])


def test_an_ingredient_may_declare_scalars() -> None:
    diffusion = Diffusion(objective=f"{__name__}:WithLevel", ingredients=[f"{__name__}:OfSize"])
    config = Config(model=Model(flavor="debugmodel"), diffusion=diffusion)
    spec = model_spec_of(config, sample_shape=(2, 8, 8), num_classes=10)
    assert set(spec.scalars) == {"level", "size"}
    build_objective(diffusion, spec)
    with refused("diffusion.ingredients = ", "size", "dit"):
        build_objective(diffusion, spec_of(scalars={"level": 10.0}))


def test_a_loss_that_cannot_be_counted_does_not_end_the_run() -> None:
    spec, warnings = spec_of(), list[str]()
    config = Diffusion(objective=f"{__name__}:CallsItsOwnNetwork")
    assert training_flops(config, spec, warn=warnings.append) == count_model_flops(spec).total
    assert len(warnings) == 1 and "CallsItsOwnNetwork does not run on the meta device" in warnings[0]
