# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Cards: exact on disk, rounded as their intervals allow, repeatable, and compared with their repetition."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import card, figure
from refusals import refused
from scipy.stats import t as student_t
from torch import nn

from torchditan.commands import evaluate
from torchditan.config.loader import override, to_dict
from torchditan.config.options import Config, Diffusion, Sampling
from torchditan.config.trajectory import trajectory
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.timesteps import Timesteps
from torchditan.extras.evaluation.card import (
    Card,
    ImageSet,
    about_run,
    arguments_of,
    card_figure,
    card_figures,
    environment_of,
    read_card,
    settings_of,
    write_card,
)
from torchditan.extras.evaluation.card_tables import (
    markdown,
    ordered_names,
    rounded,
    table,
)
from torchditan.extras.evaluation.metric import Figure
from torchditan.models.spec import ClassLabels, ModelSpec, Unconditional
from torchditan.run.reading import read_config
from torchditan.sampling.drawing import Drawing, SampleRows, sampling_settings
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


def test_card_json_marks_a_card_that_was_written_completely(tmp_path: Path) -> None:
    (tmp_path / "card.md").mkdir()
    with pytest.raises(OSError, match=r"card\.md"):
        write_card(tmp_path, card())
    assert [path.name for path in tmp_path.iterdir()] == ["card.md"]


def test_reading_cards_needs_no_torch() -> None:
    code = "import sys, torchditan.extras.evaluation.card_tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("damage", "mentions"),
    [
        (lambda content: content.pop("seeds"), "seeds"),
        (lambda content: content.update(surprise=1), "card.surprise"),
        (lambda content: content.update(num_samples=True), "card.num_samples = true"),
        (lambda content: content.update(rounding="up"), 'card.rounding = "up"'),
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


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b"[]", None])
def test_what_is_not_a_card_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    if content is not None:
        path.write_bytes(content)
    with refused(f"{path} is not a card"):
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


def test_results_of_metrics_become_figures_and_tables() -> None:
    results: list[dict[str, Any]] = [
        {"FID": Figure(3.0, 50, extractor="Inception-2015"), "chance": 0.1, "per_class": {"a": 0.5, "b": 1.0}},
        {"FID": Figure(5.0, 50, extractor="Inception-2015"), "chance": 0.1, "per_class": {"a": 1.0, "b": 1.0}},
    ]
    figures, other = card_figures(results, num_images=40)
    assert (figures["FID"].value, figures["FID"].num_images) == (4.0, 50)
    assert (figures["chance"].value, figures["chance"].num_images, figures["chance"].extractor) == (0.1, 40, None)
    assert other == {"per_class": {"a": 0.75, "b": 1.0}}


