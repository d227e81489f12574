# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a shared model says about its run: the options that a receiver needs to draw, to evaluate and to continue.

Notable:
- `SHARED` lists these options. All others return to their defaults, and so does what is added later;
- a text among them is shared only if it is a known one: a choice, a fingerprint, a size, or the name of a published
  model. `module:name` of the user's own part is shared too, because nobody can open the model without it.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchditan.autoencoders.catalogue import PUBLISHED
from torchditan.config.loader import TRAIN_CONFIGS, from_dict, to_dict
from torchditan.config.options import FLAVOR_NAMES, Config, flatten
from torchditan.config.schema import options
from torchditan.config.trajectory import TRAJECTORY_KEYS
from torchditan.registry import AUTOENCODERS, FAMILIES, Registries, Registry, registered
from torchditan.run.hub import is_name

SHARED = (
    *(option for option in TRAJECTORY_KEYS if not option.startswith("checkpoint.")),
    *("training.steps", "autoencoder.path", "text_encoder.name", "text_encoder.path", "text_encoder.dtype"),
    *(option for option in flatten(Config()) if option.startswith("sampling.")),
)
_REGISTRIES = {
    "autoencoder.name": AUTOENCODERS,
    "dataset.dataset_name": pkgutil.resolve_name("torchditan.datasets:DATASETS"),  # a part that only commands import
}
"""Choices that options.py does not declare, besides the catalogue of autoencoders."""
_PART = re.compile(r"([\w.-]+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)( \w+=(true|false|none|[\d.,e+-]+))*", re.ASCII)
"""A choice or `module:name`, with options that are numbers or switches."""
_FINGERPRINT = re.compile(r"[a-z]+(-[0-9a-f]+)+")
_SIZE = re.compile(r"[a-z_]+=[\d.]+")
_HARDWARE = ("device", "device_name", "device_count", "cpu", "cpu_count", "cpu_threads")


def shared_config(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The resolved configuration of a run, complete, with every option that is not shared at its default."""
    config = from_dict(stored)
    values = flatten(config)
    shared = {
        name: values[name] for name in SHARED if all(_is_known(name, text, config) for text in _texts(values[name]))
    }
    public = Config().replace(shared)
    dataset = public.dataset.dataset_name.rpartition(":")[2]
    name = shipped_configuration(config) or f"{dataset}-{public.model.flavor}".lower()
    return to_dict(public.replace({"metrics.experiment_name": Path(name).name}))


def shared_hardware(content: Mapping[str, Any]) -> dict[str, Any]:
    """The hardware in a run's config.json, without the name of the machine."""
    hardware = content.get("hardware")
    return {key: hardware[key] for key in _HARDWARE if key in hardware} if isinstance(hardware, dict) else {}


def shipped_configuration(config: Config) -> str | None:
    """Name of the shipped configuration that a run began from, on any machine."""
    path = Path(config.job.config_file or "")
    if "train_configs" not in path.parts:
        return None
    start = len(path.parts) - path.parts[::-1].index("train_configs")
    name = Path(*path.parts[start:]).with_suffix("").as_posix()
    return name if (TRAIN_CONFIGS / f"{name}.toml").is_file() else None


def _is_known(option: str, text: str, config: Config) -> bool:
    if option.endswith(".path"):
        return text in _published_names()
    if option.endswith(".fingerprint"):
        return _FINGERPRINT.fullmatch(text) is not None
    if option == "model.overrides":
        return _SIZE.fullmatch(text) is not None
    if option == "model.flavor" and config.model.name in FAMILIES:
        return text in registered(FAMILIES, config.model.name).flavors
    if option == "model.flavor" and ":" not in config.model.name:
        return text in FLAVOR_NAMES
    choices, part = _REGISTRIES.get(option, options()[option].choices), _PART.fullmatch(text)
    if isinstance(choices, Registry | Registries) and part is not None:
        return choices.place(part[1]) is not None or (option == "autoencoder.name" and text in PUBLISHED)
    return text in choices


@functools.cache
def _published_names() -> set[str]:
    """Names on the hub in the catalogue of autoencoders and in the shipped configurations."""
    files = [path.read_text(encoding="utf-8") for path in TRAIN_CONFIGS.rglob("*.toml")]
    found = {name for text in files for name in re.findall(r'^\w*path\s*=\s*"([^"]+)"', text, flags=re.MULTILINE)}
    return {name for name in found if is_name(name)} | {entry.hub_name for entry in PUBLISHED.values()}


def _texts(value: Any) -> list[str]:
    found = value if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str)]
