# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A job before the model is built: completed and checked settings, the data and the plan of the batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchditan.checkpoint.manager import check_async_mode
from torchditan.config.errors import option_error
from torchditan.config.options import Config
from torchditan.data_stream.datasets import CaptionSource, ImageDataset
from torchditan.data_stream.order import BatchPlan
from torchditan.diffusion.objectives import build_objective
from torchditan.distributed.cpu_threads import configure_cpu
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.distributed.process_group import Rank, check_devices
from torchditan.job.complete import (
    complete,
    describe_batches,
    keep_values_of_run,
    plan_batches,
    read_stored_run,
    with_condition_of,
)
from torchditan.latents.sample_space import SampleSpace, pixel_space
from torchditan.models import ModelSpec
from torchditan.run.directory import RunDirectory, run_path
from torchditan.run.metrics import check_trackers
from torchditan.run.profiling import check_profiling
from torchditan.run.progress import report_progress

Evaluate = Callable[..., dict[str, float]]
"""`evaluate(model, objective=objective, say=print)` (evaluation/during_training.py)."""


@dataclass(frozen=True)
class Job:
    """The inputs of the Trainer."""

    config: Config
    """The completed configuration: no option is left open."""
    dataset: ImageDataset
    validation_dataset: ImageDataset | None
    """Held-out images if `validation.freq` or `evaluation.freq` is set, else None."""
    space: SampleSpace
    """The samples that the model sees: pixels or latents."""
    spec: ModelSpec
    plan: BatchPlan
    batches: str
    """The plan as text."""
    rank: Rank
    parallel_dims: ParallelDims
    run_directory: RunDirectory
    """Not opened yet."""
    threads_changed: str | None
    """The message for a run that continues with another number of threads."""
    load_initial_weights: Callable[..., str] | None
    """Set if the job has a `checkpoint.initial_load_path`."""
    evaluation: Evaluate | None
    """Measures the samples of a model, if `evaluation.freq` is set: called on all ranks, returns figures by name."""

    @property
    def device(self) -> torch.device:
        return self.rank.device


def prepare_job(
    config: Config,
    dataset: ImageDataset,
    validation_dataset: ImageDataset | None = None,
    *,
    open_captions: Callable[..., Any] | None = None,
    open_latents: Callable[..., SampleSpace] | None = None,
    tune_batch_size: Callable[[Config, Rank], int] | None = None,
    load_initial_weights: Callable[..., str] | None = None,
    evaluate_samples: Callable[..., Evaluate] | None = None,
) -> Job | None:
    """Complete and check the settings. Fast, except for encoding captions and searching the batch size.

    Args:
        config: the job, which is not modified; `Job.config` is the completed configuration.
        dataset: training images.
        validation_dataset: held-out images, required if `validation.freq` or `evaluation.freq` is set.
        open_captions, open_latents, tune_batch_size, load_initial_weights, evaluate_samples: parts that only some
            jobs need; see `optional_parts.choose_parts`.

    Returns:
        The job, or None if it only fills the cache (`cache.only`).

    Raises:
        ConfigError: settings that cannot work together or on this machine.
    """
    if config.training.deterministic:
        # cuBLAS reads it when it creates a handle, which encoding captions already does.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rank = Rank.from_environment()
    parallel_dims = ParallelDims.resolve(config.training, world_size=rank.world_size)
    assert config.metrics.experiment_name is not None
    path = run_path(config.job.dump_folder, config.metrics.experiment_name)
    threads_changed = configure_cpu(path)
    _check_machine(config, rank, num_shards=parallel_dims.num_shards)
    run = read_stored_run(path)
    continued, kept = keep_values_of_run(config, run)
    if kept and rank.rank == 0:
        print(f"{path} keeps the settings it was started with: {', '.join(kept)}", file=sys.stderr)
    if isinstance(dataset, CaptionSource):
        assert open_captions is not None, "optional_parts.choose_parts gives it"
        dataset, validation_dataset, space = open_captions(continued, dataset, validation_dataset, rank=rank)
        if config.cache.only:
            if rank.rank == 0 and not config.job.print_config:
                print(f"the cache contains all {len(dataset)} samples and their captions")
            return None
    elif config.cache.only:
        raise option_error("cache.only", True, f"{dataset.name} has no captions to encode; leave it out")
    else:
        space = _open_space(continued, dataset, device=rank.device, open_latents=open_latents)
    data_rank = parallel_dims.data_rank(rank)
    completed, spec = complete(
        continued, dataset=dataset, space=space, rank=data_rank, run=run, tune_batch_size=tune_batch_size
    )
    plan = plan_batches(completed, data_rank)
    build_objective(completed.diffusion, spec)  # refuses a model that lacks the requested features
    if config.training.compile and config.compile.scope == "model" and not spec.is_one_graph:
        right = f"cannot trace the hooks that {spec.name} sets while it computes; must be block"
        raise option_error("compile.scope", "model", right)
    spec = with_condition_of(spec, dataset, completed, device=rank.device)
    if validation_dataset is not None:
        with_condition_of(spec, validation_dataset, completed, device=rank.device)  # also conditions a stand-in dataset
    return Job(
        config=completed,
        dataset=dataset,
        validation_dataset=validation_dataset,
        space=space,
        spec=spec,
        plan=plan,
        batches=describe_batches(plan, asked=config.training.batch_size, context=parallel_dims.context),
        rank=rank,
        parallel_dims=parallel_dims,
        run_directory=RunDirectory(path, is_writer=rank.rank == 0),
        threads_changed=threads_changed,
        load_initial_weights=load_initial_weights,
        evaluation=_build_evaluation(evaluate_samples, completed, dataset, validation_dataset, space, spec, rank),
    )


def _build_evaluation(
    build: Callable[..., Evaluate] | None,
    config: Config,
    dataset: ImageDataset,
    held_out: ImageDataset | None,
    space: SampleSpace,
    spec: ModelSpec,
    rank: Rank,
) -> Evaluate | None:
    if build is None:
        return None
    conditioning = spec.conditioning
    return build(config, dataset=dataset, held_out=held_out, space=space, conditioning=conditioning, device=rank.device)


def _check_machine(config: Config, rank: Rank, *, num_shards: int) -> None:
    """Check that the devices and the installation support these settings."""
    check_devices(rank)
    if config.float8.enable_float8_linear:
        from torchditan.distributed.float8 import check_float8

        check_float8(config.float8, device=rank.device)
    if config.training.attention_backend != "default":
        from torchditan.distributed.attention_backend import check_attention_backend

        check_attention_backend(config.training, device=rank.device)
    if config.training.compile:
        from torchditan.distributed.compilation import cache_folder, check_compile

        check_compile(config, num_shards=num_shards)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder(config, device=rank.device).absolute()))
    check_async_mode(config, device=rank.device)
    check_trackers(config.metrics)
    check_profiling(config.profiling, rank.device)


def _open_space(
    config: Config,
    dataset: ImageDataset,
    *,
    device: torch.device,
    open_latents: Callable[..., SampleSpace] | None,
) -> SampleSpace:
    if open_latents is None:
        return pixel_space(config.autoencoder, dataset)
    with report_progress("opening the autoencoder"):
        needs_decoder = config.metrics.enable_sampling or config.evaluation.freq > 0
        return open_latents(config.autoencoder, dataset, device=device, needs_decoder=needs_decoder)
