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
from torchditan.config.loader import from_dict, load_config, to_dict
from torchditan.config.options import Config, LRScheduler, Model, Training
from torchditan.diffusion.objectives import Objective
from torchditan.diffusion.samplers import Euler
from torchditan.errors import ConfigError
from torchditan.models import ModelSpec, build_model_spec
from torchditan.optim.meters import Meter
from torchditan.optim.schedules import Schedule
from torchditan.registry import ARCHITECTURES, OPTIMIZERS, SAMPLERS, installed_plug_ins, registered, resolve
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
        ("my_lab.py:Mine", ["my_lab:Mine"]),
        ("my_lab:Mine()", ["module:name"]),
        (f"{HERE}:Missing", ["Missing", "module:name"]),
        (f"{HERE}:three", ["torchditan.diffusion.samplers.Sampler"]),
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
    ("option", "module"),
    [
        ("diffusion.objective", "evil_lab"),
        ("diffusion.ingredients", "evil_lab"),
        ("autoencoder.name", "evil_lab"),
        ("model.name", "evil_lab"),
        ("sampling.sampler", "this"),  # a module of Python too
        ("sampling.sampler", "evil_package.inner"),  # of a namespace package
    ],
)
def test_a_stored_configuration_imports_no_file_of_the_current_folder(
    option: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("from pathlib import Path\nPath('executed').touch()\nclass Part: pass\n")
    section, _, key = option.partition(".")
    stored = to_dict(Config())
    stored[section][key] = [f"{module}:Part"] if key == "ingredients" else f"{module}:Part"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), *sys.path])  # as `python -c` and `python -m` do
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with refused(f"{option} = ", "PYTHONPATH"):
        from_dict(stored)
    assert not (tmp_path / "executed").exists() and module not in sys.modules
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the user's doing
    assert from_dict(stored) is not None


class NoFactor(Schedule):
    pass


class TooHigh(Schedule):
    def __init__(self, config: LRScheduler, height: float = 1.0) -> None:
        super().__init__(config)
        self.height = height

    def factor(self, step: int, *, steps: int) -> float:
        return self.height


class NoRead(Meter):
    pass


class NoTarget(Objective):
    pass


class Broken(Meter):
    def read(self) -> dict[str, float]:
        raise ArithmeticError("a fault of the meter")


class Picky(Euler):
    def __init__(self, strength: float) -> None:
        if strength < 0:
            raise ValueError("strength must not be negative")


def like_the_dit(config: Model, **shapes: Any) -> ModelSpec:
    return registered(ARCHITECTURES, "dit")(config, **shapes)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("option", "value", "mentions"),
    [
        ("sampling.sampler", "Picky", ["strength"]),
        ("sampling.sampler", "Picky strength=-1", ["negative"]),
        ("sampling.sampler", "Mine strength=1 strength=2", ["strength", "twice"]),
        ("lr_scheduler.schedule", "NoFactor", ["factor"]),
        ("lr_scheduler.schedule", "TooHigh height=2", ["factor", "2"]),
        ("lr_scheduler.schedule", "TooHigh width=2", ["width", "height"]),
        ("metrics.meters", "NoRead", ["read"]),
        ("diffusion.objective", "NoTarget", ["build"]),
    ],
)
def test_a_part_is_checked_before_the_run(option: str, value: str, mentions: list[str]) -> None:
    with refused(f"{option} = ", *mentions):
        load_config([f"--{option}={HERE}:{value}"])


def test_an_architecture_from_outside() -> None:
    shapes: dict[str, Any] = {"sample_shape": (1, 8, 8), "num_classes": 10}
    name = f"{HERE}:like_the_dit"
    assert load_config([f"--model.name={name}"]).model.name == name
    mine, dit = (build_model_spec(Model(flavor="debugmodel", **named), **shapes) for named in ({"name": name}, {}))
    assert mine.build().state_dict().keys() == dit.build().state_dict().keys()


def test_after_an_error_in_a_step_the_same_process_trains_again(tmp_path: Path) -> None:
    tiny = {"batch_size": 8, "global_batch_size": 8, "flavor": "debugmodel", "dump_folder": str(tmp_path), "steps": 1}
    tiny |= {"validation.freq": 0, "enable_sampling": False}
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="a fault of the meter"):
            torchditan.train("quickstart", **tiny, meters=[f"{HERE}:Broken"])
    torchditan.train("quickstart", **tiny)
    assert [record["step"] for record in read_metrics(tmp_path / "quickstart")] == [1]
