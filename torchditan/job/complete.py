# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What a configuration leaves open: filled in from the dataset, from the ranks, and from the run it continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
from torchditan.models import ModelSpec, TextEmbeddings
from torchditan.optim.optimizers import learning_rate
from torchditan.run.reading import read_config


def fill_in_from_dataset(config: Config, dataset: ImageDataset, *, sample_shape: tuple[int, ...]) -> None:
    """What the config leaves open, the dataset decides; `sample_shape` (C, H, W) is what the model sees of it."""
    if config.model.input_channels is None:
        config.model.input_channels = sample_shape[0]
    if config.model.sample_size not in (None, list(sample_shape[1:])):
        right = f"samples of this data are {list(sample_shape[1:])}; leave it out"
        raise option_error("model.sample_size", config.model.sample_size, right)
    config.model.sample_size = list(sample_shape[1:])
    if config.dataset.image_size is None:
        config.dataset.image_size = list(dataset.sample_shape[-2:])
    if config.dataset.num_classes is None:
        config.dataset.num_classes = len(dataset.class_names)
    fill_in_text_sizes(config, dataset)
    if config.dataset.horizontal_flip is None:
        config.dataset.horizontal_flip = dataset.horizontal_flip
    fingerprint = dataset.fingerprint
    if config.dataset.fingerprint not in (None, fingerprint):
        right = (
            f"the data here is {fingerprint or 'of no known identity'}; leave it out, or give the data it belongs to"
        )
        raise option_error("dataset.fingerprint", config.dataset.fingerprint, right)
    config.dataset.fingerprint = fingerprint


def fill_in_text_sizes(config: Config, dataset: ImageDataset) -> None:
    """Sizes of the captions' embeddings, which our own model is built for; published ones have theirs.

    Raises:
        ConfigError: there are no captions, or their embeddings are of other sizes than the options say.
    """
    model = config.model
    if model.text is None or isinstance(dataset, StandInDataset):
        return
    null = dataset.null_tensors
    if null is None:
        right = f"{dataset.name} has no captions; leave it out, or set --dataset.dataset_name captions"
        raise option_error("model.text", model.text, right)
    tokens, width = null["prompt_embeds"].shape
    pooled = null.get("pooled_prompt_embeds")
    found = {"text_tokens": tokens, "text_width": width, "pooled_width": None if pooled is None else pooled.shape[-1]}
    for option, size in found.items():
        if getattr(model, option) not in (None, size):
            right = f"the captions' embeddings have {'none' if size is None else size}; leave it out"
            raise option_error(f"model.{option}", getattr(model, option), right)
        setattr(model, option, size)


def keep_values_of_run(config: Config, run: Path) -> list[str]:
    """A run that is continued keeps what older versions did where an option was added since.

    Returns:
        The options that were set and have an effect, a phrase each. One that was given another value than its default
        stays as it is, and the run directory refuses it.
    """
    if not (run / "config.json").exists():
        return []
    stored = flatten_stored(run)
    defaults, given = flatten(Config()), flatten(config)
    kept = []
    for option, before in VALUES_BEFORE.items():
        value = stored.get(option, before)
        if given[option] == defaults[option] != value:
            section, key = option.split(".")
            setattr(getattr(config, section), key, value)
            if has_effect(config, option):
                kept.append(f"{option} = {value}")
    return kept


def flatten_stored(run: Path) -> dict[str, Any]:
    """`{"training.steps": 10, ...}` of the config.json of a run, as it was written."""
    return flatten_tree(read_config(run)["config"])


def check_steps(config: Config, run: Path) -> None:
    """A run may train longer, or shorter, where the learning rates of the steps it has done stay as they were.

    Raises:
        ConfigError: the schedule decays over all steps, or the decay of wsd has begun.
    """
    if not (run / "config.json").exists():
        return
    stored, steps, scheduler = flatten_stored(run), config.training.steps, config.lr_scheduler
    before = stored.get("training.steps")
    checkpoints = list_checkpoints(run / config.checkpoint.folder)
    done: int = step_of(checkpoints[-1]) if checkpoints else before or 0
    if checkpoints and steps < done:
        right = f"{run} is at step {done}; must be {done} or more, or name a new run with --metrics.experiment_name"
        raise option_error("training.steps", steps, right)
    is_other = stored.get("lr_scheduler.schedule") != scheduler.schedule  # which the run directory refuses
    if before in (None, steps) or scheduler.schedule == "constant" or is_other:
        return
    rates = [learning_rate(done, steps=total, peak=1.0, config=scheduler) for total in (before, steps)]
    if rates[0] == rates[1]:
        return
    when = f"the {scheduler.schedule} schedule decays over all steps"
    if scheduler.schedule == "wsd":
        when = f"the decay of wsd began after step {round(before * (1 - scheduler.decay_ratio))}, this run is at {done}"
    weights = f" from its weights: --checkpoint.initial_load_path {run}" if checkpoints else ":"
    right = f"{run} was started with {before}, and {when}; start a new run{weights} --metrics.experiment_name NAME"
    raise option_error("training.steps", steps, right)


def keep_global_batch_size(config: Config, run: Path, *, world_size: int) -> None:
    """A run that is continued keeps its global batch, whatever the number of ranks; they share it as they can.

    Raises:
        ConfigError: so many ranks do not divide it.
    """
    training = config.training
    stored = stored_global_batch_size(run)
    if stored is None or training.global_batch_size not in (None, stored):
        return  # a new run; or another batch, which the run directory refuses
    if stored % world_size:
        sizes = ", ".join(str(size) for size in range(1, stored + 1) if stored % size == 0)
        right = f"{run} was begun with it, and {world_size} ranks do not divide it; must be one of {sizes} ranks"
        raise option_error("training.global_batch_size", stored, right)
    share = stored // world_size
    training.global_batch_size = stored
    if isinstance(training.batch_size, int) and share % training.batch_size:
        # The largest micro-batch that fits where the given one did.
        training.batch_size = max(size for size in range(1, training.batch_size + 1) if share % size == 0)


def stored_global_batch_size(run: Path) -> int | None:
    """The global batch of the run in a folder, None where there is none."""
    if not (run / "config.json").exists():
        return None
    size = read_config(run).get("trajectory", {}).get("training.global_batch_size")
    return size if isinstance(size, int) and size > 0 else None


def resolve_batches(
    config: Config, rank: Rank, *, tune_batch_size: Callable[[Config, Rank], int] | None = None
) -> BatchPlan:
    """Batches of each rank; fills in what the config leaves open of batch size and global batch size.

    Args:
        tune_batch_size: finds the number for "auto"; needed where the config asks for it.

    Raises:
        ConfigError: the global batch is not divisible by what the ranks take at once.
    """
    training = config.training
    if training.batch_size == "auto":
        assert tune_batch_size is not None, "optional_parts.choose_parts gives it"
        training.batch_size = tune_batch_size(config, rank)
    if training.batch_size is None:
        training.batch_size = max(1, (training.global_batch_size or 16 * rank.world_size) // rank.world_size)
    at_once = training.batch_size * rank.world_size
    if training.global_batch_size is None:
        training.global_batch_size = at_once
    if training.global_batch_size % at_once:
        at_once_is = f"{rank.world_size} rank(s) x training.batch_size {training.batch_size}"
        right = f"must be a multiple of {at_once}: {at_once_is}"
        raise option_error("training.global_batch_size", training.global_batch_size, right)
    return BatchPlan(
        batch_size=training.batch_size,
        global_batch_size=training.global_batch_size,
        rank=rank.rank,
        world_size=rank.world_size,
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
