# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Messages of a run at its start and at its end."""

from __future__ import annotations

import json
import shlex
import textwrap
from functools import partial
from pathlib import Path

from torch import nn

from torchditan.config.options import Config, flatten
from torchditan.config.rules import missing_for_effect
from torchditan.distributed.cpu_threads import changed_threads
from torchditan.distributed.parallelize import compile_advice
from torchditan.distributed.precision import precision_advice
from torchditan.evaluation.sample_grids import Grids
from torchditan.evaluation.validation import BIN_KEYS
from torchditan.job.complete import describe_batches
from torchditan.job.description import describe_data, describe_memory
from torchditan.job.prepare import Job
from torchditan.models import TextEmbeddings
from torchditan.registry import FAMILIES
from torchditan.run.metrics import CONSOLE_COLUMNS
from torchditan.run.training_progress import Progress

_NOT_SAVED = "checkpoint.enable_checkpoint and checkpoint.save_final are false"


def opening(
    job: Job,
    model: nn.Module,
    progress: Progress,
    grids: Grids,
    *,
    notes: list[str],
) -> list[str]:
    """Messages before the first step.

    Args:
        progress: position of the run, which may come from a checkpoint.
        notes: messages about parts that were built.
    """
    config = job.config
    advice = compile_advice(
        compiles=config.training.compile,
        checkpoints=config.activation_checkpoint.mode != "none" and config.compile.backend == "inductor",
        float8=config.float8.enable_float8_linear,
        device=job.device,
    )
    precision = None if progress.step else precision_advice(config.training.mixed_precision_param, job.device)
    threads = None
    if progress.step and job.stored is not None and job.device.type == "cpu":
        threads = changed_threads(job.stored.cpu_threads)
    scores = None
    if config.metrics.enable_sampling:
        scores = grids.why_no_scores(job.run_directory.sample_path(0).parent, is_resumed=progress.step > 0)
    decoder = job.space.missing_decoder
    has_channels = config.metrics.enable_sampling and decoder is not None
    pictures = f"grids show latent channels, not pictures: {decoder}" if has_channels else None
    messages = (
        _describe_run(job, model, progress),
        *notes,
        advice,
        precision,
        threads,
        _what_is_left(config, progress),
        scores,
        pictures,
        *_options_without_effect(config, job.device.type),
    )
    return [message for message in messages if message is not None]


def closing(
    job: Job, grids: Grids, *, last_grid: Path | None, last_validation: dict[str, float], weights: Path | None
) -> list[str]:
    """Messages after the last step, with the last validation losses and the paths of all results.

    Args:
        last_grid: newest grid, if one was drawn.
        last_validation: result of `validation_losses`; empty without validation.
        weights: checkpoint or file of the last step, if saved.
    """
    messages = []
    if last_validation:
        messages.append(_describe_validation(last_validation))
    if last_grid is not None:
        beside = "" if grids.shows_prompts else ", generated and real"
        messages.append(f"samples{beside}: {last_grid}")
    messages.append(f"done; all files of this run are in {job.run_directory.path}")
    if weights is None:
        return [*messages, f"no weights were kept: {_NOT_SAVED}"]
    messages.append(f"weights: {weights}")
    if (command := _command_to_generate(job)) is not None:
        messages.append(f"draw others: {command}")
    return messages


def _options_without_effect(config: Config, device: str) -> list[str]:
    """One message for everything that is missing, with the changed options that need it."""
    values, defaults = flatten(config), flatten(Config())
    found: dict[str, list[str]] = {}
    for option, value in values.items():
        if value != defaults[option] and (need := missing_for_effect(config, option, device=device)) is not None:
            found.setdefault(need, []).append(f"{option} = {json.dumps(value)}")
    return [f"no effect here without {need}: {', '.join(options)}" for need, options in found.items()]


def _describe_validation(losses: dict[str, float]) -> str:
    """One line of at most 100 columns for losses below 100."""
    text = f"validation loss {losses['validation_loss']:.4f}"
    bins = [f"{losses[key]:.3f}" if key in losses else "-" for key in BIN_KEYS]
    return f"{text}; by t, noise to data: {' '.join(bins)}" if losses.keys() & set(BIN_KEYS) else text


def _what_is_left(config: Config, progress: Progress) -> str | None:
    if progress.step >= config.training.steps:
        again = "to train again, name a new run with --metrics.experiment_name"
        return f"step {progress.step} is already done: nothing is left to train; {again}"
    keeps_weights = config.checkpoint.enable_checkpoint or config.checkpoint.save_final
    if keeps_weights:
        return None
    return f"this run keeps no weights: {_NOT_SAVED}. --checkpoint.save_final keeps those of the last step"


def _describe_run(job: Job, model: nn.Module, progress: Progress) -> str:
    config, count = job.config, sum(parameter.numel() for parameter in model.parameters())
    start = f", resumed at step {progress.step}" if progress.step else ""
    stop = "Ctrl-C saves and stops" if config.checkpoint.enable_checkpoint else "Ctrl-C stops without saving"
    encoded = job.space.sample_shape if job.space.is_encoding else None
    lines = [
        f"{config.metrics.experiment_name}: {_describe_model(job, model)}, {count / 1e6:.2f}M parameters, "
        f"{job.parallel_dims.mode} on {job.device.type}, {config.training.mixed_precision_param}",
        *describe_data(job.dataset, job.validation_dataset, encoded=encoded),
        f"{config.training.steps} steps{start}; {stop}",
        describe_batches(job.plan, asked=job.given.training.batch_size, context=job.parallel_dims.context),
    ]
    if job.rank.rank == 0 and progress.step < config.training.steps:
        lines += describe_memory(config, device=job.device, num_devices=job.rank.world_size)
    wrap = partial(textwrap.fill, width=CONSOLE_COLUMNS, subsequent_indent="  ", break_long_words=False)
    return "\n".join(wrap(line, break_on_hyphens=False) for line in lines)


def _describe_model(job: Job, model: nn.Module) -> str:
    options, lora = job.config.model, job.config.lora
    if job.spec.name not in FAMILIES:
        return " ".join([f"{options.flavor}/{options.patch_size}", *options.overrides, f"({options.preset})"])
    weights = "random weights" if options.path is None else options.path
    if lora.rank:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        weights += f", LoRA of rank {lora.rank} with {trained / 1e6:.2f}M over {job.config.quantize.base}"
    return f"{options.flavor} ({weights})"


def _command_to_generate(job: Job) -> str | None:
    """The command that draws other samples than the run's grids did; None for models that need a first frame."""
    command = f"torchditan generate {shlex.quote(str(job.run_directory.path))} --seed 1"
    conditioning = job.spec.conditioning
    if not isinstance(conditioning, TextEmbeddings):
        return command
    if conditioning.kept & conditioning.tensors.keys():
        return None
    return command if job.config.sampling.prompts else f'{command} --prompts "a text"'
