# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a shared model says about its run: configuration, hardware and command, without anything private.

Notable:
- sections that describe a user's machine or logs return to their defaults, and so do options that hold a path;
- a name stays only if it is public: a place on the hub that is written as such, a model of the catalogue or of a
  shipped configuration, a shipped configuration;
- what looks like an absolute path or a token is dropped from every other option.
"""

from __future__ import annotations

import getpass
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchditan.autoencoders.catalogue import PUBLISHED
from torchditan.config.loader import TRAIN_CONFIGS, from_dict, options, to_dict
from torchditan.config.options import Config, flatten
from torchditan.run.hub import PREFIX, is_name
from torchditan.weights.shared import shipped_models

_PRIVATE_SECTIONS = ("job", "metrics", "checkpoint", "cache", "profiling", "comm", "autotune")
_PLACES = ("model.path", "autoencoder.path", "text_encoder.path", "lora.assistant_path")
_HARDWARE = ("device", "device_name", "device_count", "cpu", "cpu_count", "cpu_threads")
_TOKEN = re.compile(r"(?:^|[^A-Za-z])(?:hf|api_org|sk|ghp|gho|github_pat|glpat|xox[a-z])[_-][A-Za-z0-9_-]{8,}")
_SHORTEST_NAME = 4
"""Letters of a user's or machine's name from which on a text that has it as a word is private."""


def public_config(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The resolved configuration of a run, complete, with every private option at its default."""
    config = from_dict(stored)
    values = flatten(config)
    defaults = flatten(Config())
    kept = {name: value for name, value in values.items() if name.split(".")[0] not in _PRIVATE_SECTIONS}
    public = {**defaults, **kept}
    for name in _PLACES:
        public[name] = values[name] if is_public_name(values[name]) else defaults[name]
    public["dataset.root_dir"] = values["dataset.root_dir"] if _is_on_hub(values["dataset.root_dir"]) else None
    public["evaluation.inception_weights"] = None
    initial = values["checkpoint.initial_load_path"]
    if _is_on_hub(initial) or initial in shipped_models():
        public["checkpoint.initial_load_path"] = initial
        public["checkpoint.initial_load_convention"] = values["checkpoint.initial_load_convention"]
    shipped = shipped_configuration(config)
    public["metrics.experiment_name"] = Path(shipped).name if shipped else _default_name(public)
    for option, value in public.items():
        choices = options()[option].choices
        if any(is_private(text) for text in _texts(value) if text not in choices):
            public[option] = defaults[option]
    return to_dict(Config().replace(public))


def is_private(text: str) -> bool:
    """Whether a text looks like an absolute path or a token, or has the name of the user or of the machine."""
    names = {socket.gethostname(), Path.home().name, _user()}
    words = {word for separators in (r"[^\w-]+", r"\W+", r"[\W_]+") for word in re.split(separators, text)}
    return (
        Path(text).is_absolute()
        or text.startswith("~")
        or re.search(r"(?:^|[\s'\"=:])(?:/[\w.~-]+){2,}|[A-Za-z]:\\", text) is not None
        or _TOKEN.search(text) is not None
        or any(len(name) >= _SHORTEST_NAME and name in words for name in names)
    )


def is_public_name(place: str | None) -> bool:
    """Whether `autoencoder.path` or another place names a published model rather than a folder of the user's."""
    if place is None or Path(place).expanduser().exists():
        return False
    return _is_on_hub(place) or place in _published_names()


def public_hardware(content: Mapping[str, Any]) -> dict[str, Any]:
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


def training_command(content: Mapping[str, Any]) -> str | None:
    """The command that trained a run, with words in place of private values; None if it is unknown."""
    argv = content.get("command")
    if "imported" in content or not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        return None
    config = from_dict(content["config"])
    given, public = flatten(config), flatten(from_dict(public_config(content["config"])))
    name = shipped_configuration(config)
    words = ["torchditan", "train", *([name] if name else ["CONFIG.toml"] if config.job.config_file else [])]
    for group in _groups(argv[1:]):
        option = group[0].removeprefix("--").partition("=")[0]
        if option == "dataset.root_dir" and given[option] is not None and public[option] is None:
            words += ["--dataset.root_dir", "IMAGES"]
        elif option not in options() or option.split(".")[0] in _PRIVATE_SECTIONS or given[option] != public[option]:
            continue
        elif not any(is_private(text) for word in group for text in (word, word.partition("=")[2])):
            words += group
    return shlex.join(words)


def _groups(argv: list[str]) -> Iterator[list[str]]:
    """Each option with its values."""
    group: list[str] = []
    for word in argv:
        if word.startswith("--"):
            if group:
                yield group
            group = [word]
        elif group:
            group.append(word)
    if group:
        yield group


def _is_on_hub(place: str | None) -> bool:
    if place is None or not place.startswith(PREFIX):
        return False
    return is_name(place.removeprefix(PREFIX).partition("@")[0])


def _published_names() -> set[str]:
    """Names on the hub in the catalogue of autoencoders and in the shipped configurations."""
    files = [path.read_text(encoding="utf-8") for path in TRAIN_CONFIGS.rglob("*.toml")]
    found = {name for text in files for name in re.findall(r'^\s*\w*path\s*=\s*"([^"]+)"', text, flags=re.MULTILINE)}
    return {name for name in found if is_name(name)} | {entry.hub_name for entry in PUBLISHED.values()}


def _default_name(values: Mapping[str, Any]) -> str:
    dataset = str(values["dataset.dataset_name"]).rpartition(":")[2]
    return f"{dataset}-{values['model.flavor']}".lower()


def _texts(value: Any) -> list[str]:
    found = value if isinstance(value, list) else [value]
    return [text for text in found if isinstance(text, str)]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return ""
