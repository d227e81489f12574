# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Self-alignment: its loss against a loop in float64, its times and numbers, FLOPs, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from refusals import refused
from torch import nn

from torchditan.config.loader import load_config
from torchditan.config.options import Diffusion, Model
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.objectives import build_objective, uniform_objective, validation_objective
from torchditan.ingredients.self_alignment import SelfAlignment
from torchditan.models import ModelSpec, build_model_spec, model_spec_of
from torchditan.models.flops import count_model_flops
from torchditan.randomness import NOISE_TIMESTEP_DROPOUT, Kind, Randomness, draw

CONFIG = Diffusion(
    timestep_sampling="uniform",
    timestep_shift=2.0,
    label_dropout=0.5,
    ingredients=["self_alignment weight=0.7 gap=0.3 blocks=1,3"],
)
NUMBERS: dict[str, Kind] = {**NOISE_TIMESTEP_DROPOUT, "alignment": "uniform"}
BATCH_SIZE = 6
OPTION = "diffusion.ingredients"


def plain_spec(flavor: str = "debugmodel", **options: Any) -> ModelSpec:
    return build_model_spec(Model(flavor=flavor, **options), sample_shape=(2, 8, 8), num_classes=10)


def training_spec(config: Diffusion, spec: ModelSpec) -> ModelSpec:
    return spec.with_heads(build_objective(config, spec).heads)


def random_model(spec: ModelSpec, seed: int) -> Any:
    """In float64, with no weight left at zero."""
    model = spec.build()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    return model.double()


def example(seed: int = 5) -> tuple[dict[str, torch.Tensor], Randomness]:
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(BATCH_SIZE, 2, 8, 8, generator=generator)
    index = torch.arange(100, 100 + BATCH_SIZE)
    batch = {"sample": sample, "class_label": torch.arange(BATCH_SIZE), "index": index}
    return batch, draw(seed, index.tolist(), (2, 8, 8), NUMBERS)


