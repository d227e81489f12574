# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Complete a configuration: the dataset, the ranks and a stored run fill in the options that are left open.

Configurations are frozen: `complete` returns a new one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch

from torchditan.checkpoint.files import final_weights, list_checkpoints, step_of
from torchditan.config.options import Config
from torchditan.config.trajectory import flatten_tree
from torchditan.data_stream.datasets import ImageDataset, StandInDataset
from torchditan.data_stream.order import BatchPlan
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.diffusion.objectives import batch_multiple
from torchditan.distributed.precision import automatic, precision_for
from torchditan.distributed.process_group import Rank
from torchditan.errors import option_error
from torchditan.models import ModelSpec, TextEmbeddings, model_spec_of
from torchditan.optim.schedules import build_schedule
from torchditan.registry import FAMILIES, OBJECTIVES, job_part, registered
from torchditan.run.reading import read_config


@dataclass(frozen=True)
class StoredRun:
    """The config.json of the run that this job continues."""

    path: Path
    options: dict[str, Any]
    """`{"training.steps": 10, ...}`, as stored."""
    cpu_threads: int | None
    """CPU threads per rank at its start."""


def read_stored_run(path: Path) -> StoredRun | None:
    """Read the run in this folder; None if there is no run.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    if not (path / "config.json").exists():
        return None
    content = read_config(path)
    return StoredRun(
        path=path,
        options=flatten_tree(content["config"]),
        cpu_threads=(content.get("hardware") or {}).get("cpu_threads"),
    )


def complete(
    config: Config,
    *,
    dataset: ImageDataset,
    space: SampleSpace,
    rank: Rank,
    run: StoredRun | None,
) -> tuple[Config, ModelSpec]:
    """Complete the configuration and build the spec of its model.

    Args:
        config: the job.
        dataset: training images.
        space: the samples that the model sees; it has completed the section `[autoencoder]`.
        rank: one of the ranks that share the batch (`ParallelDims.data_rank`).
        run: the run that this job continues, None for a new one.

    Raises:
        ConfigError: an option contradicts the data, the number of ranks or the continued run.
    """
    config = dataclasses.replace(config, autoencoder=space.config)
    config = config.fill_in(what_data_says(config, dataset, sample_shape=space.sample_shape))
    if run is not None:
        config = keep_global_batch_size(config, run, world_size=rank.world_size)
        check_steps(config, run)
    config = complete_batches(config, rank)
    spec = model_spec_of(config, sample_shape=space.sample_shape, num_classes=len(dataset.class_names))
    config = config.fill_in({"diffusion.timestep_shift": spec.timestep_shift})
    clips = registered(OBJECTIVES, config.diffusion.objective).clips_pixels and config.model.name not in FAMILIES
    if clips and config.autoencoder.name is None:
        config = config.fill_in({"sampling.clip_sample": True})
    return config, spec


def complete_precision(config: Config, run: StoredRun | None, *, device: torch.device) -> Config:
    """Replace each precision of "auto" by that of the continued run, or by the one that suits the device."""
    stored = {} if run is None else run.options
    return config.replace({option: stored.get(option) or precision_for(device) for option in automatic(config)})


def what_data_says(config: Config, dataset: ImageDataset, *, sample_shape: tuple[int, ...]) -> dict[str, Any]:
    """Values for options that are left open. `sample_shape` is (C, H, W) of the model's input.

    Raises:
        ConfigError: an option that only the data decides was set to another value.
    """
    decided = {
        "model.sample_size": list(sample_shape[1:]),
        "dataset.fingerprint": dataset.fingerprint,
        **text_sizes_of(dataset, config),
    }
    for option, value in decided.items():
        given = attrgetter(option)(config)
        if given not in (None, value):
            raise option_error(option, given, f"is {'none' if value is None else value} for this data; leave it out")
    return {
        **decided,
        "model.text_blocks": dataset.text_blocks if config.model.text is not None else None,
        "model.input_channels": sample_shape[0],
        "dataset.image_size": list(dataset.sample_shape[-2:]),
        "dataset.num_classes": len(dataset.class_names),
        "dataset.horizontal_flip": dataset.horizontal_flip,
    }


def text_sizes_of(dataset: ImageDataset, config: Config) -> dict[str, int | None]:
    """Sizes of the captions' embeddings and blocks of the text, for models in models/; published ones define their own.

    Returns:
        `{"model.text_tokens": 77, ...}`; {} for a model without text.

    Raises:
        ConfigError: the dataset has no captions.
    """
    if config.model.text is None or isinstance(dataset, StandInDataset):
        return {}
    null = dataset.null_tensors
    if null is None:
        right = f"{dataset.name} has no captions; leave it out, or set --dataset.dataset_name captions"
        raise option_error("model.text", config.model.text, right)
    tokens, width = null["prompt_embeds"].shape
    pooled = null.get("pooled_prompt_embeds")
    return {
        "model.text_tokens": tokens,
        "model.text_width": width,
        "model.pooled_width": None if pooled is None else pooled.shape[-1],
    }


def check_steps(config: Config, run: StoredRun) -> None:
    """Allow a different number of steps only if completed steps have the same learning rates.

    Raises:
        ConfigError: the schedule gives finished steps another learning rate.
    """
    steps, before = config.training.steps, run.options.get("training.steps")
    folder = run.path / config.checkpoint.folder
    checkpoints, kept = list_checkpoints(folder), final_weights(folder)
    done: int = step_of(checkpoints[-1]) if checkpoints else before or 0
    wrong = None
    if not checkpoints and kept is not None and steps != step_of(kept):
        wrong = f"{run.path} kept only its weights of step {step_of(kept)} and cannot be continued"
    elif checkpoints and steps < done:
        wrong = f"{run.path} is at step {done}; must be {done} or more"
    elif before is not None and run.options.get("lr_scheduler.schedule") == config.lr_scheduler.schedule:
        schedule = build_schedule(config.lr_scheduler)  # another one is refused by the run directory
        changed = (n for n in range(1, done + 1) if schedule.rate(n, steps=before) != schedule.rate(n, steps=steps))
        if steps != before and (first := next(changed, None)) is not None:
            what = f"that changes the learning rates of {config.lr_scheduler.schedule} from step {first} on"
            wrong = f"{run.path} was last started with {before} and is at {done}; {what}"
    if wrong is not None:
        can_load = checkpoints or kept is not None
        weights = f" from its weights: --checkpoint.initial_load_path {run.path}" if can_load else ":"
        again = f"otherwise start a new run{weights} --metrics.experiment_name NAME"
        raise option_error("training.steps", steps, f"{wrong}; {again}")


def keep_global_batch_size(config: Config, run: StoredRun, *, world_size: int) -> Config:
    """Keep the global batch size of a continued run on any number of ranks.

    Raises:
        ConfigError: the global batch size is not divisible by the number of ranks.
    """
    stored, batch_size = run.options.get("training.global_batch_size"), config.training.batch_size
    if stored is None or config.training.global_batch_size not in (None, stored):
        return config  # the run directory refuses another batch size
    if stored % world_size:
        here = f"{world_size} {_ranks(config)} do not divide it"
        right = f"{run.path} was started with it, and {here}; must be one of {_ranks_for(config, stored)}"
        raise option_error("training.global_batch_size", stored, right)
    if isinstance(batch_size, int):  # the largest micro-batch that is not larger than the given one
        share, multiple = stored // world_size, batch_multiple(config.diffusion)
        sizes_here = range(multiple, batch_size + 1, multiple)
        batch_size = max((size for size in sizes_here if share % size == 0), default=batch_size)
    return config.replace({"training.global_batch_size": stored, "training.batch_size": batch_size})


def _ranks(config: Config) -> str:
    """What reads samples of its own: a rank, or a group of context parallelism."""
    degree = config.training.context_parallel_degree
    return "ranks" if degree == 1 else f"groups of {degree} ranks"


def _ranks_for(config: Config, global_batch_size: int, *, multiple: int = 1) -> str:
    """The numbers of ranks that can share a global batch if each reads a multiple of some number of images."""
    sizes = range(1, global_batch_size // multiple + 1)
    right = [str(size) for size in sizes if global_batch_size % (size * multiple) == 0]
    return f"{', '.join(right) or 'no number of'} {_ranks(config)}"


def complete_batches(config: Config, rank: Rank) -> Config:
    """Complete the batch size, which "auto" searches, and the global batch size.

    Raises:
        ConfigError: the global batch size is not a multiple of batch size x ranks, or the objective needs pairs.
    """
    given, global_batch_size = config.training.batch_size, config.training.global_batch_size
    batch_size = config.training.batch_size_on(rank.world_size)
    if batch_size == "auto":
        batch_size = job_part("training.batch_size")(config, rank)
    if global_batch_size is None:
        global_batch_size = batch_size * rank.world_size
    together = batch_multiple(config.diffusion)
    multiple = together if given is None else batch_size
    if global_batch_size % (multiple * rank.world_size):
        each = f"{rank.world_size} {_ranks(config)} x {multiple} {'for the objective' if given is None else 'each'}"
        others = _ranks_for(config, global_batch_size, multiple=multiple)
        right = f"must be a multiple of {multiple * rank.world_size}: {each}; it fits {others}"
        raise option_error("training.global_batch_size", global_batch_size, right)
    if batch_size % together:
        right = f"must be a multiple of {together}: the objective or an ingredient needs that many samples together"
        raise option_error("training.batch_size", batch_size, right)
    return config.replace({"training.batch_size": batch_size, "training.global_batch_size": global_batch_size})


def plan_batches(config: Config, rank: Rank) -> BatchPlan:
    """The batches of this rank, from a completed configuration."""
    batch_size, global_batch_size = config.training.batch_size, config.training.global_batch_size
    assert isinstance(batch_size, int) and global_batch_size is not None
    return BatchPlan(
        batch_size=batch_size, global_batch_size=global_batch_size, rank=rank.rank, world_size=rank.world_size
    )


def with_condition_of(spec: ModelSpec, dataset: ImageDataset, config: Config, *, device: torch.device) -> ModelSpec:
    """Add the dataset's empty caption to the model's conditioning. A stand-in dataset generates random conditions.

    Raises:
        ConfigError: the model needs captions, and the dataset has none.
    """
    conditioning = spec.conditioning
    if not isinstance(conditioning, TextEmbeddings):
        return spec
    if isinstance(dataset, StandInDataset):
        dataset.condition_on(conditioning.tensors)
        return spec
    null = dataset.null_tensors
    if null is None:
        right = f"{dataset.name} has no captions, and {spec.name} needs them; must be captions, or dummy"
        raise option_error("dataset.dataset_name", dataset.name, right)
    check_embeddings(spec, {name: tensor[None] for name, tensor in null.items()}, config)
    on_device = {name: tensor.to(device) for name, tensor in null.items()}
    return dataclasses.replace(spec, conditioning=conditioning.with_null(on_device))


def check_embeddings(spec: ModelSpec, embeddings: Mapping[str, torch.Tensor], config: Config) -> None:
    """Refuse embeddings of captions, (n, ...) each, of other encoders than the model's.

    Raises:
        ConfigError: names a tensor of another shape.
    """
    for name, (shape, _) in cast(TextEmbeddings, spec.conditioning).tensors.items():
        if name in embeddings and (given := tuple(embeddings[name].shape[1:])) != tuple(shape):
            right = f"its encoders give {name} of shape {list(given)}, and {spec.flavor} needs {list(shape)}"
            raise option_error("text_encoder.path", config.text_encoder.path or config.model.path, right)
