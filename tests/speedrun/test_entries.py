# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Entries of the speedrun: those in the repository, inheritance, code of an entry, and the rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import entries
import pytest

from torchditan import registry
from torchditan.config.loader import load_config
from torchditan.errors import ConfigError

pytestmark = pytest.mark.nightly

BASE = """
[entry]
title = "the base"
images = 640
[training]
global_batch_size = 64
[sampling]
num_steps = 32
[optimizer]
lr = 1e-3
"""


def write(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.toml").write_text(text)


@pytest.mark.parametrize("name", entries.names())
def test_every_entry_is_a_training_that_the_protocol_allows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entries.load(name)
    for table, lines in entry.registry.items():
        for key, value in lines.items():
            monkeypatch.setitem(getattr(registry, table), key, value)
    config = load_config(entry.flags(seed=3))
    assert config.training.seed == 3
    assert config.training.steps * config.training.global_batch_size == entry.images
    assert config.dataset.dataset_name == "earth"
    assert config.sampling.guidance_scale == 1
    assert config.model.path is None
    assert {*entry.compare} <= {*entries.names()}


def test_an_entry_inherits_what_it_does_not_change(tmp_path: Path) -> None:
    write(tmp_path, "base", BASE + "[ema]\nenable = false\n")
    write(tmp_path, "change", '[entry]\nbase = "base"\nema_width = 0.05\n[optimizer]\nlr = 3e-3\n')
    entry = entries.load("change.toml", folder=tmp_path)
    assert entry.settings == {**entries.load("base", folder=tmp_path).settings, "optimizer.lr": 3e-3}
    assert (entry.images, entry.num_steps, entry.ema_width) == (640, 10, 0.05)
    assert [flag for flag in entry.flags(seed=0) if flag.startswith("--ema")] == ["--ema.width=0.05"]
    tuned = entries.load("change", {"optimizer.lr": 1e-4}, folder=tmp_path)
    assert tuned.settings["optimizer.lr"] == 1e-4


def test_a_recipe_names_what_changes_a_step_and_a_digest_what_changes_the_training(tmp_path: Path) -> None:
    write(tmp_path, "base", BASE)
    for name, change in {
        "longer": "images = 6400",
        "averaged": "ema_width = 0.1",
        "sampled": "[sampling]\nnum_steps = 16",
        "trained": "[optimizer]\nlr = 3e-3",
    }.items():
        write(tmp_path, name, f'[entry]\nbase = "base"\n{change}\n')
    base, longer, averaged, sampled, trained = (
        entries.load(name, folder=tmp_path) for name in ("base", "longer", "averaged", "sampled", "trained")
    )
    assert base.recipe() == longer.recipe() == averaged.recipe() == sampled.recipe() != trained.recipe()
    assert base.digest() == sampled.digest()
    wider = replace(averaged, ema_width=0.2)
    assert len({entry.digest() for entry in (base, longer, averaged, wider, trained)}) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[entry]\ncolour = 1\n", "colour is not a key of [entry]; must be one of title"),
        (
            "[entry]\nimages = 650\n",
            "images = 650: must be a multiple of training.global_batch_size = 64, at most 96000",
        ),
        ("[sampling]\nguidance_scale = 2\n", "the protocol fixes sampling.guidance_scale"),
        ("[sampling]\nnum_steps = 33\n", "sampling.num_steps = 33: must be at most 32"),
        ('[sampling]\nsampler = "heun"\n', "sampling.num_steps = 32: must be at most 16"),
        ('[entry]\nema_width = "wide"\n', 'ema_width = "wide": must be above 0 and below 0.2887'),
        ('[entry.registry.METRICS]\neffnet = "a:b"\n', "[entry.registry.METRICS] cannot be extended; must be one of"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused_in_one_line(tmp_path: Path, change: str, message: str) -> None:
    write(tmp_path, "base", BASE)
    text = change.replace("[entry]\n", '[entry]\nbase = "base"\n')
    write(tmp_path, "change", text if 'base = "base"' in text else f'[entry]\nbase = "base"\n{text}')
    with pytest.raises(ConfigError) as refusal:
        entries.load("change", folder=tmp_path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
