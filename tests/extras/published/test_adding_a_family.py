# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/extending.md: adding a family takes one file and one line of the registry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchditan.extras.published
from torchditan import registry
from torchditan.config.loader import as_flags, load_config
from torchditan.errors import ConfigError
from torchditan.extras.published.resolutions import published_options, resolution_of
from torchditan.models import model_spec_of

pytest.importorskip("diffusers")

if TYPE_CHECKING:
    pass

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


@pytest.mark.usefixtures("my_family")
def test_it_has_a_spec_a_place_in_grids_and_a_name_in_messages() -> None:
    options = published_options("my_family/Mine", None)
    config = load_config([*as_flags(options)])
    assert resolution_of(config) == "1024x1024" and config.dataset.image_size == [128, 128]
    spec = model_spec_of(config, sample_shape=(16, 128, 128), num_classes=0)
    assert (spec.name, spec.flavor, spec.num_tokens) == ("my_family", "Mine", 64 * 64)
    for flags in (["--model.name=my_famly"], ["--model.name=my_family", "--model.flavor=mine"]):
        with pytest.raises(ConfigError, match=r"did you mean (my_family|Mine)\?"):
            load_config(flags)
    with pytest.raises(ConfigError, match=r"did you mean my_family/Mine\?"):
        published_options("my_family/Min", None)
