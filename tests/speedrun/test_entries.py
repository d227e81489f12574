# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Entries of the speedrun: those in the repository, inheritance, and the rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speedrun import entries
from torchditan import registry
from torchditan.config.loader import load_config
from torchditan.errors import ConfigError

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
ALL = [(track, name) for track in entries.track_names() for name in entries.load_track(track).names()]


@pytest.fixture
def track(tmp_path: Path) -> entries.Track:
    """`earth`, with one entry."""
    found = replace(entries.load_track("earth"), folder=tmp_path, baseline="")
    write(found, "base", BASE)
    return found


def write(track: entries.Track, name: str, text: str) -> None:
    path = track.folder / "entries" / f"{name}.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.nightly
@pytest.mark.parametrize(("track", "name"), ALL)
def test_every_entry_is_a_training_that_its_track_allows(
    track: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entries.load(entries.load_track(track), name)
    for table, lines in entry.registry.items():
        for key, value in lines.items():
            monkeypatch.setitem(getattr(registry, table), key, value)
    config = load_config(entry.flags(seed=3))
    assert config.training.seed == 3
    assert config.training.steps * config.training.global_batch_size == entry.images
    assert config.model.path is None
    assert {*entry.compare} <= {*entry.track.names()}


def test_an_entry_inherits_what_it_does_not_change(track: entries.Track) -> None:
    write(track, "base", BASE + "[ema]\nenable = false\n")
    write(track, "change", '[entry]\nbase = "base"\nema_width = 0.05\n[optimizer]\nlr = 3e-3\n')
    entry = entries.load(track, "change.toml")
    assert entry.settings == {**entries.load(track, "base").settings, "optimizer.lr": 3e-3}
    assert (entry.images, entry.num_steps, entry.ema_width) == (640, 10, 0.05)
    assert [flag for flag in entry.flags(seed=0) if flag.startswith("--ema")] == ["--ema.width=0.05"]
    assert entries.load(track, "change", {"optimizer.lr": 1e-4}).settings["optimizer.lr"] == 1e-4


def test_a_recipe_names_what_changes_a_step_and_a_digest_what_changes_the_training(track: entries.Track) -> None:
    for name, change in {
        "longer": "images = 6400",
        "averaged": "ema_width = 0.1",
        "sampled": "[sampling]\nnum_steps = 16",
        "trained": "[optimizer]\nlr = 3e-3",
    }.items():
        write(track, name, f'[entry]\nbase = "base"\n{change}\n')
    base, longer, averaged, sampled, trained = (
        entries.load(track, name) for name in ("base", "longer", "averaged", "sampled", "trained")
    )
    assert base.recipe() == longer.recipe() == averaged.recipe() == sampled.recipe() != trained.recipe()
    assert base.digest() == sampled.digest()
    assert len({entry.digest() for entry in (base, longer, averaged, trained)}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("colour = 1\n", "colour is not a key of [entry]; must be one of title"),
        ("images = 650\n", "images = 650: must be 1 to 96000, and a multiple of training.global_batch_size = 64"),
        ("registry = 1\n", "registry = 1: must be of the type dict"),
        ('compare = ["bass"]\n', 'compare = "bass": must be another entry'),
        ("[training]\nmax_nrom = 1\n", "training.max_nrom is not an option; did you mean training.max_norm"),
        ("[sampling]\nguidance_scale = 2\n", "the track fixes sampling.guidance_scale"),
        ("[dataset]\nhorizontal_flip = true\n", "the track fixes dataset.horizontal_flip"),
        ("[sampling]\nnum_steps = 33\n", "sampling.num_steps = 33: must be at most 32"),
        ('[sampling]\nsampler = "heun"\n', "sampling.num_steps = 32: must be at most 16"),
        ('[entry.registry.METRICS]\neffnet = "a:b"\n', "[entry.registry.METRICS] cannot be extended; must be one of"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused_in_one_line(track: entries.Track, change: str, message: str) -> None:
    write(track, "change", f'[entry]\nbase = "base"\n{change}')
    with pytest.raises(ConfigError) as refusal:
        entries.load(track, "change")
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
