# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The options that decide what a run learns. Two commands can continue one run only if these options agree.

Notable:
- if an older run's config.json lacks an option, `VALUES_BEFORE` gives the behavior before that option existed. A new
  option therefore never prevents a resume. It replaces a default, never a value that the user typed;
- this file must not import torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torchditan.config.errors import option_error
from torchditan.config.options import Config, flatten
from torchditan.registry import FAMILIES, entry_name

VALUES_BEFORE: dict[str, Any] = {}
"""Options of [sampling] or a trajectory section that are newer than some runs, each with the behavior of all runs from
before the option existed.

Add a line for every new option, with the option. Never change a line.
"""

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
    "ema.post_hoc_interval",
    "dataset.root_dir",  # a moved dataset is the same data
    "dataset.num_workers",
    "dataset.prefetch_factor",
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
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_convention",
    "text_encoder.max_length",
)
"""Options that decide what is learned. They cannot change within a run directory."""


def trajectory(config: Config) -> dict[str, Any]:
    """The options that must agree for two commands to continue one run. Requires a completed configuration."""
    values = flatten(config)
    found = {option: values[option] for option in TRAJECTORY_KEYS}
    found |= {f"plug_in.{place}": _source_hash(place) for option in _PLUG_INS for place in _plug_ins(found[option])}
    if not config.autoencoder.online:  # these only open the decoder, whose fingerprint is compared
        del found["autoencoder.name"], found["autoencoder.dtype"]
    return _left_open(found)


_PLUG_INS = (
    "dataset.dataset_name",
    "diffusion.objective",
    "diffusion.ingredients",
    "lr_scheduler.schedule",
    "model.block",
    "model.name",
    "optimizer.name",
)
"""Options of a registry among these."""


def _plug_ins(value: Any) -> list[str]:
    """`module:name` of each part in the value of an option that is not from this package."""
    texts = value if isinstance(value, list) else [value]
    return sorted({place for text in texts if ":" in (place := entry_name(str(text)))})


_MORE_PLUG_INS = ("autoencoder.name", "evaluation.metrics", "metrics.meters", "sampling.sampler", "text_encoder.name")


def refuse_untrusted_plug_ins(values: Mapping[str, Any]) -> None:
    """Refuse stored options that name code which the user did not put on the Python path.

    A run of a stranger must not make Python import a file that came with it. Modules count if they are imported
    already, installed, next to the script, or in PYTHONPATH. The current folder alone does not count.

    Args:
        values: stored options by full name.
    """
    right = "is code outside of TorchDiTan; if you trust it, import it first, or add its folder to PYTHONPATH"
    for option in (*_PLUG_INS, *_MORE_PLUG_INS):
        for place in _plug_ins(values.get(option)):
            package = place.partition(":")[0].partition(".")[0]
            if package not in sys.modules and PathFinder.find_spec(package, _trusted_path()) is None:
                raise option_error(option, values[option], right)


def _trusted_path() -> list[str]:
    here, chosen = os.getcwd(), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_chosen = any(part and os.path.abspath(part) == here for part in chosen)
    return [part for part in sys.path if part and (is_chosen or os.path.abspath(part) != here)]


def _source_hash(place: str) -> str | None:
    """Hash of the file of a module; None if it has none."""
    try:
        spec = importlib.util.find_spec(place.partition(":")[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]


def _left_open(values: dict[str, Any]) -> dict[str, Any]:
    """Options that state the objective's own value mean the same as None."""
    own = {
        "diffusion.prediction": {"flow_matching": "v", "ddpm": "epsilon"}.get(values.get("diffusion.objective", "")),
        "diffusion.noise_schedule": "scaled_linear" if values.get("model.name") in FAMILIES else "linear",
    }
    return {name: None if value == own.get(name) else value for name, value in values.items()}


_UNKNOWN_IF_NONE = ("dataset.fingerprint",)
"""Keys for which a stored None means "not recorded": older runs have no fingerprint of the folder dataset."""


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List the differences of two sets of options: "model.patch_size is 2 there and 4 here".

    Args:
        there: stored options; `VALUES_BEFORE` fills in missing ones.
        here: options of this command.
    """
    given = _left_open(flatten_tree(json.loads(json.dumps(here, default=str))))
    stored = {**{key: value for key, value in VALUES_BEFORE.items() if key in given}, **flatten_tree(there)}
    stored = _left_open(stored)
    absent = "absent"
    unknown = [key for key in _UNKNOWN_IF_NONE if stored.get(key, absent) is None]
    return [
        f"{key} is {stored.get(key, absent)} there and {given.get(key, absent)} here"
        for key in [*given, *(stored.keys() - given.keys())]
        if key not in unknown and stored.get(key, absent) != given.get(key, absent)
    ]


def values_of_older_run(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The options of `VALUES_BEFORE` that a stored run lacks, or stored with that value when it was continued."""
    there = flatten_tree(stored)
    return {name: value for name, value in VALUES_BEFORE.items() if there and there.get(name, value) == value}


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted names: `{"training.steps": 10, ...}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten_tree(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
