# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From the options of [model] to a spec: valid options resolve, invalid ones are refused in one line."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchditan import registry
from torchditan.config.loader import load_config
from torchditan.config.options import Model
from torchditan.errors import ConfigError
from torchditan.models import ClassLabels, Unconditional, build_dit_spec, build_model_spec
from torchditan.models.dit import FLAVORS, PRESETS

DIGITS = {"sample_shape": (1, 8, 8), "num_classes": 10}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_decides_what_the_options_leave_open(preset):
    config = build_model_spec(Model(preset=preset), **DIGITS).config
    assert {option: getattr(config, option) for option in PRESETS[preset]} == PRESETS[preset]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_flavor_builds_on_meta_and_shows_its_blocks(flavor):
    spec = build_model_spec(Model(flavor=flavor), sample_shape=(16, 64, 32), num_classes=1000)
    with torch.device("meta"):
        model = spec.build()
        x_t, t, cond = spec.example_inputs(batch_size=2)
    assert len(spec.blocks(model)) == FLAVORS[flavor].depth
    assert spec.num_tokens == 32 * 16
    if flavor == "debugmodel":
        assert model(x_t, t, cond).shape == (2, 16, 64, 32)


def test_overrides_replace_the_sizes_of_the_flavor():
    config = build_model_spec(Model(flavor="DiT-S", overrides=["depth=3", "width=128", "num_heads=4"]), **DIGITS).config
    assert (config.depth, config.width, config.num_heads) == (3, 128, 4)
    config = build_model_spec(Model(flavor="DiT-S", overrides=["depth=3"]), **DIGITS).config
    assert (config.depth, config.width, config.num_heads) == (3, 384, 6)


@pytest.mark.parametrize(
    ("options", "sample_shape", "message"),
    [
        ({"overrides": ["layers=3"]}, (3, 8, 8), '"layers=3": must be one of depth, width, num_heads and a positive'),
        ({"overrides": ["num_heads=5"]}, (3, 8, 8), "with 5 heads, the width must be a multiple of 20, not 384"),
    ],
)
def test_a_users_mistake_is_one_line_with_option_and_value(options, sample_shape, message):
    with pytest.raises(ConfigError) as error:
        build_model_spec(Model(**options), sample_shape=sample_shape, num_classes=10)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_class_labels_are_replaced_by_the_null_class_where_dropped():
    conditioning = build_model_spec(Model(), **DIGITS).conditioning
    assert conditioning == ClassLabels(10)
    label = torch.tensor([3, 0, 9])
    cond = conditioning.from_batch({"class_label": label, "sample": torch.zeros(3)})
    assert cond.keys() == {"class_label"}
    dropped = conditioning.drop(cond, torch.tensor([True, False, True]))
    assert dropped["class_label"].tolist() == [10, 0, 10]
    assert conditioning.null(cond)["class_label"].tolist() == [10, 10, 10]
    assert label.tolist() == [3, 0, 9], "the batch itself is untouched"


def test_no_classes_is_unconditional():
    conditioning = build_model_spec(Model(), sample_shape=(1, 8, 8), num_classes=0).conditioning
    assert conditioning == Unconditional()
    cond = conditioning.from_batch({"class_label": torch.tensor([1])})
    assert cond == conditioning.drop(cond, torch.tensor([True])) == conditioning.null(cond) == {}


def build_mine(config, *, sample_shape, num_classes):
    """An architecture with one flavor, as `ARCHITECTURES` names its function."""
    if config.flavor != "small":
        raise ConfigError(f"model.flavor = {config.flavor}: must be small")
    as_dit = dataclasses.replace(config, name="dit", flavor="debugmodel")
    spec = build_dit_spec(as_dit, sample_shape=sample_shape, num_classes=num_classes)
    return dataclasses.replace(spec, name="mine", flavor="small")


def test_an_architecture_is_a_function_and_a_line_of_the_registry(monkeypatch, run_script, tmp_path):
    monkeypatch.setitem(registry.ARCHITECTURES, "mine", f"{__name__}:build_mine")
    flags = ["--model.name=mine", "--dataset.dataset_name=dummy", "--dataset.image_size=8", "--model.input_channels=3"]
    spec = build_model_spec(load_config([*flags, "--model.flavor=small"]).model, sample_shape=(3, 8, 8), num_classes=2)
    assert (spec.name, spec.flavor) == ("mine", "small")
    with pytest.raises(ConfigError, match=r"lora.rank = 2: .*published"):
        load_config([*flags, "--model.flavor=small", "--lora.rank=2"])
    flags += ["--model.flavor=small", "--dataset.num_classes=2", "--training.steps=1", "--training.batch_size=2"]
    flags += ["--dataset.num_workers=0", "--metrics.enable_sampling=false", f"--job.dump_folder={tmp_path}"]
    outcome = run_script("train.py", *flags)
    assert outcome.code == 0, outcome.err
