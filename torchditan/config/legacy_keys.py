# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TOML files and flags of the course project: what its keys and names mean here.

Keys that had no effect in that project are ignored; one warning line lists them. Keys for features that this trainer
lacks are refused, unless their value requests nothing. Names of models and datasets keep their meaning from that
project, with one line for each. This file must not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchditan.errors import ConfigError, option_error

LEGACY_KEYS: dict[str, tuple[Any, str] | None] = {
    # option: None if it had no effect, else (the value that requests nothing, why other values are refused)
    "job.use_for_integration_test": None,
    "model.tokenizer_path": None,
    "dataset.batch_size": None,
    "training.dataset": None,
    "training.dataset_path": None,
    "training.seq_len": None,
    "training.tensor_parallel_degree": (1, "tensor parallelism is not supported"),
    "training.enable_loss_parallel": None,
    "training.disable_loss_parallel": None,
    "experimental.context_parallel_degree": (1, "context parallelism is training.context_parallel_degree here"),
    "experimental.pipeline_parallel_degree": (1, "pipeline parallelism is not supported"),
    "experimental.pipeline_parallel_schedule": None,  # these four have an effect only with a degree above 1
    "experimental.pipeline_parallel_split_points": None,
    "experimental.pipeline_parallel_microbatches": None,
    "experimental.enable_async_tensor_parallel": None,
    "experimental.enable_compiled_autograd": (False, "compiled autograd is not supported"),
    "optimizer.fused": None,  # the same update; AdamW is fused if the device supports it
    "optimizer.early_step_in_backward": (False, "the optimizer steps after the backward pass"),
    "float8.enable_fsdp_float8_all_gather": (False, "weights are gathered in training.mixed_precision_param"),
    "float8.precompute_float8_dynamic_scale_for_fsdp": (False, "torchao decides when scales are computed"),
    "float8.scaling_type_input": ("dynamic", "scales are computed in each step"),
    "float8.scaling_type_weight": ("dynamic", "scales are computed in each step"),
    "float8.scaling_type_grad_output": ("dynamic", "scales are computed in each step"),
    "checkpoint.interval_type": ("steps", "checkpoint.interval counts steps"),
    "checkpoint.model_weights_only": (False, "a checkpoint contains everything that a resume needs"),
    "checkpoint.export_dtype": None,  # has an effect only with model_weights_only
    "checkpoint.create_seed_checkpoint": (False, "initial weights are the same on every mesh without it"),
    "metrics.rank_0_only": (True, "metrics are written by rank 0"),
    "metrics.disable_color_printing": None,
    "memory_estimation.enabled": (False, "use python -m torchditan.planner"),
    "memory_estimation.disable_fake_mode": None,
}

RENAMED_KEYS = {
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "cache_only": "cache.only",
}
"""Other names of options: those of the course project, and short forms."""

MODEL_NAME = PRESET = "llama3_diffusion"
"""The model name of the course project, and the preset with its sizes."""
FLAVORS = ("debugmodel", "DiT-S", "DiT-1B", "DiT-7B")
"""Flavors whose sizes differ from ours, repeated here because models/dit.py imports torch. A test compares both."""
_RECIPE: dict[str, Any] = {
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.schedule": "linear",
    "diffusion.timestep_sampling": "uniform",
}
"""What the course project's train.py did for any file."""
_SHARD, _REPLICATE = "training.data_parallel_shard_degree", "training.data_parallel_replicate_degree"


