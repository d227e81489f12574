# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The options that decide what a run learns. Two commands continue one run where these options agree.

Notable:
- options evolve: a key that an older run's config.json lacks means the value in force when the key was added
  (`VALUES_BEFORE`), so that adding an option never makes a run unresumable;
- nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchditan.config.options import Config, flatten

VALUES_BEFORE: dict[str, Any] = {
    "checkpoint.initial_load_convention": None,
    "dataset.bucket_order": "random",
    "lr_scheduler.decay_until": "last_step",
    "model.block": "dit",
}
"""Options added since commit 36e2f02, each with what every run did before it existed.

Add a line for every new option of a trajectory section, in the commit that adds it. Never change a line.
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
    "dataset.root_dir",  # a dataset that was moved is the same data
    "dataset.num_workers",
    "dataset.prefetch_factor",
    "autoencoder.path",  # a moved decoder is the same decoder; its fingerprint is compared
    "dataset.corrupt_images",  # a run that stopped at a corrupt image may resume and skip it
)

TRAJECTORY_KEYS = (
    *(option for option in flatten(Config()) if option.split(".")[0] in _SECTIONS and option not in _NOT_TRAJECTORY),
    "training.global_batch_size",
    "training.seed",
    "training.max_norm",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "float8.enable_float8_linear",
    "float8.recipe_name",
    "checkpoint.initial_load_path",
    "checkpoint.initial_load_convention",
    "text_encoder.max_length",
)
"""Options that decide what is learned; a run directory belongs to one choice of them."""

_STORED_BEFORE = ("training.steps",)
"""Keys that older runs stored in their trajectory. `check_steps` compares learning rates instead."""


def trajectory(config: Config) -> dict[str, Any]:
    """The options that two commands must share to continue one run. Call it on a completed configuration."""
    values = flatten(config)
    found = {option: values[option] for option in TRAJECTORY_KEYS}
    if not config.autoencoder.online:  # these only open the decoder, whose fingerprint is compared
        del found["autoencoder.name"], found["autoencoder.dtype"]
    return found


_UNKNOWN_IF_NONE = ("dataset.fingerprint",)
"""Keys whose stored None means that the run did not record them: the folder dataset has a fingerprint only since."""


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What two sets of options do not share, a phrase each: "model.patch_size is 2 there and 4 here".

    Args:
        there: stored options; one that is missing has its value of before it was added.
        here: options of this command.
    """
    given = flatten_tree(json.loads(json.dumps(here, default=str)))
    stored = {**{key: value for key, value in VALUES_BEFORE.items() if key in given}, **flatten_tree(there)}
    absent = "absent"
    unknown = [key for key in _UNKNOWN_IF_NONE if stored.get(key, absent) is None]
    return [
        f"{key} is {stored.get(key, absent)} there and {given.get(key, absent)} here"
        for key in [*given, *(stored.keys() - given.keys())]
        if key not in (*_STORED_BEFORE, *unknown) and stored.get(key, absent) != given.get(key, absent)
    ]


def with_values_before(values: Mapping[str, Any]) -> dict[str, Any]:
    """Stored options (`{"training.steps": 10, ...}`), completed with what an older version did without asking."""
    return {**VALUES_BEFORE, **values}


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted names: `{"training.steps": 10, ...}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat.update(flatten_tree(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
