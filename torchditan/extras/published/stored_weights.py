# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Locates published weights and reads them one tensor at a time.

Notable:
- only safetensors: a pickle can execute code;
- a folder of diffusers is read directly from its mapped files, in any number of shards. diffusers renames a single file
  with its publisher's names, which needs the whole file in host memory once per rank;
- every tensor must be present with the right shape. Otherwise a missing tensor would silently keep random values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from torchditan.checkpoint.safetensors_files import open_file
from torchditan.errors import ConfigError, option_error
from torchditan.extras.published.base import require
from torchditan.extras.published.lora_file import PEFT_CONFIG
from torchditan.run.hub import fetch, is_hub_name

_WHOLE_PIPELINE = "model.diffusion_model."
"""Prefix of the transformer in files that also have its text encoders and autoencoder."""
_PREFIXES = ("", _WHOLE_PIPELINE, "diffusion_model.", "model.", "transformer.")
"""Prefixes of the names of a transformer's tensors in files."""
_SCALES = ("scale_weight", "weight_scale", "scaled_fp8", "SCB")
"""Ends of the names that only quantized files have."""


@dataclass(frozen=True)
class PublishedWeights:
    """Weights of one transformer on disk."""

    path: Path
    """A folder with config.json, or one .safetensors file."""

    @property
    def is_file(self) -> bool:
        return self.path.is_file()

    def config(self) -> dict[str, Any] | None:
        """The config.json of the folder; None for a single file."""
        if self.is_file:
            return None
        content: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8-sig"))
        return content

    def is_distilled(self) -> bool:
        """Whether the model_index.json of the pipeline says that it is distilled to a few steps."""
        index = self.path.parent / "model_index.json"
        if not index.is_file():
            return False
        return bool(json.loads(index.read_text(encoding="utf-8-sig")).get("is_distilled"))

    def prediction_type(self) -> str | None:
        """What the model predicts according to the scheduler of the pipeline; None without one."""
        scheduler = self.path.parent / "scheduler/scheduler_config.json"
        if not scheduler.is_file():
            return None
        prediction: str | None = json.loads(scheduler.read_text(encoding="utf-8-sig")).get("prediction_type")
        return prediction

    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of the tensors in a folder, from the headers of its files."""
        shapes: dict[str, torch.Size] = {}
        for file in self.files():
            with open_file(file) as reader:
                shapes |= {name: torch.Size(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
        return shapes

    def tensors(self, *, model_class: str, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in diffusers, full tensor on the CPU in its stored dtype), one at a time."""
        if self.is_file:
            yield from self._converted(model_class, config)
            return
        for file in self.files():
            with open_file(file) as reader:
                for name in reader.keys():  # noqa: SIM118  no mapping: it has only this
                    yield name, reader.get_tensor(name)

    def readers(self, *, model_class: str, config: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
        """Name in diffusers -> what reads this tensor, in any order."""
        if self.is_file:
            return {name: tensor.clone for name, tensor in self._converted(model_class, config)}
        return {name: partial(_read_tensor, file, name) for file in self.files() for name in _names(file)}

    def files(self) -> list[Path]:
        """The safetensors files of a folder: those listed in its index, or its only file.

        Raises:
            ConfigError: the folder has no such file, some are missing, or several have the same tensor.
        """
        if indices := sorted(self.path.glob("*.safetensors.index.json")):
            listed = json.loads(indices[0].read_text(encoding="utf-8-sig"))["weight_map"].values()
            files = [self.path / Path(name).name for name in sorted(set(listed))]
        else:
            files = sorted(self.path.glob("*.safetensors"))
            files = [file for file in files if file.name == "diffusion_pytorch_model.safetensors"] or files
            if len(files) > 1:
                _check_disjoint(self.path, files)
        missing = [f"no {file.name}" for file in files if not file.is_file()]
        if missing or not files:
            right = f"has {'no .safetensors file' if not files else missing[0]}; {HOW_TO_GET}"
            raise option_error("model.path", str(self.path), right)
        return files

    def _converted(self, model_class: str, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        with open_file(self.path) as reader:
            _check_not_quantized(self.path, reader)
            checkpoint = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        if bare := _with_diffusers_names(checkpoint):
            yield from bare.items()
            return
        table = require("diffusers.loaders.single_file_model").SINGLE_FILE_LOADABLE_CLASSES
        try:
            yield from table[model_class]["checkpoint_mapping_fn"](config=config, checkpoint=checkpoint).items()
        except (KeyError, ValueError, RuntimeError, IndexError, StopIteration) as error:
            reason = f"{model_class} of diffusers cannot rename its tensors ({type(error).__name__}: {error})"
            raise option_error("model.path", str(self.path), f"is not a file of this model: {reason}") from error


def _check_not_quantized(path: Path, reader: Any) -> None:
    """Check that the values of a transformer are its weights. diffusers drops the scales of quantized ones.

    Raises:
        ConfigError: the file has scales or integers.
    """
    names = list(reader.keys())
    for name in [name for name in names if name.startswith(_WHOLE_PIPELINE)] or names:
        if name.endswith(_SCALES) or reader.get_slice(name).get_dtype() in ("I8", "U8"):
            right = f"has quantized weights ({name}); must be the file of this model in bfloat16, float16 or float32"
            raise option_error("model.path", str(path), right)


def _check_disjoint(folder: Path, files: list[Path]) -> None:
    """Check that the files are parts of one model, not several models."""
    origins: dict[str, Path] = {}
    for file in files:
        for name in _names(file):
            if (other := origins.setdefault(name, file)) is not file:
                right = f"has {name} in {other.name} and in {file.name}; give one of these files as --model.path"
                raise option_error("model.path", str(folder), right)


def _names(file: Path) -> list[str]:
    with open_file(file) as reader:
        return list(reader.keys())


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    with open_file(file) as reader:
        tensor: torch.Tensor = reader.get_tensor(name)
    return tensor


HOW_TO_GET = (
    "fetch it with torchditan download, or `hf download`, and give the folder as --model.path "
    "(gated models need their terms accepted and HF_TOKEN set)"
)


def _with_diffusers_names(checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """The tensors by diffusers' names, or None if the file has its publisher's names. Prefixes are removed."""
    marks = (
        "transformer_blocks.0.",
        "blocks.0.attn1.",
        "down_blocks.0.",
        "layers.0.attention.to_q.",
        "time_text_embed.",
        "condition_embedder.",
    )
    for prefix in _PREFIXES:
        if any(name.startswith(tuple(prefix + mark for mark in marks)) for name in checkpoint):
            return {name.removeprefix(prefix): value for name, value in checkpoint.items()}
    return None


def find_published(path: str, *, subfolder: str) -> PublishedWeights:
    """The weights at `model.path`: a folder (of the transformer or of a whole pipeline), a file, or a hub name.

    Raises:
        ConfigError: they do not exist or cannot be downloaded.
    """
    patterns = ["model_index.json", "scheduler/*", f"{subfolder}/*.json", f"{subfolder}/*.safetensors"]
    local = fetch(path, patterns=patterns, what=f"{subfolder}/", option="model.path")
    if local.is_file():
        if local.suffix != ".safetensors":
            right = "must be a .safetensors file, or a folder (other formats may execute code when they are read)"
            raise option_error("model.path", path, right)
        return PublishedWeights(local)
    if not local.is_dir():
        raise option_error("model.path", path, f"does not exist; {HOW_TO_GET}")
    for folder in (local, local / subfolder):
        if (folder / "config.json").is_file():
            found = PublishedWeights(folder)
            found.files()
            return found
    raise option_error("model.path", path, f"has neither config.json nor {subfolder}/config.json; {HOW_TO_GET}")


def find_lora(path: str) -> Path:
    """The LoRA file at `lora.assistant_path`: a file, a folder with one file, or a hub name (`place_of_lora`).

    Raises:
        ConfigError: it does not exist, or a folder has several.
    """
    place, patterns = place_of_lora(path)
    local = fetch(place, patterns=patterns, what="a .safetensors file", option="lora.assistant_path")
    if place != path:
        local /= patterns[0]
    if local.is_dir():
        files = sorted(local.glob("*.safetensors"))
        if len(files) != 1:
            names = ", ".join(file.name for file in files)
            example = f" ({names}); must be one of them, such as {path}/{files[-1].name}" if files else ""
            right = f"holds {len(files)} .safetensors files{example}"
            raise option_error("lora.assistant_path", path, right)
        return files[0]
    if not local.is_file():
        right = "does not exist; must be a LoRA in a .safetensors file, or a hub name (owner/name, or owner/name/FILE)"
        raise option_error("lora.assistant_path", path, right)
    return local


def place_of_lora(path: str) -> tuple[str, list[str]]:
    """(local path or hub name, patterns of its files). A hub name may name a file: `owner/name/file.safetensors`, which
    then is the first pattern."""
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    if file and is_hub_name(f"{owner}/{name}"):
        return f"{owner}/{name}", [file, str(PurePosixPath(file).with_name(PEFT_CONFIG))]
    return path, ["*.safetensors", PEFT_CONFIG]


def check_names(expected: dict[str, torch.Size], found: dict[str, torch.Size], *, path: str) -> None:
    """Check that a file has exactly the tensors of the model, with their shapes.

    Raises:
        ConfigError: names the first tensor that differs.
    """
    differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if differing:
        name = differing[0]
        want, have = (None if name not in where else list(where[name]) for where in (expected, found))
        if want is None:
            what = f"{name} is not a tensor of this model"
        else:
            what = f"{name} must be {want} and is {'missing' if have is None else have}"
        many = f" ({len(differing)} tensors differ)" if len(differing) > 1 else ""
        raise ConfigError(f"model.path = {json.dumps(path)}: is another model than model.flavor: {what}{many}")
