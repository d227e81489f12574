# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A job before the model is built: completed and checked settings, the data and the plan of the batches."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchditan.config.options import Config, cache_folder, dataset_channels
from torchditan.config.rules import validate_parts
from torchditan.config.trajectory import INITIAL_WEIGHTS, trajectory
from torchditan.data_stream.datasets import CaptionedPixels, CaptionSource, ImageDataset
from torchditan.data_stream.order import BatchPlan
from torchditan.data_stream.sample_space import SampleSpace, pixel_space
from torchditan.datasets import build_dataset
from torchditan.diffusion.objectives import Objective, build_objective
from torchditan.distributed.cpu_threads import configure_cpu
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.distributed.process_group import Rank, check_devices
from torchditan.errors import ConfigError, option_error
from torchditan.job.complete import (
    StoredRun,
    complete,
    complete_precision,
    plan_batches,
    read_stored_run,
    with_condition_of,
)
from torchditan.job.description import describe_data
from torchditan.job.targets import OpenTargets, open_targets
from torchditan.models import ModelSpec
from torchditan.registry import job_part
from torchditan.run.directory import RunDirectory, run_path
from torchditan.run.progress import report_progress

Evaluate = Callable[..., dict[str, float]]
"""`evaluate(model, sampler, say=print)` (extras/evaluation/during_training.py)."""


@dataclass(frozen=True)
class Job:
    """The inputs of the Trainer."""

    given: Config
    """The configuration as it was given."""
    config: Config
    """The completed configuration: no option is left open."""
    dataset: ImageDataset
    validation_dataset: ImageDataset | None
    """Held-out images if `validation.freq` or `evaluation.freq` is set, else None."""
    space: SampleSpace
    """The samples that the model sees: pixels or latents."""
    spec: ModelSpec
    """The model, with the heads that only training uses."""
    objective: Objective
    targets: OpenTargets
    """What the loss reads besides the batch, from frozen networks."""
    plan: BatchPlan
    rank: Rank
    parallel_dims: ParallelDims
    run_directory: RunDirectory
    """Not opened yet."""
    stored: StoredRun | None
    """The run that this job continues; None for a new one."""
    evaluation: Evaluate | None
    """Measures the samples of a model, if `evaluation.freq` is set: called on all ranks, returns figures by name."""

    @functools.cached_property
    def trajectory(self) -> dict[str, Any]:
        """What decides the weights of this run. Only a job that agrees may continue it."""
        found, path = trajectory(self.config), self.config.checkpoint.initial_load_path
        if path is not None and self.config.lora.rank:
            found[INITIAL_WEIGHTS] = job_part("lora.initial_load_path")(path)
        return found | {f"weights of {network}": identity for network, identity in self.targets.identities.items()}

    @property
    def device(self) -> torch.device:
        return self.rank.device