# Text


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (12.34567, 0.41234, "12.3"),
        (12.34567, 0.14, "12.35"),
        (12.34567, 3.0, "12"),
        (1234.567, 300.0, "1200"),
        (0.0012345, 0.00012, "0.00123"),
        (-0.00004, 0.02, "0.00"),
        (1.23456e-9, 2e-11, "1.23e-09"),
        (12.3456789, 1e-9, "12.3457"),
        (12.3456789, None, "12.35"),
        (123456.0, None, "123456"),
        (0.0, None, "0.000"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_supports(value: float, half: float | None, text: str) -> None:
    assert rounded(value, half) == text


def test_rounding_changes_a_number_by_at_most_half_of_its_half_width() -> None:
    random = torch.Generator().manual_seed(0)
    for value, exponent in torch.rand(2000, 2, generator=random, dtype=torch.float64).tolist():
        half = 10 ** (-4 * exponent)
        text = rounded(value, half)
        assert abs(float(text) - value) <= 0.5 * half * (1 + 1e-9), (value, half, text)
        last_digit = 10.0 ** -len(text.partition(".")[2])
        assert last_digit > 0.05 * half, "digits below a twentieth of the half width are not supported"


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


def test_a_distance_without_its_companions_says_that_they_were_not_measured() -> None:
    found = table(card(figures={"FD-EffNetLite0": figure(12.0)}))
    for name in ("recall (EffNetLite0)", "coverage (EffNetLite0)", "copies (EffNetLite0)"):
        assert f"| {name}" in found
    assert found.count("not measured") == 3


def test_companions_belong_to_the_extractor_of_their_distance() -> None:
    inception = "Inception-2015"
    figures = {
        "FD-EffNetLite0": figure(1.0),
        "recall-EffNetLite0": figure(1.0),
        "coverage-EffNetLite0": figure(1.0),
        "copies: share": figure(1.0),
        "held-out FD-EffNetLite0": figure(1.0),
        "IS": figure(1.0, extractor=inception),
        "FID": figure(1.0, extractor=inception),
        "sFID": figure(1.0, extractor=inception),
        "recall": figure(1.0, extractor=inception),
        "coverage": figure(1.0, extractor=inception),
    }
    assert ordered_names(figures) == [
        *("FD-EffNetLite0", "recall-EffNetLite0", "coverage-EffNetLite0", "copies: share", "held-out FD-EffNetLite0"),
        *("IS", "FID", "recall", "coverage", "copies (Inception-2015)", "sFID"),
    ]


def test_the_markdown_says_what_was_evaluated_and_how_to_repeat_it() -> None:
    lines = markdown(card(run="my runs/a|b")).splitlines()
    assert lines[0] == "# my runs/a|b, step 600, ema weights, 3 x 2600 samples"
    (command,) = [line for line in lines if line.startswith("    ")]
    assert command.startswith("    torchditan evaluate 'my runs/a|b' --metrics effnet classifier --step=600 ")
    assert "a\\|b" in "\n".join(lines[1:]), "escaped inside a table"
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if line.startswith("|")}
    assert rows["reference.content"] == "d" * 12
    assert rows["sampling.guidance_interval"] == "0.1, 0.9"
    assert rows["ema_decay"] == "0.999"
    assert rows["held_out.num_images"] == "297"
    shown = {name for name, value in settings_of(card()).items() if value is not None}
    assert shown <= rows.keys(), "all settings that change figures"


# Repeating


def test_the_arguments_of_a_card_give_the_same_arguments_and_sampling() -> None:
    sampling = Sampling(sampler="heun", num_steps=7, guidance_scale=1.1, guidance_interval=[0.1, 1 / 3])
    given = card(sampling=sampling_settings(sampling), seeds=[-2, -1, 0], inception_weights="a file.pth")
    given = dataclasses.replace(
        given,
        reference=ImageSet(source="file", path="real images.npz"),
        held_out=None,
        prompts=["a cat"],
        float32_matmul_precision="high",
        paths={"autoencoder.path": "a decoder"},
    )
    args, flags = evaluate.parse(arguments_of(given))
    assert (args.run, args.step, args.weights) == (Path("outputs/quickstart"), 600, "ema")
    assert (args.metrics, args.prompts) == (["effnet", "classifier"], ["a cat"])
    assert (args.num_samples, args.seed, args.seeds, args.batch_size, args.epochs) == (2600, -2, 3, 250, 20)
    assert (args.class_balance, args.rounding, args.float32_matmul_precision) == ("data", "nearest", "high")
    assert (args.reference, args.without_data) == (Path("real images.npz"), True)
    assert args.inception_weights == Path("a file.pth")
    other = Config().replace({"sampling.guidance_channels": 3, "autoencoder.name": "haar"})
    changed = override(other, flags, sections=("sampling", "autoencoder"))
    assert (changed.sampling, changed.autoencoder.path) == (sampling, "a decoder")


@pytest.mark.parametrize("run", [None, "my runs/a"])
def test_a_card_of_a_file_of_images_repeats_with_the_run_whose_images_were_its_reference(run: str | None) -> None:
    samples = ImageSet(source="file", path="samples.npz", num_images=2600, content="9" * 64)
    nothing = {"run": None, "step": None, "weights": None, "sampling": {}, "rounding": None, "batch_size": None}
    of_file = card(**{**nothing, "images": samples, "reference_run": run, "class_balance": None, "seeds": [1]})
    if run is None:
        of_file = dataclasses.replace(of_file, reference=ImageSet(source="file", path="real.npz"))
    args, flags = evaluate.parse(arguments_of(of_file))
    assert (args.run, args.images, flags) == (run and Path(run), Path("samples.npz"), [])
    assert markdown(of_file).startswith("# samples.npz, 2600 images\n")


