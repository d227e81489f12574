# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Keys of the course project's TOML files that mean nothing here.

At a neutral value they are ignored, with one warning line for all of them; any other value asks for something
this trainer does not do, and is refused. The same table serves the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchditan.config import ConfigError, option_error

ANY_BOOL: tuple[Any, ...] = (True, False)
ANY_TEXT = str
ANY_INT = int

LEGACY_KEYS: dict[str, tuple[tuple[Any, ...] | type, str]] = {
    # option: (neutral values or type, why another value is refused)
    "job.use_for_integration_test": (ANY_BOOL, "it is a switch"),
    "model.tokenizer_path": (ANY_TEXT, "it is a path"),
    "dataset.batch_size": ((-1,), "the batch is set by training.batch_size"),
    "training.dataset": (ANY_TEXT, "it is a name; images are chosen by dataset.dataset_name"),
    "training.dataset_path": (ANY_TEXT, "it is a path; images are found by dataset.root_dir"),
    "training.seq_len": ((-1,), "the length follows from image and patch size"),
    "training.tensor_parallel_degree": ((1,), "tensor parallelism is not supported"),
    "training.enable_loss_parallel": (ANY_BOOL, "it is a switch"),
    "training.disable_loss_parallel": (ANY_BOOL, "it is a switch"),
    "experimental.context_parallel_degree": ((1,), "context parallelism is not supported"),
    "experimental.pipeline_parallel_degree": ((1,), "pipeline parallelism is not supported"),
    "experimental.pipeline_parallel_schedule": (ANY_TEXT, "it is a name"),
    "experimental.pipeline_parallel_split_points": (([], ""), "pipeline parallelism is not supported"),
    "experimental.pipeline_parallel_microbatches": (ANY_INT, "it is a number"),
    "experimental.enable_async_tensor_parallel": ((False,), "tensor parallelism is not supported"),
    "experimental.enable_compiled_autograd": ((False,), "compiled autograd is not supported"),
    "optimizer.fused": (ANY_BOOL, "it is a switch; AdamW is fused where the device has it"),
    "optimizer.early_step_in_backward": ((False,), "the optimizer steps after the backward pass"),
    "float8.enable_fsdp_float8_all_gather": ((False,), "weights are gathered in training.mixed_precision_param"),
    "float8.precompute_float8_dynamic_scale_for_fsdp": ((False,), "torchao decides when scales are computed"),
    "checkpoint.interval_type": (("steps",), "checkpoint.interval counts steps"),
    "checkpoint.model_weights_only": ((False,), "a checkpoint holds all that a resume needs"),
    "checkpoint.export_dtype": (("float32",), "weights are saved in float32"),
    "checkpoint.create_seed_checkpoint": ((False,), "initial weights are the same on every mesh without it"),
    "metrics.rank_0_only": ((True,), "metrics are written by rank 0"),
    "metrics.disable_color_printing": ((False,), "set metrics.enable_color_printing = false"),
    "memory_estimation.enabled": ((False,), "memory estimation is not supported"),
    "memory_estimation.disable_fake_mode": (ANY_BOOL, "it is a switch"),
}

RENAMED_KEYS = {"training.warmup_steps": "lr_scheduler.warmup_steps", "cache_only": "cache.only"}
"""Other names of options: of the course project, and short."""

_SYNONYMS = {("model.name", "llama3_diffusion"): "dit"}


def adopt_legacy(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the values in our own words, the names that were ignored); a value that is not neutral raises."""
    kept: dict[str, Any] = {}
    ignored = []
    for name, value in values.items():
        if name in LEGACY_KEYS:
            _require_neutral(name, value)
            ignored.append(name)
            continue
        new_name = RENAMED_KEYS.get(name, name)
        if name in RENAMED_KEYS and values.get(new_name, value) != value:
            raise ConfigError(f"{name} is {new_name} here, and both are given; keep {new_name}")
        kept[new_name] = _SYNONYMS.get((name, value), value) if isinstance(value, str) else value
    return kept, ignored


def _require_neutral(name: str, value: Any) -> None:
    neutral, reason = LEGACY_KEYS[name]
    if isinstance(neutral, type):
        if type(value) is not neutral:
            raise option_error(name, value, f"{reason}, and has no meaning here; leave it out")
    elif not any(type(value) is type(choice) and value == choice for choice in neutral):
        raise option_error(name, value, f"{reason}; leave it out")