def prepare(
    config: Config, dataset: ImageDataset | None = None, validation_dataset: ImageDataset | None = None
) -> Job | None:
    """Open the data, complete and check the settings. Fast, except for encoding captions and searching the batch size.

    Args:
        config: the job, which is not modified; `Job.config` is the completed configuration.
        dataset: training images, instead of those of `[dataset]`.
        validation_dataset: held-out images for it, required if `validation.freq` or `evaluation.freq` is set.

    Returns:
        The job, or None if it only fills the cache (`cache.only`).

    Raises:
        ConfigError: settings that cannot work together or on this machine.
    """
    validate_parts(config)
    if dataset is None:
        dataset, validation_dataset = open_datasets(config)
    if config.training.deterministic:
        # cuBLAS reads it when it creates a handle, which encoding captions already does.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank = Rank.from_environment()
    parallel_dims = ParallelDims.resolve(config.training, world_size=rank.world_size)
    path = run_path(config)
    run = read_stored_run(path)
    configure_cpu(None if run is None else run.cpu_threads)
    config = complete_precision(config, run, device=rank.device)
    _check_machine(config, rank, num_shards=parallel_dims.num_shards)
    if _reads_captions(config, dataset):
        open_captions = job_part("model.text")
        dataset, validation_dataset, space = open_captions(config, dataset, validation_dataset, rank=rank)
        if config.cache.only:
            if rank.rank == 0 and not config.job.print_config:
                print("\n".join(describe_data(dataset, validation_dataset)))
                print(f"the cache contains all {len(dataset)} samples and their captions")
            return None
    elif config.cache.only:
        raise option_error("cache.only", True, f"{dataset.name} has no captions to encode; leave it out")
    else:
        space = open_space(config, dataset, device=rank.device)
    data_rank = parallel_dims.data_rank(rank)
    completed, spec = complete(config, dataset=dataset, space=space, rank=data_rank, run=run)
    plan = plan_batches(completed, data_rank)
    if config.training.compile and config.compile.scope == "model" and not spec.is_one_graph:
        right = f"cannot trace the hooks that {spec.name} sets while it computes; must be block"
        raise option_error("compile.scope", "model", right)
    spec = with_condition_of(spec, dataset, completed, device=rank.device)
    if validation_dataset is not None:
        with_condition_of(spec, validation_dataset, completed, device=rank.device)  # also conditions a stand-in dataset
    objective = build_objective(completed.diffusion, spec)
    targets = open_targets(completed, objective, dataset, rank=rank)
    evaluation = None
    if completed.evaluation.freq:
        data = {"dataset": dataset, "held_out": validation_dataset, "space": space}
        evaluation = job_part("evaluation.freq")(completed, device=rank.device, **data)
    return Job(
        given=config,
        config=completed,
        dataset=dataset,
        validation_dataset=validation_dataset,
        space=space,
        spec=spec.with_heads(objective.heads),
        objective=objective,
        targets=targets,
        plan=plan,
        rank=rank,
        parallel_dims=parallel_dims,
        run_directory=RunDirectory(path, is_writer=rank.rank == 0),
        stored=run,
        evaluation=evaluation,
    )


def _check_machine(config: Config, rank: Rank, *, num_shards: int) -> None:
    """Check that the devices and the installation support these settings."""
    check_devices(rank)
    if rank.device.type == "mps":
        from torchditan.distributed.mps import check_mps

        check_mps(config)
    if config.float8.enable_float8_linear:
        from torchditan.distributed.float8 import check_float8

        check_float8(config.float8, device=rank.device)
    if config.training.compile:
        from torchditan.distributed.compilation import check_compile, compiled_folder

        check_compile(config, num_shards=num_shards)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_folder(config, device=rank.device).absolute()))
    if config.metrics.enable_tensorboard or config.metrics.enable_wandb or config.metrics.enable_trackio:
        from torchditan.run.trackers import check_trackers

        check_trackers(config.metrics)
    if config.profiling.enable_memory_snapshot and rank.device.type != "cuda":
        right = f"needs CUDA, this run is on {rank.device.type}; leave it out"
        raise option_error("profiling.enable_memory_snapshot", True, right)


def _reads_captions(config: Config, dataset: ImageDataset) -> bool:
    """Whether the model reads the captions of this dataset. One that also has classes can train a model of classes."""
    if isinstance(dataset, CaptionedPixels):
        return config.model.text is not None or not dataset.class_names
    return isinstance(dataset, CaptionSource)


def open_datasets(config: Config) -> tuple[ImageDataset, ImageDataset | None]:
    """Training images, and held-out ones for a job that uses them."""
    channels = dataset_channels(config)
    with report_progress(f"opening {config.dataset.dataset_name}"):
        places: dict[str, Any] = {"input_channels": channels, "cache_folder": cache_folder(config)}
        train = build_dataset(config.dataset, split="train", **places)
        if not config.validation.freq and not config.evaluation.freq:
            return train, None
        return train, build_dataset(config.dataset, split="validation", **places)


def open_space(config: Config, dataset: ImageDataset, *, device: torch.device) -> SampleSpace:
    if not config.autoencoder.online and dataset.index is None:
        return pixel_space(config.autoencoder, dataset)
    needs_decoder = config.metrics.enable_sampling or config.evaluation.freq > 0
    try:
        open_latents = job_part("autoencoder.name")
    except ConfigError:
        if dataset.index is None or config.autoencoder.online:
            raise
        from torchditan.data_stream.stored_latents import StoredLatents

        return StoredLatents(config.autoencoder, dataset, device=device)
    with report_progress("opening the autoencoder"):
        return open_latents(config.autoencoder, dataset, device=device, needs_decoder=needs_decoder)
