# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Completing a configuration: the dataset, the ranks and the run it continues fill in what it leaves open.

Configurations are frozen: `complete` returns a new one. This is the only place that completes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from torchditan.checkpoint.files import list_checkpoints, step_of
from torchditan.config.errors import option_error
from torchditan.config.options import Config, flatten
from torchditan.config.rules import has_effect
from torchditan.config.trajectory import VALUES_BEFORE, flatten_tree
from torchditan.data_stream.datasets import ImageDataset, StandInDataset
from torchditan.data_stream.order import BatchPlan
from torchditan.distributed.process_group import Rank
from torchditan.latents.sample_space import SampleSpace
from torchditan.models import ModelSpec, TextEmbeddings, model_spec_of
from torchditan.optim.optimizers import learning_rate
from torchditan.run.reading import read_config


@dataclass(frozen=True)
class StoredRun:
    """What the config.json of the run that is continued says."""

    path: Path
    options: dict[str, Any]
    """`{"training.steps": 10, ...}`, as they were written."""
    global_batch_size: int | None


def read_stored_run(path: Path) -> StoredRun | None:
    """The run in this folder; None where there is none.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    if not (path / "config.json").exists():
        return None
    content = read_config(path)
    size = content.get("trajectory", {}).get("training.global_batch_size")
    return StoredRun(
        path=path,
        options=flatten_tree(content["config"]),
        global_batch_size=size if isinstance(size, int) and size > 0 else None,
    )


def keep_values_of_run(config: Config, run: StoredRun | None) -> tuple[Config, list[str]]:
    """A run that is continued keeps what older versions did where an option was added since.

    Returns:
        The configuration; the options that changed and have an effect, a phrase each. The run directory refuses any
        other difference: a value that was given, or one that the run got when the option existed.
    """
    if run is None:
        return config, []
    stored = {option: run.options.get(option, before) for option, before in VALUES_BEFORE.items()}
    defaults, given = flatten(Config()), flatten(config)
    kept = {
        option: value
        for option, value in stored.items()
        if given[option] == defaults[option] != value and value == VALUES_BEFORE[option]
    }
    return config.replace(kept), [f"{option} = {value}" for option, value in kept.items() if has_effect(config, option)]


def complete(
    config: Config,
    *,
    dataset: ImageDataset,
    space: SampleSpace,
    rank: Rank,
    run: StoredRun | None,
    tune_batch_size: Callable[[Config, Rank], int] | None = None,
) -> tuple[Config, ModelSpec]:
    """The configuration with nothing left open, and the model that it describes.

    Args:
        config: the job; with the values that `keep_values_of_run` keeps.
        dataset: training images.
        space: what the model sees of them; it has completed the section `[autoencoder]`.
        rank: one of those that share the batch.
        run: the run that is continued, None for a new one.
        tune_batch_size: finds the number for a batch size of "auto"; needed where the config asks for it.

    Raises:
        ConfigError: an option contradicts the data, the number of ranks or the run that is continued.
    """
    config = dataclasses.replace(config, autoencoder=space.config)
    config = complete_from_dataset(config, dataset, sample_shape=space.sample_shape)
    if run is not None:
        config = keep_global_batch_size(config, run, world_size=rank.world_size)
        check_steps(config, run)
    config = complete_batches(config, rank, tune_batch_size=tune_batch_size)
    spec = model_spec_of(config, sample_shape=space.sample_shape, num_classes=len(dataset.class_names))
    return config.fill_in({"diffusion.timestep_shift": spec.timestep_shift}), spec


def complete_from_dataset(config: Config, dataset: ImageDataset, *, sample_shape: tuple[int, ...]) -> Config:
    """What the config leaves open, the dataset decides; `sample_shape` (C, H, W) is what the model sees of it."""
    sample_size = list(sample_shape[1:])
    if config.model.sample_size not in (None, sample_size):
        right = f"samples of this data are {sample_size}; leave it out"
        raise option_error("model.sample_size", config.model.sample_size, right)
    text_sizes = text_sizes_of(dataset, config)
    fingerprint = dataset.fingerprint
    if config.dataset.fingerprint not in (None, fingerprint):
        right = (
            f"the data here is {fingerprint or 'of no known identity'}; leave it out, or give the data it belongs to"
        )
        raise option_error("dataset.fingerprint", config.dataset.fingerprint, right)
    return config.fill_in(
        {
            "model.input_channels": sample_shape[0],
            "model.sample_size": sample_size,
            "dataset.image_size": list(dataset.sample_shape[-2:]),
            "dataset.num_classes": len(dataset.class_names),
            "dataset.horizontal_flip": dataset.horizontal_flip,
            "dataset.fingerprint": fingerprint,
            **text_sizes,
        }
    )


def text_sizes_of(dataset: ImageDataset, config: Config) -> dict[str, int | None]:
    """Sizes of the captions' embeddings, which our own model is built for; published ones have theirs.

    Returns:
        `{"model.text_tokens": 77, ...}`; {} for a model without text.

    Raises:
        ConfigError: there are no captions, or their embeddings are of other sizes than the options say.
    """
    model = config.model
    if model.text is None or isinstance(dataset, StandInDataset):
        return {}
    null = dataset.null_tensors
    if null is None:
        right = f"{dataset.name} has no captions; leave it out, or set --dataset.dataset_name captions"
        raise option_error("model.text", model.text, right)
    tokens, width = null["prompt_embeds"].shape
    pooled = null.get("pooled_prompt_embeds")
    found = {
        "model.text_tokens": tokens,
        "model.text_width": width,
        "model.pooled_width": None if pooled is None else pooled.shape[-1],
    }
    for option, given in zip(found, (model.text_tokens, model.text_width, model.pooled_width), strict=True):
        if given not in (None, found[option]):
            right = f"the captions' embeddings have {'none' if found[option] is None else found[option]}; leave it out"
            raise option_error(option, given, right)
    return found


def check_steps(config: Config, run: StoredRun) -> None:
    """A run may train longer, or shorter, where the learning rates of the steps it has done stay as they were.

    Raises:
        ConfigError: the schedule decays over all steps, or the decay of wsd has begun.
    """
    steps, scheduler = config.training.steps, config.lr_scheduler
    before = run.options.get("training.steps")
    path, checkpoints = run.path, list_checkpoints(run.path / config.checkpoint.folder)
    done: int = step_of(checkpoints[-1]) if checkpoints else before or 0
    if checkpoints and steps < done:
        right = f"{path} is at step {done}; must be {done} or more, or name a new run with --metrics.experiment_name"
        raise option_error("training.steps", steps, right)
    is_other = run.options.get("lr_scheduler.schedule") != scheduler.schedule  # which the run directory refuses
    if before in (None, steps) or scheduler.schedule == "constant" or is_other:
        return
    rates = [learning_rate(done, steps=total, peak=1.0, config=scheduler) for total in (before, steps)]
    if rates[0] == rates[1]:
        return
    when = f"the {scheduler.schedule} schedule decays over all steps"
    if scheduler.schedule == "wsd":
        when = f"the decay of wsd began after step {round(before * (1 - scheduler.decay_ratio))}, this run is at {done}"
    weights = f" from its weights: --checkpoint.initial_load_path {path}" if checkpoints else ":"
    right = f"{path} was started with {before}, and {when}; start a new run{weights} --metrics.experiment_name NAME"
    raise option_error("training.steps", steps, right)


def keep_global_batch_size(config: Config, run: StoredRun, *, world_size: int) -> Config:
    """A run that is continued keeps its global batch, whatever the number of ranks; they share it as they can.

    Raises:
        ConfigError: so many ranks do not divide it.
    """
    stored, batch_size = run.global_batch_size, config.training.batch_size
    if stored is None or config.training.global_batch_size not in (None, stored):
        return config  # another batch, which the run directory refuses
    if stored % world_size:
        sizes = ", ".join(str(size) for size in range(1, stored + 1) if stored % size == 0)
        right = f"{run.path} was begun with it, and {world_size} ranks do not divide it; must be one of {sizes} ranks"
        raise option_error("training.global_batch_size", stored, right)
    if isinstance(batch_size, int):  # the largest micro-batch that fits where the given one did
        share = stored // world_size
        batch_size = max(size for size in range(1, batch_size + 1) if share % size == 0)
    return config.replace({"training.global_batch_size": stored, "training.batch_size": batch_size})


def complete_batches(
    config: Config, rank: Rank, *, tune_batch_size: Callable[[Config, Rank], int] | None = None
) -> Config:
    """The config with its batch size and its global batch size.

    Args:
        tune_batch_size: finds the number for "auto"; needed where the config asks for it.

    Raises:
        ConfigError: the global batch is not divisible by what the ranks take at once.
    """
    batch_size, global_batch_size = config.training.batch_size, config.training.global_batch_size
    if batch_size == "auto":
        assert tune_batch_size is not None, "optional_parts.choose_parts gives it"
        batch_size = tune_batch_size(config, rank)
    if batch_size is None:
        batch_size = max(1, (global_batch_size or 16 * rank.world_size) // rank.world_size)
    at_once = batch_size * rank.world_size
    if global_batch_size is None:
        global_batch_size = at_once
    if global_batch_size % at_once:
        at_once_is = f"{rank.world_size} rank(s) x training.batch_size {batch_size}"
        right = f"must be a multiple of {at_once}: {at_once_is}"
        raise option_error("training.global_batch_size", global_batch_size, right)
    return config.replace({"training.batch_size": batch_size, "training.global_batch_size": global_batch_size})


def plan_batches(config: Config, rank: Rank) -> BatchPlan:
    """The batches of this rank, by a completed configuration."""
    batch_size, global_batch_size = config.training.batch_size, config.training.global_batch_size
    assert isinstance(batch_size, int) and global_batch_size is not None
    return BatchPlan(
        batch_size=batch_size, global_batch_size=global_batch_size, rank=rank.rank, world_size=rank.world_size
    )


def describe_batches(plan: BatchPlan, *, asked: int | str | None = None) -> str:
    """`batch_size 8 x 4 micro-batches x 1 rank = global batch 32`, and why it is not the batch_size `asked` for."""
    micro_batches, ranks = plan.num_micro_batches, plan.world_size
    counts = [
        f"batch_size {plan.batch_size}",
        f"{micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}",
        f"{ranks} rank{'' if ranks == 1 else 's'}",
    ]
    changed = asked not in (None, "auto", plan.batch_size)
    return f"{' x '.join(counts)} = global batch {plan.global_batch_size}" + (
        f" (batch_size {asked} does not divide the {plan.global_batch_size // ranks} of a rank)" if changed else ""
    )


def with_condition_of(spec: ModelSpec, dataset: ImageDataset, config: Config, *, device: torch.device) -> ModelSpec:
    """The model conditioned on what the dataset has: its own empty caption; a stand-in makes up what the model wants.

    Raises:
        ConfigError: the model wants captions, and the dataset has none.
    """
    conditioning = spec.conditioning
    if not isinstance(conditioning, TextEmbeddings):
        return spec
    if isinstance(dataset, StandInDataset):
        dataset.condition_on(conditioning.tensors)
        return spec
    null = dataset.null_tensors
    if null is None:
        right = f"{dataset.name} has no captions, which {spec.name} is conditioned on; must be captions, or dummy"
        raise option_error("dataset.dataset_name", dataset.name, right)
    return with_empty_caption(spec, null, config, device=device)


def with_empty_caption(
    spec: ModelSpec, null: dict[str, torch.Tensor], config: Config, *, device: torch.device
) -> ModelSpec:
    """The model with these embeddings of the empty caption, brought to the device.

    Raises:
        ConfigError: they are of other encoders than the model's.
    """
    conditioning = cast(TextEmbeddings, spec.conditioning)
    for name, (shape, _) in conditioning.tensors.items():
        if name in null and tuple(null[name].shape) != tuple(shape):
            right = f"its encoders give {name} of {list(null[name].shape)}, and {spec.flavor} takes {list(shape)}"
            raise option_error("text_encoder.path", config.text_encoder.path or config.model.path, right)
    on_device = {name: tensor.to(device) for name, tensor in null.items()}
    return dataclasses.replace(spec, conditioning=conditioning.with_null(on_device))
