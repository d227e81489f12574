# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The course project's TOML files and flags: what its keys and names mean here.

A key that changed nothing in that project is ignored at any value, with one warning line for all of them. A key that
changed something this trainer cannot do is refused, unless its value asks for nothing. Its names of models and datasets
are read as they were meant there, with one line on each. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchditan.config.errors import ConfigError, option_error

LEGACY_KEYS: dict[str, tuple[Any, str] | None] = {
    # option: None where it changed nothing, else (the one value that asks for nothing, why others are refused)
    "job.use_for_integration_test": None,
    "model.tokenizer_path": None,
    "dataset.batch_size": None,
    "training.dataset": None,
    "training.dataset_path": None,
    "training.seq_len": None,
    "training.tensor_parallel_degree": (1, "tensor parallelism is not supported"),
    "training.enable_loss_parallel": None,
    "training.disable_loss_parallel": None,
    "experimental.context_parallel_degree": (1, "context parallelism is not supported"),
    "experimental.pipeline_parallel_degree": (1, "pipeline parallelism is not supported"),
    "experimental.pipeline_parallel_schedule": None,  # these four act only with a degree above 1
    "experimental.pipeline_parallel_split_points": None,
    "experimental.pipeline_parallel_microbatches": None,
    "experimental.enable_async_tensor_parallel": None,
    "experimental.enable_compiled_autograd": (False, "compiled autograd is not supported"),
    "optimizer.fused": None,  # the same update; AdamW is fused where the device has it
    "optimizer.early_step_in_backward": (False, "the optimizer steps after the backward pass"),
    "float8.enable_fsdp_float8_all_gather": (False, "weights are gathered in training.mixed_precision_param"),
    "float8.precompute_float8_dynamic_scale_for_fsdp": (False, "torchao decides when scales are computed"),
    "checkpoint.interval_type": ("steps", "checkpoint.interval counts steps"),
    "checkpoint.model_weights_only": (False, "a checkpoint holds all that a resume needs"),
    "checkpoint.export_dtype": None,  # acts only with model_weights_only
    "checkpoint.create_seed_checkpoint": (False, "initial weights are the same on every mesh without it"),
    "metrics.rank_0_only": (True, "metrics are written by rank 0"),
    "metrics.disable_color_printing": (False, "set metrics.enable_color_printing = false"),
    "memory_estimation.enabled": (False, "use python -m torchditan.planner"),
    "memory_estimation.disable_fake_mode": None,
}

RENAMED_KEYS = {
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "checkpoint.enable": "checkpoint.enable_checkpoint",
    "cache_only": "cache.only",
}
"""Other names of options: of the course project, and short."""

MODEL_NAME = PRESET = "llama3_diffusion"
"""Its name of the model, and our preset that has its sizes."""
FLAVORS = ("debugmodel", "DiT-S", "DiT-1B", "DiT-7B")
"""Flavors whose sizes differ from ours (models/dit.py has them, and imports torch; a test compares the two)."""
_SHARD, _REPLICATE = "training.data_parallel_shard_degree", "training.data_parallel_replicate_degree"


def adopt_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """One source's options, a file's or the command line's, under our names.

    Raises:
        ConfigError: it gives an option under two names, with two values.
    """
    for old, new in RENAMED_KEYS.items():
        if old in values and values.get(new, values[old]) != values[old]:
            raise ConfigError(f"{old} is {new} here, and both are given; keep {new}")
    return {RENAMED_KEYS.get(name, name): value for name, value in values.items()}


def adopt_file(
    values: Mapping[str, Any], *, flags: Collection[str] = (), world_size: int = 1
) -> tuple[dict[str, Any], list[str]]:
    """`adopt_keys` of a TOML file, and a line on what was read in another way; `flags` are options that go over it.

    Its files say 1 x 1 ranks, whatever the number of ranks they run on: here that leaves the shard degree open.
    """
    kept = adopt_keys(values)
    degrees = (kept.get(_REPLICATE, 1), kept.get(_SHARD))
    if kept.get("model.name") != MODEL_NAME or degrees != (1, 1):
        return kept, []
    del kept[_SHARD]
    is_said = world_size > 1 and _SHARD not in flags  # on one rank it is the same
    return kept, [f"{_SHARD} 1 in the file: read as -1, all ranks that are left"] if is_said else []


