# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Prompts from files: which lines count, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import refused

from torchditan.config.loader import from_dict, load_config, override, to_dict
from torchditan.config.prompts import read_prompts

TEXT = ["--model.text=in_context", "--sampling.prompts"]


def test_a_file_stands_for_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_bytes("\ufeff# a comment\r\n\r\n一只猫\r\n  a, b \n@home #1\n".encode())
    assert read_prompts("--prompts", ["one", "@p.txt", "two"]) == ["one", "一只猫", "a, b", "@home #1", "two"]
    config = load_config([*TEXT, "@p.txt"])
    assert config.sampling.prompts == ["一只猫", "a, b", "@home #1"]
    Path("job.toml").write_text('[model]\ntext = "in_context"\n[sampling]\nprompts = ["@p.txt", "x"]\n')
    assert load_config(["--job.config_file=job.toml"]).sampling.prompts == [*config.sampling.prompts, "x"]
    Path("p.txt").write_text("another")
    assert from_dict(to_dict(config)) == config  # a stored prompt that starts with @ is a text
    changed = override(config, ["--sampling.prompts", "@p.txt"], sections=("sampling",))
    assert changed.sampling.prompts == ["another"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    for content, why in ((None, "No such file"), (b"\xff\xfe", "UTF-8"), (b"\n# only\n", "no prompts")):
        if content is not None:
            path.write_bytes(content)
        with refused(f'sampling.prompts = "@{path}"', why):
            load_config([*TEXT, f"@{path}"])
    with refused(f'--prompts = "@{tmp_path}"', "directory"):
        read_prompts("--prompts", [f"@{tmp_path}"])
    with refused('--prompts = "caf?"', "UTF-8", "LC_ALL=C.UTF-8"):
        read_prompts("--prompts", ["caf\udce9"])