def adopt_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the options of one source, a file or the command line, to our names.

    Raises:
        ConfigError: an option has two names with different values.
    """
    for old, new in RENAMED_KEYS.items():
        if old in values and values.get(new, values[old]) != values[old]:
            raise ConfigError(f"{old} is an older name of {new}, and both are given; keep {new}")
    return {RENAMED_KEYS.get(name, name): value for name, value in values.items()}


def adopt_file(
    values: Mapping[str, Any], *, flags: Collection[str] = (), world_size: int = 1
) -> tuple[dict[str, Any], list[str]]:
    """`adopt_keys` for a TOML file, with a line on each changed value. `flags` are the options of the command line.

    Files of the course project set 1 x 1 ranks for any number of ranks. Here that leaves the shard degree open.
    """
    kept = adopt_keys(values)
    degrees = (kept.get(_REPLICATE, 1), kept.get(_SHARD))
    if kept.get("model.name") != MODEL_NAME or degrees != (1, 1):
        return kept, []
    del kept[_SHARD]
    is_said = world_size > 1 and _SHARD not in flags  # on one rank it is the same
    return kept, [f"{_SHARD} 1 in the file: read as -1, all remaining ranks"] if is_said else []


def adopt_legacy(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Convert the options that `adopt_keys` returned to values that this trainer accepts.

    Returns:
        The options; the names of ignored options; a line on each changed value.

    Raises:
        ConfigError: an option requests an unsupported feature.
    """
    kept = {name: value for name, value in values.items() if name not in LEGACY_KEYS}
    ignored = [name for name in values if name in LEGACY_KEYS]
    for name in ignored:
        _check_value(name, values[name])
    notes = []
    if kept.get("model.name") == MODEL_NAME:
        kept["model.name"] = "dit"
        if kept.get("model.flavor") == "DiT-0.5B":
            kept["model.flavor"] = "DiT-L"
            notes.append("model.flavor DiT-0.5B: read as DiT-L, which the course project calls 0.5B")
        if kept.get("model.flavor", FLAVORS[0]) in FLAVORS:  # other sizes are equal
            kept.setdefault("model.preset", PRESET)
        is_adam = kept.get("optimizer.name") == "Adam"
        recipe = {name: value for name, value in _RECIPE.items() if not (is_adam and name.endswith("decay"))}
        if added := {name: value for name, value in recipe.items() if name not in kept}:
            kept |= added
            said = ", ".join(f"{name} = {value}" for name, value in added.items())
            notes.append(f"as the course project's train.py: {said}")
    if kept.get("optimizer.name") == "Adam":
        if kept.get("optimizer.weight_decay"):
            right = "optimizer.name Adam is read as AdamW without decay; leave one of them out"
            raise option_error("optimizer.weight_decay", kept["optimizer.weight_decay"], right)
        kept["optimizer.name"] = "AdamW"
        notes.append("optimizer.name Adam: read as AdamW without weight decay; the course project's had an L2 of 0.1")
    is_of_course_project = bool(ignored) or PRESET in (kept.get("model.preset"), values.get("model.name"))
    if is_of_course_project and kept.get("metrics.enable_tensorboard") is True:
        kept.setdefault("metrics.legacy_tags", True)
    if type(kept.get("training.batch_size")) is int and kept["training.batch_size"] == -1:
        kept["training.batch_size"] = None
        notes.append("training.batch_size -1: left open: global_batch_size divided by the ranks, or 16 per rank")
    dataset, meaning = _adopt_dataset(values)
    return {**kept, **dataset}, ignored, [*notes, *meaning]


def _adopt_dataset(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (the options of `[dataset]` that change, a line on the name)."""
    key, name, root = "dataset.dataset_name", values.get("dataset.dataset_name"), str(values.get("dataset.root_dir"))
    if name == "imagenet_pixel":
        return {key: "imagenet"}, [f"{key} {name}: pixels"]
    if name == "imagenet" and root.endswith(".safetensors"):
        return {key: "latents"}, [f"{key} {name}: the latents of {root}"]
    if name == "imagenet" and values.get("model.name") == MODEL_NAME:
        return {}, [f"{key} {name}: pixels; for latents dataset.root_dir must be a .safetensors file"]
    if name == "imagenet_dummy":
        zeros = "zeros, and no file is read; for latents from a file use --dataset.dataset_name latents"
        fill = values.get("dataset.dummy_fill", "zeros")
        return {key: "dummy", "dataset.dummy_fill": fill}, [f"{key} {name}: {zeros}"]
    return {}, []


def _check_value(name: str, value: Any) -> None:
    rule = LEGACY_KEYS[name]
    if rule is None:
        return
    neutral, reason = rule
    if type(value) is not type(neutral) or value != neutral:
        raise option_error(name, value, f"{reason}; leave it out")