def adopt_legacy(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Options of `adopt_keys` with the values this trainer takes.

    Returns:
        The options; the names that were ignored; a line on each value that was read in another way.

    Raises:
        ConfigError: one asks for what is not supported.
    """
    kept = {name: value for name, value in values.items() if name not in LEGACY_KEYS}
    ignored = [name for name in values if name in LEGACY_KEYS]
    for name in ignored:
        _check_value(name, values[name])
    notes = []
    if kept.get("model.name") == MODEL_NAME:
        kept["model.name"] = "dit"
        kept.setdefault("model.preset", PRESET)
        if kept.get("model.flavor") == "DiT-0.5B":
            kept["model.flavor"] = "DiT-L"
            notes.append("model.flavor DiT-0.5B: read as DiT-L, which the course project calls 0.5B")
    if type(kept.get("training.batch_size")) is int and kept["training.batch_size"] == -1:
        kept["training.batch_size"] = None
        notes.append("training.batch_size -1: left open, the ranks' share of global_batch_size or 16 per rank")
    return kept, ignored, notes


def _check_value(name: str, value: Any) -> None:
    rule = LEGACY_KEYS[name]
    if rule is None:
        return
    neutral, reason = rule
    if type(value) is not type(neutral) or value != neutral:
        raise option_error(name, value, f"{reason}; leave it out")


def adopt_names(
    values: Mapping[str, Any], *, given: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Read the course project's names of datasets and its sizes as they were meant there.

    Args:
        values: all options.
        given: options that were given, before any reading.
        stored: sections of the run that this one continues, {} for a new one: it keeps what its names meant.

    Returns:
        All options; a line on each name that was read in another way.
    """
    dataset, dataset_notes = _adopt_dataset(values, given=given, stored=stored)
    preset, preset_notes = _adopt_preset(values, given=given, stored=stored)
    return {**values, **dataset, **preset}, [*dataset_notes, *preset_notes]


def _adopt_dataset(
    values: Mapping[str, Any], *, given: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """(options to change, a line on the name)."""
    name, root = values["dataset.dataset_name"], values["dataset.root_dir"]
    # Before the name meant zeros, it was the public file of latents.
    is_old_run = stored.get("dataset", {}).get("dataset_name") == "imagenet_dummy"
    meaning = None
    changed = {"dataset.dataset_name": name}
    if name == "imagenet_pixel":
        changed["dataset.dataset_name"], meaning = "imagenet", "pixels"
    elif name == "imagenet" and root is not None and root.endswith(".safetensors"):
        changed["dataset.dataset_name"], meaning = "latents", f"the latents of {root}"
    elif name == "imagenet" and given.get("model.name") == MODEL_NAME:
        meaning = "pixels; for latents dataset.root_dir must be a .safetensors file"
    elif name == "imagenet_dummy" and not is_old_run:
        changed["dataset.dataset_name"], meaning = (
            "dummy",
            "zeros, and no file is read; for latents from a file use --dataset.dataset_name latents",
        )
        if "dataset.dummy_fill" not in given:
            changed["dataset.dummy_fill"] = "zeros"
    if is_old_run and changed["dataset.dataset_name"] in ("imagenet_dummy", "latents"):
        changed["dataset.dataset_name"], meaning = (
            "imagenet_dummy",
            "the public file of latents, as when this run began",
        )
    return changed, [] if meaning is None else [f"dataset.dataset_name {name}: {meaning}"]


def _adopt_preset(
    values: Mapping[str, Any], *, given: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """(options to change, a line on the preset)."""
    flavor = values["model.flavor"]
    if values["model.preset"] != PRESET or "model.preset" in given:
        return {}, []
    if flavor not in FLAVORS:
        return {"model.preset": "torchditan"}, []  # the same model
    if stored.get("model", {}).get("preset") != "torchditan":
        return {}, []
    note = f"model.name {MODEL_NAME}: this run began with the sizes of torchditan's {flavor}, and keeps them"
    return {"model.preset": "torchditan"}, [note]
