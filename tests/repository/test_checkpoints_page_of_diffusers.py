# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The commands of docs/checkpoints.md about diffusers run, with a small random pipeline and digits."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_checkpoints_page import SMALLER, commands, commands_of, section_of

pytest.importorskip("diffusers")

from random_dit import random_pipeline

if TYPE_CHECKING:
    from tests.conftest import RunScript

KEPT = ("--format", "--noise_schedule", "--prediction", "--job.config_file")
"""Options of the page that stay."""


def run_commands(run_script: RunScript, *, names: Collection[str]) -> list[str]:
    """Run those commands that have these names, in the working folder; return their names."""
    done = []
    for words in [*commands_of("diffusers"), *commands("Export to diffusers")]:
        assert words[0] == "torchditan"
        name, *rest = words[1:]
        if name not in names:
            continue
        number = next(i for i, word in enumerate([*rest, "--"]) if word.startswith("--"))
        options = dict(zip(rest[number::2], rest[number + 1 :: 2], strict=True))
        kept = [f"{option}={value}" for option, value in options.items() if option in KEPT]
        small = () if name in ("import", "export") else SMALLER[name]
        digits = ["--dataset.dataset_name=digits"] if name == "import" else []
        outcome = run_script("torchditan", name, *rest[:number], *kept, *small, *digits)
        assert outcome.code == 0, (words, outcome.err)
        done.append(name)
    return done


@pytest.fixture
def downloaded(tmp_path: Path) -> None:
    """The pipeline that the page imports."""
    random_pipeline(image_channels=1, sample_size=4).save_pretrained(tmp_path / "DiT-XL-2-256")


@pytest.mark.usefixtures("downloaded")
def test_a_pipeline_becomes_samples_and_a_pipeline_again(tmp_path: Path, run_script: RunScript) -> None:
    assert sorted(run_commands(run_script, names=("import", "export", "generate"))) == [
        "export",
        "generate",
        "import",
        "import",
    ]
    (picture,) = tmp_path.glob("outputs/*/samples/generated_*.png")
    assert picture.stat().st_size > 0
    (code,) = re.findall(r"^```python\n(.*?)^```", section_of("Export to diffusers"), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(code.replace("num_inference_steps=50", "num_inference_steps=2"), names)
    assert type(names["pipeline"]).__name__ == "DiTPipeline" and "image" in names


@pytest.mark.slow
@pytest.mark.usefixtures("downloaded")
def test_a_pipeline_becomes_a_card_and_further_training(tmp_path: Path, run_script: RunScript) -> None:
    assert set(run_commands(run_script, names=SMALLER)) == SMALLER.keys()
    assert len(list(tmp_path.glob("outputs/*/evaluation/*/card.json"))) == 1
    (log,) = tmp_path.glob("outputs/*-continued/metrics.jsonl")
    assert '"step": 10' in log.read_text(encoding="utf-8").splitlines()[-1]
