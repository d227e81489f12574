# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Messages of a run at its start and at its end."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path

from torch import nn

from torchditan.config.options import Config, flatten
from torchditan.config.rules import missing_for_effect
from torchditan.data_stream.order import BatchPlan
from torchditan.distributed.cpu_threads import changed_threads
from torchditan.distributed.parallelize import compile_advice
from torchditan.distributed.precision import precision_advice
from torchditan.job.description import describe_data, describe_memory
from torchditan.job.prepare import Job
from torchditan.models import TextEmbeddings
from torchditan.periodic_tasks import PeriodicTasks
from torchditan.registry import FAMILIES
from torchditan.run.console import CONSOLE_COLUMNS
from torchditan.sampling.validation import BIN_KEYS

_NOT_SAVED = "checkpoint.enable_checkpoint and checkpoint.save_final are false"


def opening(job: Job, tasks: PeriodicTasks, *, notes: list[str]) -> list[str]:
    """Messages before the first step.

    Args:
        tasks: with the model, and the position of the run, which may come from a checkpoint.
        notes: messages about parts that were built.
    """
    config, step = job.config, tasks.progress.step
    messages: list[str | None] = [_describe_run(job, tasks.model, step), *notes]
    if not config.training.compile:
        messages.append(compile_advice(float8=config.float8.enable_float8_linear, device=job.device))
    if not step:
        messages.append(job.spec.warning)
        messages.append(precision_advice(config.training.mixed_precision_param, job.device))
    elif job.stored is not None and job.device.type == "cpu":
        messages.append(changed_threads(job.stored.cpu_threads))
    if step >= config.training.steps:
        again = "to train again, name a new run with --metrics.experiment_name"
        messages.append(f"step {step} is already done: nothing is left to train; {again}")
    elif not (config.checkpoint.enable_checkpoint or config.checkpoint.save_final):
        keep = "--checkpoint.save_final keeps those of the last step"
        messages.append(f"this run keeps no weights: {_NOT_SAVED}. {keep}")
    if config.metrics.enable_sampling and (decoder := job.space.missing_decoder) is not None:
        messages.append(f"grids show latent channels, not pictures: {decoder}")
    messages += _options_without_effect(config, job.device.type)
    return [message for message in messages if message is not None]


def closing(job: Job, tasks: PeriodicTasks, *, weights: Path | None) -> list[str]:
    """Messages after the last step, with the last validation losses and the paths of all results.

    Args:
        tasks: with the last grid and the last validation.
        weights: checkpoint or file of the last step, if saved.
    """
    messages = []
    if losses := tasks.last_validation:
        bins = [f"{losses[key]:.3f}" if key in losses else "-" for key in BIN_KEYS]  # at most 100 columns
        by_t = f"; by t, noise to data: {' '.join(bins)}" if losses.keys() & set(BIN_KEYS) else ""
        messages.append(f"validation loss {losses['validation_loss']:.4f}{by_t}")
    if tasks.last_grid is not None:
        contents = "" if tasks.grids.shows_prompts else ", generated and real"
        messages.append(f"samples{contents}: {tasks.last_grid}")
    messages.append(f"done; all files of this run are in {job.run_directory.path}")
    if weights is None:
        return [*messages, f"no weights were kept: {_NOT_SAVED}"]
    messages.append(f"weights: {weights}")
    if (command := _command_to_generate(job)) is not None:
        messages.append(f"draw others: {command}")
    return messages


def describe_batches(plan: BatchPlan, *, asked: int | str | None = None, context: int = 1) -> str:
    """`batch_size 8 x 4 micro-batches x 1 rank = global batch 32`, and why it differs from the `asked` batch_size."""
    micro_batches, ranks, name = plan.num_micro_batches, plan.world_size, "rank" if context == 1 else "group"
    text = (
        f"batch_size {plan.batch_size} x {micro_batches} micro-batch{'' if micro_batches == 1 else 'es'} x "
        f"{ranks} {name}{'' if ranks == 1 else 's'}{f' of {context} ranks' if context > 1 else ''}"
        f" = global batch {plan.global_batch_size}"
    )
    if asked in (None, "auto", plan.batch_size):
        return text
    return f"{text} (batch_size {asked} does not divide the {plan.global_batch_size // ranks} of a {name})"


def _options_without_effect(config: Config, device: str) -> list[str]:
    """One message for everything that is missing, with the changed options that need it."""
    values, defaults = flatten(config), flatten(Config())
    found: dict[str, list[str]] = {}
    for option, value in values.items():
        if value != defaults[option] and (need := missing_for_effect(config, option, device=device)) is not None:
            found.setdefault(need, []).append(f"{option} = {json.dumps(value)}")
    return [f"no effect here without {need}: {', '.join(options)}" for need, options in found.items()]


def _describe_run(job: Job, model: nn.Module, step: int) -> str:
    config, count = job.config, sum(parameter.numel() for parameter in model.parameters())
    start = f", resumed at step {step}" if step else ""
    stop = "Ctrl-C saves and stops" if config.checkpoint.enable_checkpoint else "Ctrl-C stops without saving"
    lines = [
        f"{config.metrics.experiment_name}: {_describe_model(job, model)}, {count / 1e6:.2f}M parameters, "
        f"{job.parallel_dims.mode} on {job.device.type}, {config.training.mixed_precision_param}",
        *describe_data(
            job.dataset,
            job.validation_dataset,
            encoded=job.space.sample_shape if job.space.is_encoding else None,
        ),
        f"{config.training.steps} steps{start}; {stop}",
        describe_batches(job.plan, asked=job.given.training.batch_size, context=job.parallel_dims.context),
    ]
    if job.device.type == "cuda" and job.rank.rank == 0 and step < config.training.steps:
        lines += describe_memory(config, device=job.device, num_devices=job.rank.world_size)
    wrapper = textwrap.TextWrapper(
        CONSOLE_COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in lines)


def _describe_model(job: Job, model: nn.Module) -> str:
    options, lora = job.config.model, job.config.lora
    if job.spec.name not in FAMILIES:
        name = [] if options.name == "dit" else [options.name]
        return " ".join([*name, f"{options.flavor}/{options.patch_size}", *options.overrides, f"({options.preset})"])
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
