# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The options that decide what a run learns. Two commands can continue one run only if these options agree.

This file must not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchditan.config.options import Config, flatten
from torchditan.config.schema import options
from torchditan.errors import option_error
from torchditan.registry import FAMILIES, entry_name

_SECTIONS = (
    "model",
    "dataset",
    "autoencoder",
    "diffusion",
    "optimizer",
    "lr_scheduler",
    "lora",
    "quantize",
    "ema",
)

_NOT_TRAJECTORY = (
    "dataset.root_dir",  # a moved dataset is the same data
    "dataset.num_workers",
    "dataset.remote_cache_gib",
    "autoencoder.path",  # a moved decoder is the same decoder; its fingerprint is compared
    "dataset.corrupt_images",  # a run that stopped at a corrupt image can resume and skip it
)

TRAJECTORY_KEYS = (
    *(option for option in flatten(Config()) if option.split(".")[0] in _SECTIONS and option not in _NOT_TRAJECTORY),
    "training.global_batch_size",
    "training.seed",
    "training.max_norm",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.float32_matmul_precision",
    "float8.enable_float8_linear",
    "float8.recipe_name",
    "float8.emulate",  # emulated, small layers are float8 too
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_convention",
    "text_encoder.max_length",
)
"""Options that decide what is learned. They cannot change within a run directory."""


def trajectory(config: Config) -> dict[str, Any]:
    """The options that must agree for two commands to continue one run. Requires a completed configuration."""
    values = flatten(config)
    found = {option: values[option] for option in TRAJECTORY_KEYS}
    opened = [option for option in found if options()[option].takes_plug_ins and option != "autoencoder.name"]
    found |= {f"{_FILE}{place}": _source_hash(place) for option in opened for place in _plug_ins(found[option])}
    if not config.autoencoder.online:  # these only open the decoder, whose fingerprint is compared
        del found["autoencoder.name"], found["autoencoder.dtype"]
    return _left_open(found)


_FILE = "plug_in."
"""Start of the keys with the hash of the file of a part."""


def _plug_ins(value: Any) -> list[str]:
    """`module:name` of each part in the value of an option that is not from this package."""
    texts = value if isinstance(value, list) else [value]
    return sorted({place for text in texts if ":" in (place := entry_name(str(text)))})


_FOR_TRAINING = ("lr_scheduler.schedule", "metrics.meters", "optimizer.name")
"""Options whose parts nobody opens who only draws or evaluates."""


def refuse_untrusted_plug_ins(values: Mapping[str, Any]) -> None:
    """Refuse stored options that name code in the current folder, which may have come with a stranger's run.

    Installed modules count, and those that are imported already, in PYTHONPATH, or next to the running script.

    Args:
        values: stored options by full name.

    Raises:
        ConfigError: a module would be read from the current folder.
    """
    right = "names code in this folder; if you trust it, import it first, or add the folder to PYTHONPATH"
    for option, declared in options().items():
        is_opened = declared.takes_plug_ins and option not in _FOR_TRAINING
        for place in _plug_ins(values.get(option)) if is_opened else ():
            module = place.partition(":")[0]
            if module not in sys.modules and _is_in_current_folder(module.partition(".")[0]):
                raise option_error(option, values[option], right)


def _is_in_current_folder(package: str) -> bool:
    """Whether Python would read this package, or a part of it, from the current folder. Nothing is imported."""
    here = Path.cwd()
    chosen = [Path(part).absolute() for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is None and getattr(main, "__file__", None):  # a script
        chosen.append(Path(str(main.__file__)).absolute().parent)
    if here in chosen:
        return False
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    locations = spec.submodule_search_locations
    files = [*locations] if locations is not None else [spec.origin]
    return any(file is not None and Path(file).absolute().parent == here for file in files)


def _source_hash(place: str) -> str | None:
    """Hash of the file of a module; None if it has none."""
    try:
        spec = importlib.util.find_spec(place.partition(":")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def _left_open(values: dict[str, Any], *, command: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options that state the objective's own value mean the same as None.

    Args:
        command: options of the user's command, for stored values: what those name is not imported.
    """
    given = command or values
    own = {
        "diffusion.prediction": {"flow_matching": "v", "ddpm": "epsilon"}.get(given.get("diffusion.objective", "")),
        "diffusion.noise_schedule": "scaled_linear" if given.get("model.name") in FAMILIES else "linear",
    }
    return {name: None if value == own.get(name) else value for name, value in values.items()}


INITIAL_WEIGHTS = "checkpoint.initial_weights"
"""Key of the identity of what `checkpoint.initial_load_path` names, if it is known: a LoRA may have moved."""


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the differences of two sets of options: "model.patch_size is 2 there and 4 here".

    Args:
        there: stored options.
        here: options of this command.
    """
    given = _left_open(flatten_tree(json.loads(json.dumps(here, default=str))))
    stored = _left_open(flatten_tree(there), command=given)
    if "float8.emulate" in given:
        stored.setdefault("float8.emulate", False)  # older runs do not store it
    absent = "absent"
    same = []
    begun, begins = stored.pop(INITIAL_WEIGHTS, None), given.pop(INITIAL_WEIGHTS, None)
    if begun is not None and begun == begins:
        same.append("checkpoint.initial_load_path")
    changed = [
        f"the file of {key.removeprefix(_FILE)} was changed since the run began"
        for key in given
        if key.startswith(_FILE) and key in stored and stored[key] != given[key]
    ]
    return [
        f"{key} is {stored.get(key, absent)} there and {given.get(key, absent)} here"
        for key in [*given, *(key for key in stored if key not in given)]
        if key not in same and not key.startswith(_FILE) and stored.get(key, absent) != given.get(key, absent)
    ] + changed


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted names: `{"training.steps": 10, ...}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten_tree(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
