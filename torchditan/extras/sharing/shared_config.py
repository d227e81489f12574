# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a shared model says about its run: the options that a receiver needs to draw, to evaluate and to continue.

`SHARED` lists these options. All others return to their defaults, and so does what is added later. A path is shared
only if it is the name of a published model; `module:name` of the user's own part is shared, because nobody can open the
model without it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchditan.config.loader import TRAIN_CONFIGS, from_dict, to_dict
from torchditan.config.options import Config, flatten
from torchditan.extras.autoencoders.catalogue import PUBLISHED

_SECTIONS = ("model", "autoencoder", "diffusion", "optimizer", "lr_scheduler", "ema", "float8", "sampling")
_PRIVATE = ("sampling.prompts", "sampling.negative_prompt")
SHARED = (
    *(name for name in flatten(Config()) if name.split(".")[0] in _SECTIONS and name not in _PRIVATE),
    *(f"dataset.{key}" for key in ("dataset_name", "image_size", "num_classes", "crop", "horizontal_flip")),
    *(f"dataset.{key}" for key in ("fingerprint", "aspect_buckets", "bucket_step", "num_frames", "held_out")),
    *(f"training.{key}" for key in ("steps", "global_batch_size", "seed", "max_norm", "float32_matmul_precision")),
    *("training.mixed_precision_param", "training.mixed_precision_reduce"),
    *(f"text_encoder.{key}" for key in ("name", "path", "dtype", "max_length")),
)


def shared_config(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The resolved configuration of a run, complete, with every option that is not shared at its default."""
    config = from_dict(stored)
    values = flatten(config)
    public = Config().replace({name: values[name] for name in SHARED if _is_public(name, values[name])})
    dataset = public.dataset.dataset_name.rpartition(":")[2]
    name = shipped_configuration(config) or f"{dataset}-{public.model.flavor}".lower()
    return to_dict(public.replace({"metrics.experiment_name": Path(name).name}))


def shipped_configuration(config: Config) -> str | None:
    """Name of the shipped configuration that a run began from, on any machine."""
    _, found, file = (config.job.config_file or "").rpartition("train_configs/")
    name = file.removesuffix(".toml")
    return name if found and (TRAIN_CONFIGS / f"{name}.toml").is_file() else None


def _is_public(name: str, value: Any) -> bool:
    if name.endswith(".path"):
        return value in _published_names()
    texts = value if isinstance(value, list) else [value]
    return not any(isinstance(text, str) and re.search(r"[/\\]", text) for text in texts)


@functools.cache
def _published_names() -> set[str]:
    """Names on the hub in the catalogue of autoencoders and in the shipped configurations."""
    files = [path.read_text(encoding="utf-8") for path in TRAIN_CONFIGS.rglob("*.toml")]
    found = {name for text in files for name in re.findall(r'^\w*path\s*=\s*"([^"]+)"', text, flags=re.MULTILINE)}
    return found | {entry.hub_name for entry in PUBLISHED.values()}
