# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Cards: exact on disk, rounded as their intervals allow, repeatable, and compared with their repetition."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import card, figure
from refusals import refused
from scipy.stats import t as student_t
from torch import nn

from torchditan.config.options import Diffusion, Sampling
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.timesteps import Timesteps
from torchditan.extras.evaluation.card import (
    card_figure,
    read_card,
    settings_of,
    write_card,
)
from torchditan.extras.evaluation.card_tables import (
    markdown,
    rounded,
    table,
)
from torchditan.extras.evaluation.metric import Figure
from torchditan.models.spec import ClassLabels, ModelSpec, Unconditional
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.sampling.sampler import Sampler

# Files


def test_a_card_returns_from_its_file_with_all_digits(tmp_path: Path) -> None:
    third = figure(1 / 3, 1e-17)
    written = card(figures={"FD-EffNetLite0": third, "KID-EffNetLite0": dataclasses.replace(third, value=None)})
    write_card(tmp_path / "new", written)
    assert read_card(tmp_path / "new" / "card.json") == written
    assert read_card(tmp_path / "new") == written, "its folder will do"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["card.json", "card.md"]
    assert json.loads((tmp_path / "new" / "card.json").read_text())["card"] == 1


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (lambda content: content.pop("seeds"), "seeds"),
        (lambda content: content.update(num_samples=True), "card.num_samples = true"),
        (lambda content: content.update(weights="best"), 'card.weights = "best"'),
        (lambda content: content["data"].update(image_size=[8, "x"]), "card.data.image_size[1]"),
        (lambda content: content["figures"]["FD-EffNetLite0"].update(low=10**400), "card.figures.FD-EffNetLite0.low"),
        (lambda content: content.update(card=2), "card = 1"),
    ],
)
def test_a_damaged_card_is_refused_with_file_and_entry(damage: Any, mentions: str, tmp_path: Path) -> None:
    write_card(tmp_path, card())
    path = tmp_path / "card.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with refused(f"{path} is not a card", mentions):
        read_card(path)


# Figures and intervals


def test_several_seeds_give_the_95_percent_interval_of_their_mean() -> None:
    found = card_figure([Figure(value, 100, (0.0, 9.0), "EffNetLite0") for value in (10.0, 11.0, 12.0)])
    low, high = student_t.interval(0.95, 2, loc=11.0, scale=1 / 3**0.5)
    assert (found.value, found.num_images, found.extractor) == (11.0, 100, "EffNetLite0")
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-12), pytest.approx(high, rel=1e-12))
    assert found.interval == "sampling only: 95%, 3 seeds"
    assert found.per_seed == [10.0, 11.0, 12.0]


def test_one_seed_gives_half_of_the_difference_between_its_halves() -> None:
    found = card_figure([Figure(10.0, 100, halves=(10.2, 11.0))])
    assert (found.low, found.high) == (pytest.approx(9.6), pytest.approx(10.4))
    assert found.interval == "sampling only: two halves, about 50%"
    assert found.per_seed == [10.0]


