# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/adding_a_model.md: adding a family takes one file and one line of the registry."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchditan.extras.published
from torchditan import registry
from torchditan.config.loader import load_config
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import as_flags
from torchditan.extras.published.resolutions import published_options, resolution_of
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.models import model_spec_of

pytest.importorskip("diffusers")

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[3]
MODULE = "torchditan.extras.published.my_family"


@pytest.fixture
def my_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guide's example under another name, in a folder outside the repository, and its line."""
    code = (REPOSITORY / "torchditan/extras/published/qwen_image.py").read_text(encoding="utf-8")
    for old, new in (
        ('"qwen_image"', '"my_family"'),
        ("class QwenImage(", "class MyFamily("),
        ('"Qwen-Image"', '"Mine"'),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "added").mkdir()
    (tmp_path / "added/my_family.py").write_text(code, encoding="utf-8")
    package = torchditan.extras.published
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "added")])
    monkeypatch.setitem(registry.FAMILIES, "my_family", f"{MODULE}:MyFamily")
    yield
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model.name=my_famly --model.flavor=debugmodel",
            'model.name = "my_famly": must be one of dit, flux, sd3, sdxl, mochi, hunyuan_video, wan, qwen_image, '
            "my_family, or module:name; did you mean my_family?",
        ),
        (
            "--model.name=my_family --model.flavor=mine",
            'model.flavor = "mine": must be one of debugmodel, Mine for my_family; did you mean Mine?',
        ),
        (
            "--model.name=my_family --model.flavor=Mine --diffusion.objective=ddpm",
            "my_family was trained with flow_matching; set --diffusion.objective flow_matching",
        ),
    ],
)
@pytest.mark.usefixtures("my_family")
def test_its_mistakes_are_refused_in_a_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(flags.split())


@pytest.mark.usefixtures("my_family")
def test_it_has_a_spec_and_a_place_in_grids() -> None:
    options = published_options("my_family/Mine", None)
    config = load_config([*as_flags(options)])
    assert resolution_of(config) == "1024x1024" and config.dataset.image_size == [128, 128]
    spec = model_spec_of(config, sample_shape=(16, 128, 128), num_classes=0)
    assert (spec.name, spec.flavor, spec.num_tokens) == ("my_family", "Mine", 64 * 64)
    with pytest.raises(ConfigError, match=r"did you mean my_family/Mine\?"):
        published_options("my_family/Min", None)


@pytest.mark.usefixtures("my_family")
def test_it_trains(tmp_path: Path, run_script: RunScript) -> None:
    flags = [*as_flags(published_options("my_family/debugmodel", None))]
    flags += ["--dataset.dataset_name=dummy", "--dataset.dummy_size=8", "--dataset.num_workers=0"]
    flags += ["--training.batch_size=2", "--training.mixed_precision_param=float32", "--training.steps=1"]
    flags += ["--metrics.enable_sampling=false", "--checkpoint.enable_checkpoint", f"--job.dump_folder={tmp_path}"]
    outcome = run_script("train.py", *flags, "--metrics.experiment_name=run")
    assert outcome.code == 0, outcome.err
    assert TrainedModel.open(tmp_path / "run", device="cpu").spec.name == "my_family"