def output_of(model: nn.Module, block: int, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(prediction, tokens after a block), read by a hook."""
    seen: list[torch.Tensor] = []
    hook = model.blocks[block].register_forward_hook(lambda _module, _inputs, output: seen.append(output))  # type: ignore[index, union-attr, operator]
    prediction = model(*inputs)
    hook.remove()
    return prediction, seen[0]


@torch.no_grad()
def expected_losses(model: Any, teacher: Any) -> list[float]:
    """Sample by sample, token by token, with Python's floats where that is readable."""
    batch, randomness = example()
    losses = []
    for i in range(BATCH_SIZE):
        x, noise = batch["sample"][i : i + 1].double(), randomness.noise[i : i + 1].double()
        u, v = float(randomness.timestep[i]), float(randomness["alignment"][i])
        t = u / (u + 2.0 * (1 - u))
        later = min(1.0, t + 0.3 * v)
        label = torch.tensor([10 if randomness.label_dropout[i] < 0.5 else i])
        inputs = [(s * x + (1 - s) * noise, torch.tensor([s]), {"class_label": label}) for s in (t, later)]
        prediction, tokens = output_of(model, 0, *inputs[0])
        _, targets = output_of(teacher, 2, *inputs[1])
        for number in (0, 2, 4):
            layer = model.heads["alignment"][number]
            tokens = tokens @ layer.weight.T + layer.bias
            tokens = tokens * torch.sigmoid(tokens) if number < 4 else tokens
        distances = []
        for token, target in zip(tokens[0], targets[0], strict=True):
            lengths = math.sqrt(float(token @ token)) * math.sqrt(float(target @ target))
            distances.append(1 - float(token @ target) / lengths)
        error = float((prediction - (x - noise)).square().mean())
        losses.append(error + 0.7 * sum(distances) / len(distances))
    return losses


def test_the_loss_equals_a_loop_over_samples_and_tokens() -> None:
    spec = training_spec(CONFIG, plain_spec())
    model, teacher = random_model(spec, 0), random_model(spec, 1)
    objective: Any = build_objective(CONFIG, spec)
    losses = objective.loss(model, *example(), teacher)
    found = losses.total
    assert torch.equal(losses.logged["loss"], objective.base.loss(model, *example()))
    torch.testing.assert_close(found, losses.logged["loss"] + 0.7 * losses.logged["alignment_loss"])
    assert found.dtype == torch.float32 and found.shape == (BATCH_SIZE,)
    expected = torch.tensor(expected_losses(model, teacher), dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def test_gradients_reach_the_early_block_and_the_head_but_not_the_teacher() -> None:
    spec = training_spec(CONFIG, plain_spec())
    model, teacher = random_model(spec, 0), random_model(spec, 1)
    aligned: Any = build_objective(CONFIG, spec)
    (aligned.loss(model, *example(), teacher).total - aligned.base.loss(model, *example())).sum().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    for name, parameter in model.named_parameters():
        is_taught = not name.startswith(("blocks.1.", "blocks.2.", "final_layer."))
        assert (parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-9) == is_taught, name


def test_the_teacher_sees_less_noise_by_at_most_the_gap() -> None:
    spec = training_spec(CONFIG, plain_spec())
    objective: Any = build_objective(CONFIG, spec)
    t, u = torch.rand(10_000, generator=torch.Generator().manual_seed(0)), example()[1]["alignment"]
    for number in (*u, torch.tensor(0.0), torch.tensor(1 - 2**-24)):
        later = objective.teacher_time(t, number)
        assert bool((later >= t).all()) and bool((later <= (t + 0.3).clamp(max=1.0)).all())


def test_its_numbers_belong_to_the_sample_and_change_no_others() -> None:
    with_numbers, without = draw(3, [5, 9], (1, 4, 4), NUMBERS), draw(3, [5, 9], (1, 4, 4))
    assert all(torch.equal(with_numbers[name], value) for name, value in without.items())
    assert with_numbers["alignment"][1] == draw(3, [9], (1, 4, 4), NUMBERS)["alignment"][0]
    many = draw(3, range(20_000), (1, 1, 1), NUMBERS)
    assert abs(float(many["alignment"].mean()) - 0.5) < 0.01
    numbers = torch.stack([many["alignment"], many.timestep, many.label_dropout])
    assert float((torch.corrcoef(numbers) - torch.eye(3)).abs().max()) < 0.03


@dataclass(frozen=True)
class Doubled(FlowMatching):
    """Another prediction and another weighting on the same path."""

    def target(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return x

    def error(self, *arguments: Any) -> torch.Tensor:
        return 2 * super().error(*arguments)


def test_it_adds_to_the_loss_of_the_objective_that_it_wraps() -> None:
    spec = training_spec(CONFIG, plain_spec())
    model, teacher = random_model(spec, 0), random_model(spec, 1)
    bases = FlowMatching.build(CONFIG, spec), Doubled.build(CONFIG, spec)
    aligned = [SelfAlignment.around(base, plain_spec()) for base in bases]
    totals = [objective.loss(model, *example(), teacher).total for objective in aligned]
    terms = [total - base.loss(model, *example()) for total, base in zip(totals, bases, strict=True)]
    torch.testing.assert_close(terms[0], terms[1], rtol=1e-4, atol=1e-6)
    assert bool((terms[0] > 0.1).all())


def test_validation_has_the_plain_loss() -> None:
    spec = training_spec(CONFIG, plain_spec())
    model = random_model(spec, 0)
    plain = dataclasses.replace(CONFIG, ingredients=[])
    expected = build_objective(plain, spec).loss(model, *example())
    assert torch.equal(validation_objective(CONFIG, spec).loss(model, *example()), expected)
    uniform = uniform_objective(plain, spec)
    assert torch.equal(uniform_objective(CONFIG, spec).loss(model, *example()), uniform.loss(model, *example()))


def test_without_it_the_model_and_the_objective_are_those_of_before() -> None:
    spec = plain_spec()
    assert training_spec(Diffusion(), spec) is spec
    assert type(build_objective(Diffusion(), spec)) is FlowMatching
    trained = training_spec(CONFIG, spec)
    with torch.device("meta"):
        names, more = (set(each.build().state_dict()) for each in (spec, trained))
    assert more - names == {f"heads.alignment.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")}
    one, two = spec.build(), trained.build()
    one.init_weights(7)  # type: ignore[operator]
    two.init_weights(7)  # type: ignore[operator]
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    head: Any = two.heads["alignment"]
    assert len({float(head[i].weight.std()) for i in (0, 2, 4)}) == 3 and not head[0].bias.any()


@pytest.mark.parametrize(("flavor", "preset"), [("debugmodel", "torchditan"), ("DiT-Ti", "official")])
def test_flops_count_the_teachers_forward_and_the_head(flavor: str, preset: str) -> None:
    spec = plain_spec(flavor, preset=preset, learn_sigma=False)
    config = dataclasses.replace(CONFIG, ingredients=["self_alignment"])
    trained = training_spec(config, spec)
    found, plain = count_loss_flops(config, trained), count_model_flops(spec)
    width = spec.config.width
    head = 3 * 6 * width**2  # three layers: forward, gradients of input and weight
    assert found.total == plain.total + plain.forward + head * spec.num_tokens
    assert found.per_image == plain.per_image + plain_per_image_forward(spec)


def test_flops_with_the_contrastive_term_which_needs_two_samples() -> None:
    both = dataclasses.replace(
        CONFIG, ingredients=[*CONFIG.ingredients, "contrastive"], prediction="x", loss_weighting="min_snr"
    )
    trained = training_spec(both, plain_spec())
    assert count_loss_flops(both, trained) == count_loss_flops(CONFIG, trained)


def plain_per_image_forward(spec: ModelSpec) -> int:
    depth, width = spec.config.depth, spec.config.width
    return 2 * (depth * 6 * width**2 + 2 * width**2 + 256 * width + width**2)


@pytest.mark.parametrize(("flavor", "blocks"), [("DiT-XL", (8, 20)), ("DiT-B", (3, 9)), ("DiT-Ti", (2, 4))])
def test_the_default_blocks_are_those_of_the_paper(flavor: str, blocks: tuple[int, int]) -> None:
    objective: Any = build_objective(Diffusion(ingredients=["self_alignment"]), plain_spec(flavor))
    assert (objective.student, objective.teacher) == tuple(f"blocks.{block - 1}" for block in blocks)


@pytest.mark.parametrize("blocks", [[0, 2], [2, 2], [3, 1], [1, 4]])
def test_blocks_that_the_model_lacks_or_in_the_wrong_order_are_refused(blocks: list[int]) -> None:
    text = f"self_alignment blocks={blocks[0]},{blocks[1]}"
    with refused(f'diffusion.ingredients = "{text}"', "3"):
        build_objective(dataclasses.replace(CONFIG, ingredients=[text]), plain_spec())


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--ema.enable=false"], "ema.enable = false", ["self_alignment", "true"]),
        (["--diffusion.objective=ddpm"], "diffusion.ingredients", ["ddpm", "flow_matching"]),
        (["--model.name=flux"], "diffusion.ingredients", ["flux", "leave it out"]),
        ([f"--{OPTION}=self_alignment blocks=1,2,3"], f'{OPTION} = "self_alignment blocks=1,2,3"', ["two"]),
        ([f"--{OPTION}=self_alignment gap=1.5"], f'{OPTION} = "self_alignment gap=1.5"', ["0", "1"]),
        ([f"--{OPTION}=self_alignment weight=-1"], f'{OPTION} = "self_alignment weight=-1"', ["0"]),
        (["--diffusion.ingredients", "self_alignment", "self_alignment"], "diffusion.ingredients", ["loss of its own"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags: list[str], about: str, mentions: list[str]) -> None:
    with refused(about, *mentions):
        config = load_config(["--model.flavor=debugmodel", "--diffusion.ingredients=self_alignment", *flags])
        shape = (3, 16, 16) if config.model.name == "dit" else (16, 16, 16)
        build_objective(config.diffusion, model_spec_of(config, sample_shape=shape, num_classes=10))
