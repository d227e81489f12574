# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The commands of docs/checkpoints.md run in order, as a user would type them, with small random weights and digits."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from own_reading import DIGITS_AS_LATENTS, DIT, LIGHTNINGDIT, REPA, SIT, random_weights

from torchditan.config.options import Config, flatten

if TYPE_CHECKING:
    from tests.conftest import RunScript

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
MODELS = {
    "dit": replace(DIT, side=4),
    "sit": replace(SIT, side=4),
    "repa": replace(REPA, side=4),
    "lightningdit": replace(LIGHTNINGDIT, side=4, channels=4, output_channels=4),
}
"""By `--format`."""
SMALLER = {
    "import": DIGITS_AS_LATENTS,
    "generate": ("--classes=2,3", "--sampling.num_steps=3", "--sampling.images_per_class=1"),
    "evaluate": ("--metrics=classifier", "--num_samples=10", "--sampling.num_steps=2", "--epochs=1"),
    "train": ("--training.steps=10", "--training.batch_size=4", "--dataset.num_workers=0", "--sampling.num_steps=2"),
}
"""Options in place of those of the page."""
KEPT = ("--format", "--num_classes", "--job.config_file")
"""Options of the page that stay."""


def section_of(title: str) -> str:
    """The text of a section of the page."""
    found = re.findall(rf"^### {title}\n(.*?)(?=^##)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (text,) = found
    return text


def commands(title: str) -> list[list[str]]:
    """The commands in a section of the page, as lists of words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", section_of(title), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in "".join(blocks).replace("\\\n", " ").splitlines()]


def commands_of(format: str) -> list[list[str]]:
    """Those for a format of released weights. The page has what follows an import once, for the run of the first."""
    found = commands("Released checkpoints")
    imports = [words for words in found if words[1] == "import" and words[words.index("--format") + 1] == format]
    first = found[0][3]
    rest = [words for words in found if words[1] != "import" and words[2].startswith(first)]
    assert first == "outputs/dit_xl" and len(rest) == 3
    if format == "dit":  # with the import for other classes, and its training
        return found[:1] + found[found.index(rest[0]) :]
    return imports + [[*words[:2], words[2].replace(first, imports[0][3]), *words[3:]] for words in rest]


def made_small(words: list[str]) -> tuple[str, list[str]]:
    """Name and arguments of a command, for small random weights and digits."""
    assert words[0] == "torchditan"
    name, *rest = words[1:]
    number = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    options = dict(zip(rest[number::2], rest[number + 1 :: 2], strict=True))
    kept = [f"{name}={value}" for name, value in options.items() if name in KEPT]
    return name, [*rest[:number], *kept, *SMALLER[name]]


def run_commands(format: str, run_script: RunScript, *, names: Collection[str]) -> list[str]:
    """Run those commands of a format that have these names, in the working folder; return their names."""
    done = []
    for words in commands_of(format):
        if words[1] not in names:
            continue
        name, arguments = made_small(words)
        if name == "import":
            torch.save(random_weights(MODELS[format]), arguments[0])
        outcome = run_script("torchditan", name, *arguments)
        assert outcome.code == 0, (words, outcome.err)
        done.append(name)
    return done


def test_every_option_of_the_page_exists(run_script: RunScript) -> None:
    """Other tests replace the page's values by small ones; this one reads each option as it is written."""
    names = ("import", "export", "generate", "evaluate", "share", "report")
    help_of = {name: run_script("torchditan", name, "--help").out for name in names}
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line) for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    seen = 0
    for words in lines:
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option[2:] in flatten(Config()) or f"{option} " in help_of.get(words[1], ""), (option, words)
            seen += 1
    assert seen > 25
    for option in re.findall(r"`(--[a-z_.]+)", text):
        if not option.endswith(".") and option != "--max":  # --dataset.*, and --max-restarts of torchrun
            assert option[2:] in flatten(Config()) or any(f"{option} " in text for text in help_of.values()), option


@pytest.mark.parametrize("format", MODELS)
def test_a_file_becomes_samples(format: str, tmp_path: Path, run_script: RunScript) -> None:
    done = run_commands(format, run_script, names=("import", "generate"))
    assert set(done) == {"import", "generate"}
    (picture,) = tmp_path.glob("outputs/*/samples/generated_*.png")
    assert picture.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("format", ["dit", "lightningdit"])
def test_a_file_becomes_a_card_and_further_training(format: str, tmp_path: Path, run_script: RunScript) -> None:
    """All commands of a format: samples, a card, and 10 further training steps of each run."""
    done = run_commands(format, run_script, names=SMALLER)
    assert set(done) == SMALLER.keys()
    (card,) = tmp_path.glob("outputs/*/evaluation/*/card.json")
    assert json.loads(card.read_text(encoding="utf-8"))
    runs = list(tmp_path.glob("outputs/*-continued"))
    assert len(runs) == done.count("train")
    for run in runs:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert json.loads(lines[-1])["step"] == 10
