# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The commands in the diffusers sections of docs/checkpoints.md run, with a small random pipeline and digits."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_checkpoints_page import PAGE, SMALLER, commands

pytest.importorskip("diffusers")

from random_dit import random_pipeline

if TYPE_CHECKING:
    from tests.conftest import RunScript

CONVERT = "scripts/convert_checkpoint.py"
KEPT = ("--format", "--noise_schedule", "--prediction", "--job.config_file")
"""Options of the page that stay."""


def run_commands(run_script: RunScript, *, scripts: Collection[str]) -> list[str]:
    """Run the commands of both sections that call these scripts, in the working folder; return the scripts."""
    done = []
    for words in [*commands("diffusers"), *commands("Export to diffusers")]:
        assert words[0] == "python"
        script, *rest = words[1:]
        if script not in scripts:
            continue
        number = next(i for i, word in enumerate([*rest, "--"]) if word.startswith("--"))
        options = dict(zip(rest[number::2], rest[number + 1 :: 2], strict=True))
        kept = [f"{name}={value}" for name, value in options.items() if name in KEPT]
        small = () if script == CONVERT else SMALLER[script]
        digits = ["--dataset.dataset_name=digits"] if rest[0] == "import" else []
        outcome = run_script(script, *rest[:number], *kept, *small, *digits)
        assert outcome.code == 0, (words, outcome.err)
        done.append(script)
    return done


@pytest.fixture
def downloaded(tmp_path: Path) -> None:
    """The pipeline that the page imports."""
    random_pipeline(image_channels=1, sample_size=4).save_pretrained(tmp_path / "DiT-XL-2-256")


@pytest.mark.usefixtures("downloaded")
def test_a_pipeline_becomes_samples_and_a_pipeline_again(tmp_path: Path, run_script: RunScript) -> None:
    assert run_commands(run_script, scripts=(CONVERT, "scripts/generate.py")).count(CONVERT) == 3
    (picture,) = tmp_path.glob("outputs/*/samples/generated_*.png")
    assert picture.stat().st_size > 0
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(code.replace("num_inference_steps=50", "num_inference_steps=2"), names)
    assert type(names["pipeline"]).__name__ == "DiTPipeline" and "image" in names


@pytest.mark.slow
@pytest.mark.usefixtures("downloaded")
def test_a_pipeline_becomes_a_card_and_further_training(tmp_path: Path, run_script: RunScript) -> None:
    assert set(run_commands(run_script, scripts=SMALLER)) == SMALLER.keys()
    assert len(list(tmp_path.glob("outputs/*/evaluation/*/card.json"))) == 1
    (log,) = tmp_path.glob("outputs/*-continued/metrics.jsonl")
    assert '"step": 10' in log.read_text(encoding="utf-8").splitlines()[-1]
