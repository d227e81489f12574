# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Parts from outside the package: names, options after them, entry points, configurations from functions."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

import torchditan
from torchditan.config.errors import ConfigError
from torchditan.config.loader import from_dict, load_config, to_dict
from torchditan.config.options import Config, Model, Training
from torchditan.diffusion.samplers import Euler
from torchditan.registry import OPTIMIZERS, SAMPLERS, installed_plug_ins, resolve
from torchditan.run.reading import read_metrics

HERE = __name__


class Mine(Euler):
    def __init__(self, strength: float = 1.0, steps: Any = None) -> None:
        self.strength, self.steps = strength, steps


class OfLevels(Euler):
    flow = Euler.__mro__[-2].flow  # type: ignore[attr-defined]  # of the base class: it works on levels alone


def configuration() -> Config:
    return Config(training=Training(steps=7, batch_size=8), model=Model(flavor="debugmodel"))


def three() -> int:
    return 3


def broken() -> Config:
    raise RuntimeError("no disk\nmore")


def test_options_follow_the_name() -> None:
    found, options = resolve(
        SAMPLERS, "sampling.sampler", f"{HERE}:Mine strength=0.5 steps=2,5 flag=true word=a none=none"
    )
    assert found is Mine
    assert options == {"strength": 0.5, "steps": [2, 5], "flag": True, "word": "a", "none": None}


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("no_such_lab:Mine", ["No module named 'no_such_lab'", "module:name"]),
        (f"{HERE}:Missing", ["Missing", "module:name"]),
        (f"{HERE}:three", ["torchditan.diffusion.samplers.Sampler"]),
        (f"{HERE}:Config", ["torchditan.diffusion.samplers.Sampler"]),
        ("eulr", ["euler?"]),
        (f"{HERE}:Mine strength", ["key=value"]),
        (f"{HERE}:Mine power=1", ["power", "strength, steps"]),
        (f"{HERE}:OfLevels", ["flow_matching", "euler"]),
    ],
)
def test_a_part_that_does_not_fit_is_refused_in_one_line(text: str, mentions: list[str]) -> None:
    with refused(f'sampling.sampler = "{text}"', *mentions):
        config = load_config([f"--sampling.sampler={text}"])
        from torchditan.diffusion.samplers import build_sampler

        build_sampler(config.sampling)


def test_an_installed_plug_in_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint("mine", f"{HERE}:Mine", group)] if group == "torchditan.samplers" else []

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    monkeypatch.setattr("torchditan.registry.installed_plug_ins", installed_plug_ins.__wrapped__)  # without its cache
    assert load_config(["--sampling.sampler=mine strength=2"]).sampling.sampler == "mine strength=2"
    assert resolve(SAMPLERS, "sampling.sampler", "mine")[0] is Mine
    with refused('optimizer.name = "mine"', "AdamW"):
        load_config(["--optimizer.name=mine"])
    assert "mine" not in SAMPLERS and "mine" not in OPTIMIZERS


def test_a_configuration_may_come_from_a_function() -> None:
    config = load_config([f"--job.config_file={HERE}:configuration", "--training.batch_size=4"])
    assert (config.training.steps, config.training.batch_size, config.model.flavor) == (7, 4, "debugmodel")
    assert config.metrics.experiment_name == "configuration"
    for name, mention in (("three", "int"), ("broken", "no disk"), ("missing", "missing")):
        with refused(f'job.config_file = "{HERE}:{name}"', mention):
            load_config([f"--job.config_file={HERE}:{name}"])


def test_train_returns_the_finished_run_and_continues_one(tmp_path: Path) -> None:
    tiny = {"batch_size": 8, "global_batch_size": 8, "flavor": "debugmodel", "dump_folder": str(tmp_path)}
    tiny |= {"validation.freq": 0, "enable_sampling": False, "sampling.num_steps": 2, "log_freq": 1}
    for steps in (1, 2):
        run = torchditan.train("quickstart", steps=steps, **tiny)
    assert [record["step"] for record in read_metrics(tmp_path / "quickstart")] == [1, 2]
    assert run.sample(classes=[3], seed=0).shape == (1, 1, 8, 8)
    for name, mention in (("stepss", "steps?"), ("freq", "validation.freq")):
        with pytest.raises(ConfigError, match=name) as caught:
            torchditan.train("quickstart", **{name: 1})
        assert mention in str(caught.value)


@pytest.mark.parametrize(
    "option", ["diffusion.objective", "sampling.sampler", "diffusion.ingredients", "autoencoder.name"]
)
def test_a_stored_configuration_imports_no_file_of_the_current_folder(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_lab.py").write_text("from pathlib import Path\nPath('executed').touch()\nclass Part: pass\n")
    section, _, key = option.partition(".")
    stored = to_dict(Config())
    stored[section][key] = ["evil_lab:Part"] if key == "ingredients" else "evil_lab:Part"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *sys.path])  # as `python -c` and `python -m` do
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with refused(f"{option} = ", "PYTHONPATH"):
        from_dict(stored)
    assert not (tmp_path / "executed").exists() and "evil_lab" not in sys.modules
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the user's doing
    assert from_dict(stored) is not None