# What a run contributes


def stored_run(folder: Path, config: Config, **changes: Any) -> Path:
    folder.mkdir()
    content = {
        "run_id": "12ab34cd",
        "config": to_dict(config),
        "trajectory": trajectory(config),
        "versions": {"torch": "2.13.0"},
        "git_commit": "b" * 40,
        "hardware": {"device": "cuda", "device_name": "H100", "device_count": 8},
    }
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


def card_of(run: Path, config: Config) -> Card:
    return card(**{**NOT_MEASURED, **about_run(run, config, read_config(run), weights="ema")})


NOT_MEASURED = {"ema_decay": None, "ema_width": None, "training_hardware": None, "training_seed": None}


def test_a_run_directory_fills_in_its_part_of_a_card(tmp_path: Path) -> None:
    config = Config().replace({"dataset.fingerprint": "folder-1", "training.seed": 4, "ema.decay": 0.99})
    run = stored_run(tmp_path / "run", config)
    found = card_of(run, config)
    assert (found.run, found.run_id, found.training_commit) == (str(run), "12ab34cd", "b" * 40)
    assert (found.training_hardware, found.training_versions) == ("8 x H100", {"torch": "2.13.0"})
    assert (found.training_seed, found.ema_decay, found.weights) == (4, 0.99, "ema")
    assert found.data is not None
    assert (found.data.name, found.data.fingerprint) == ("digits", "folder-1")
    assert found.paths == {}
    assert found.training_precision == "bfloat16"
    written = dataclasses.replace(found, **environment_of(torch.device("cpu")))
    write_card(tmp_path / "card", written)
    assert read_card(tmp_path / "card") == written


def test_a_card_says_the_precision_of_products_in_training_and_drawing(tmp_path: Path) -> None:
    low = Config().replace({"training.mixed_precision_param": "float32", "training.float32_matmul_precision": "medium"})
    assert card_of(stored_run(tmp_path / "run", low), low).training_precision == "float32, products medium"
    assert environment_of(torch.device("cpu"))["precision"] == "float32"
    torch.set_float32_matmul_precision("high")
    try:
        environment = environment_of(torch.device("cpu"))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (environment["precision"], environment["float32_matmul_precision"]) == ("float32, products high", "high")


def test_paths_that_replaced_the_runs_own_are_part_of_the_card(tmp_path: Path) -> None:
    config = Config().replace({"autoencoder.name": "haar", "autoencoder.path": "stored"})
    run = stored_run(tmp_path / "run", config)
    moved = {"autoencoder.path": "given", "dataset.root_dir": "moved"}
    assert card_of(run, config).paths == {}
    assert card_of(run, config.replace(moved)).paths == moved


def test_a_run_imported_from_weights_has_a_card(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", Config(), hardware=None, versions=None, git_commit=None)
    assert card_of(run, Config()).training_hardware is None


def test_a_card_has_the_width_of_the_average_in_place_of_its_decay(tmp_path: Path) -> None:
    config = Config().replace({"ema.width": 0.075})
    found = card_of(stored_run(tmp_path / "run", config), config)
    assert (found.ema_decay, found.ema_width) == (None, 0.075)
    text = markdown(found)
    assert re.search(r"\| ema_width +\| 0.075 +\|", text) and "ema_decay" not in text


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
        num_condition_tokens=0,
    )


class Counter(nn.Module):
    """Counts the samples that pass through it."""

    count = 0

    def forward(self, x: torch.Tensor, t: torch.Tensor, cond: dict[str, torch.Tensor]) -> torch.Tensor:
        self.count += len(x)
        return x


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "ancestral", "ddim"])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("interval", [[0.0, 1.0], [0.3, 0.7], [0.85, 1.0]])
@pytest.mark.parametrize("conditioning", [ClassLabels(3), Unconditional()])
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
