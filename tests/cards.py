# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A complete card for tests, with values that can be replaced, and the values of a card that was written."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchditan.extras.evaluation.card import Card, CardFigure, Data, ImageSet, read_card

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript


def figure(
    value: float, half: float | None = None, *, extractor: str | None = "EffNetLite0", num_images: int = 2600
) -> CardFigure:
    """With an interval of three seeds if there is a half width."""
    return CardFigure(
        value=value,
        low=None if half is None else value - half,
        high=None if half is None else value + half,
        interval=None if half is None else "sampling only: 95%, 3 seeds",
        num_images=num_images,
        extractor=extractor,
        per_seed=[value, value - 0.25, value + 0.25],
    )


def values(evaluated: Outcome) -> dict[str, Any]:
    """By name, in the card that this call of torchditan evaluate wrote; with the step and the number of samples."""
    (line,) = [line for line in evaluated.err.splitlines() if line.startswith("card: ")]
    found = read_card(line.removeprefix("card: "))
    about = {"step": found.step, "num_samples": found.num_samples}
    return about | {name: figure.value for name, figure in found.figures.items()} | found.other


def repeated(folder: Path, run_script: RunScript) -> Card:
    """The card of the command in card.md, in another folder. Its samples and figures are equal to the bit."""
    (line,) = [line for line in (folder / "card.md").read_text().splitlines() if line.startswith("    torchditan ")]
    again = folder.with_name(f"{folder.name}_again")
    outcome = run_script(*shlex.split(line), f"--out={again}")
    assert outcome.code == 0, outcome.err
    old, new = read_card(folder), read_card(again)
    assert (new.samples, new.figures) == (old.samples, old.figures)
    return new


def card(**changes: Any) -> Card:
    """Of step 600 of outputs/quickstart, with three sampling seeds."""
    whole = Card(
        run="outputs/quickstart",
        run_id="12ab34cd",
        step=600,
        images_seen=38400,
        weights="ema",
        ema_decay=0.999,
        training_seed=0,
        config_hash="c" * 64,
        training_commit="b" * 40,
        training_versions={"torch": "2.13.0"},
        training_hardware="1 x a CPU",
        data=Data(name="digits", fingerprint=None, image_size=[8, 8], num_classes=10),
        model="dit DiT-Ti",
        model_parameters=5_123_456,
        sampling={
            "sampler": "euler",
            "num_steps": 50,
            "spacing": "trailing",
            "clip_sample": None,
            "timestep_shift": None,
            "guidance_scale": 2.0,
            "guidance_interval": [0.1, 0.9],
            "guidance_channels": None,
            "negative_prompt": "",
        },
        model_evaluations=90,
        commit="a" * 40,
        seeds=[1, 2, 3],
        num_samples=2600,
        options={
            "run": "outputs/quickstart",
            "step": 600,
            "metrics": ["effnet", "classifier"],
            "class_balance": "data",
            "rounding": "nearest",
            "batch_size": 250,
        },
        metrics=["effnet", "classifier"],
        reference=ImageSet(source="train", num_images=1500, content="d" * 64),
        held_out=ImageSet(source="held_out", num_images=297, content="e" * 64),
        extractors={"EffNetLite0": "f" * 64},
        figures={
            "FD-EffNetLite0": figure(12.34567, 0.41234),
            "KID-EffNetLite0": figure(0.0012345, 0.00012),
            "coverage-EffNetLite0": figure(0.91234, 0.0123),
            "recall-EffNetLite0": figure(0.61234, 0.0321),
            "copies: nearer than held-out": figure(0.0512),
            "accuracy_generated": figure(0.9734, 0.0042, extractor=None),
        },
        other={"per_class": {"0": 0.98, "1": 0.97}},
        versions={"torchditan": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        device="cpu",
        device_name="a CPU",
        seconds=12.5,
        created="2026-11-22T09:00:00+00:00",
    )
    return replace(whole, **changes)
