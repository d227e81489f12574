# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The page of the speedrun, from invented results, and the one in the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import entries
import leaderboard
import pytest

from torchditan.config.errors import ConfigError

SCRIPT = Path(leaderboard.__file__)
BASELINE = replace(entries.load("official_dit"), images=96_000)
WINNER = replace(BASELINE, name="winner", title="ours", images=19_200, settings={"training.global_batch_size": 32})
RUNG = replace(BASELINE, name="rung", title="one change", rung=1, base="official_dit")


def results(entry: entries.Entry, distances: dict[int, float], **figures: float) -> dict[int, dict[str, Any]]:
    return {
        seed: {
            "entry": entry.name,
            "seed": seed,
            "steps": entry.images // 64,
            "images": entry.images,
            "training_flops": 1e12 * entry.images,
            "figures": {
                "fd": fd,
                "kid_held_out": fd / 1000,
                "nearest_distance": 9.0,
                "held_out_nearest_distance": 6.0,
                **figures,
            },
        }
        for seed, fd in distances.items()
    }


def page(found: dict[str, Any], chosen: list[entries.Entry], trials: list[Any] | None = None, times: Any = None) -> str:
    return leaderboard.page(chosen, {**{entry.name: {} for entry in chosen}, **found}, trials or [], times or {})


def confirmed() -> dict[str, Any]:
    return {
        "official_dit": results(BASELINE, {10: 60.0, 11: 62.0, 12: 61.0}),
        "winner": results(WINNER, {10: 50.0, 11: 51.0, 12: 50.5}),
    }


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| [{name}]"))


def test_a_record_is_compared_with_the_baseline_at_the_same_seeds() -> None:
    times = {WINNER.recipe: {"ratio": 1.1}}
    text = page(confirmed(), [BASELINE, WINNER], times=times)
    assert text.index("[winner]") < text.index("[official_dit]"), "the best comes first"
    # log(60/50), log(62/51), log(61/50.5): mean 18.9%; FLOPs 1/5, time 300 / 1500 x 1.1
    assert "| 19,200 | 50.5 ± 1.2 | 50.5 ± 1.2 | 0.20 | 0.22 | yes: +18.9%, +" in row(text, "winner")
    assert "| 96,000 | 61.0 ± 2.5 |" in row(text, "official_dit")


def test_noise_distances_to_training_images_alone_and_copies_are_no_record() -> None:
    found = confirmed()
    found["winner"] = results(WINNER, {10: 50.0, 11: 63.0, 12: 61.5})
    assert "| no: " in row(page(found, [BASELINE, WINNER]), "winner")
    found["winner"] = results(WINNER, {10: 50.0, 11: 51.0, 12: 50.5}, kid_held_out=0.2)
    assert "| no: +18.9%" in row(page(found, [BASELINE, WINNER]), "winner")
    assert "KID disagrees" in row(page(found, [BASELINE, WINNER]), "winner")
    found["winner"] = results(WINNER, {10: 50.0, 11: 51.0, 12: 50.5}, nearest_distance=5.0)
    assert "**copies**: not valid" in row(page(found, [BASELINE, WINNER]), "winner")


def test_times_that_are_missing_or_noisy_are_not_shown() -> None:
    assert "| not measured |" in row(page(confirmed(), [BASELINE, WINNER]), "winner")
    assert "| too noisy |" in row(
        page(confirmed(), [BASELINE, WINNER], times={WINNER.recipe: {"ratio": None}}), "winner"
    )


def test_a_failed_rung_stays_in_the_table() -> None:
    found = {
        "official_dit": results(BASELINE, {0: 100.0, 1: 101.0, 2: 99.0}),
        "rung": results(RUNG, {0: 100.0, 1: 102.0, 2: 98.0}),
        "better": results(RUNG, {0: 80.0, 1: 81.0, 2: 79.0}),
    }
    better = replace(RUNG, name="better", title="another change", rung=2)
    lines = page(found, [BASELINE, RUNG, better]).splitlines()
    assert next(line for line in lines if line.startswith("| 1 |")).endswith("| 1.00 | no |")
    assert next(line for line in lines if line.startswith("| 2 |")).endswith("| 1.00 | **yes** |")


def test_tuning_trials_are_counted() -> None:
    trials = [
        {
            "entry": "official_dit",
            "changes": {"optimizer.lr": lr},
            "seed": 100,
            "ema_width": width,
            "figures": {"fd": 50},
        }
        for lr in (1e-4, 1e-3)
        for width in (0.05, 0.1)
    ]
    lines = page({}, [BASELINE], trials).splitlines()
    assert "| official_dit | 2 | optimizer.lr = 0.0001 | 100 | 0.05: 50.0, 0.1: 50.0 |" in lines


def test_a_result_of_another_definition_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "official_dit"
    folder.mkdir()
    (folder / "seed-0.json").write_text(json.dumps({"seed": 0, "definition": {}}))
    with pytest.raises(ConfigError, match="is of another definition of official_dit"):
        leaderboard.read_results(tmp_path, BASELINE)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    leaderboard.draw([BASELINE, WINNER], confirmed(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_page_of_the_repository_follows_from_its_results() -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--check"], check=True, timeout=120)