def test_the_interval_of_halves_covers_the_mean_in_50_percent_of_cases() -> None:
    """For means a and b of the halves of 50 values, the mean square of (a - b) / 2 over many sets is 1 / 50."""
    halves = torch.randn(4000, 2, 25, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mean(2)
    found = [card_figure([Figure((a + b) / 2, 50, halves=(a, b))]) for a, b in halves.tolist()]
    ends = [(one.low, one.high) for one in found if one.low is not None and one.high is not None]
    assert len(ends) == 4000
    assert sum(low < 0 < high for low, high in ends) / 4000 == pytest.approx(0.5, abs=0.03)
    assert sum(((high - low) / 2) ** 2 for low, high in ends) / 4000 == pytest.approx(1 / 50, rel=0.06)


@pytest.mark.parametrize(
    ("values", "halves", "value", "label"),
    [
        ([5.0], None, 5.0, None),
        ([5.0, 5.0], (1.0, 2.0), 5.0, "equal for all 2 seeds"),
        ([5.0, float("nan")], None, None, None),
        ([float("inf")], (1.0, 2.0), None, None),
        ([5.0], (float("nan"), 2.0), 5.0, None),
    ],
)
def test_without_a_finite_spread_there_is_no_interval(
    values: list[float], halves: tuple[float, float] | None, value: float | None, label: str | None
) -> None:
    found = card_figure([Figure(one, 100, halves) for one in values])
    assert (found.value, found.low, found.high, found.interval) == (value, None, None, label)


# Text


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (12.34567, 0.41234, "12.3"),
        (12.34567, 0.14, "12.35"),
        (0.0012345, 0.00012, "0.00123"),
        (-0.00004, 0.02, "0.00"),
        (1.23456e-9, 2e-11, "1.23e-09"),
        (12.3456789, 1e-9, "12.3457"),
        (12.3456789, None, "12.35"),
        (0.0, None, "0.000"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_supports(value: float, half: float | None, text: str) -> None:
    assert rounded(value, half) == text


def test_a_distance_is_followed_by_recall_coverage_and_the_copy_check() -> None:
    lines = table(card()).splitlines()
    names = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert names[2:] == [
        "FD-EffNetLite0",
        "recall-EffNetLite0",
        "coverage-EffNetLite0",
        "copies: nearer than held-out",
        "KID-EffNetLite0",
        "accuracy_generated",
    ]
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "FD-EffNetLite0",
        "12.3",
        "11.9 to 12.8",
        "2600",
        "EffNetLite0",
    ]
    assert lines[-1] == "Intervals: sampling only: 95%, 3 seeds."
    assert len({len(line) for line in lines if line.startswith("|")}) == 1, "aligned"


def test_the_markdown_says_what_was_evaluated_and_how_to_repeat_it() -> None:
    lines = markdown(card(run="my runs/a|b")).splitlines()
    assert lines[0] == "# my runs/a|b, step 600, ema weights, 3 x 2600 samples"
    (command,) = [line for line in lines if line.startswith("    ")]
    assert command.startswith("    torchditan evaluate outputs/quickstart --step=600 --metrics effnet classifier ")
    assert "a\\|b" in "\n".join(lines[1:]), "escaped inside a table"
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if line.startswith("|")}
    assert rows["reference.content"] == "d" * 12
    assert rows["sampling.guidance_interval"] == "0.1, 0.9"
    assert rows["ema_decay"] == "0.999"
    assert rows["held_out.num_images"] == "297"
    shown = {name for name, value in settings_of(card()).items() if value is not None}
    assert shown <= rows.keys(), "all settings that change figures"


def spec_of(conditioning: Any) -> ModelSpec:
    return ModelSpec(
        name="dit",
        flavor="tiny",
        flavors=("tiny",),
        config=None,
        build=nn.Identity,
        blocks=lambda model: nn.ModuleList(),
        conditioning=conditioning,
        sample_shape=(1, 2, 2),
        learn_sigma=False,
        num_tokens=4,
    )


class Counter(nn.Module):
    """Counts the samples that pass through it."""

    count = 0

    def forward(self, x: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        self.count += len(x)
        return x


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "ancestral", "ddim"])
@pytest.mark.parametrize(
    ("scale", "interval", "conditioning"),
    [
        (1.0, [0.0, 1.0], ClassLabels(3)),
        (2.0, [0.3, 0.7], ClassLabels(3)),
        (2.0, [0.85, 1.0], ClassLabels(3)),
        (2.0, [0.3, 0.7], Unconditional()),
    ],
)
def test_model_evaluations_are_the_forward_passes_of_a_sample(
    sampler: Any, scale: float, interval: list[float], conditioning: Any
) -> None:
    sampling = Sampling(sampler=sampler, num_steps=10, guidance_scale=scale, guidance_interval=interval)
    timesteps = Timesteps(kind="uniform", mean=0.0, std=1.0, shift=3.0)
    objective: Any = FlowMatching(conditioning=conditioning, timesteps=timesteps, label_dropout=0.0)
    if sampler == "ddim":
        objective = build_objective(Diffusion(objective="ddpm"), spec_of(conditioning))
    model = Counter()
    sampler = Sampler(spec_of(conditioning), objective, torch.device("cpu"))
    rows = SampleRows.of_classes([0], class_names=[] if isinstance(conditioning, Unconditional) else ["a"])
    sampler.draw_batch(model, Drawing(rows, rows.each(1), sampling, seed=0), [0])
    assert sampler.evaluations_per_sample(sampling) == model.count
