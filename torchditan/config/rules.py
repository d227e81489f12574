# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Rules that need only the options, not the data or the devices. `validate` applies them in order.

Families of published models and objectives define their own rules. Their files import torch, so these rules come last.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from torchditan.config.errors import did_you_mean, has_secret, option_error
from torchditan.config.options import FLAVORS_OF, Config, flatten
from torchditan.registry import (
    ARCHITECTURES,
    BLOCKS,
    CONTEXT_PARALLEL,
    FAMILIES,
    INGREDIENTS,
    METERS,
    METRICS,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    SAMPLERS,
    SCHEDULES,
    check_options,
    create,
    entry_name,
    overrides,
    registered,
    resolve,
)


def _is_inner_folder(name: str) -> bool:
    parts = PurePath(name).parts
    return bool(parts) and not PurePath(name).is_absolute() and ".." not in parts and name.isprintable()


def _is_plain_name(name: str) -> bool:
    return _is_inner_folder(name) and len(name.encode()) <= 200 and "/" not in name and "\\" not in name


_RULES: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "must be at least 1",
        lambda value: value >= 1,
        "model.patch_size model.patch_bottleneck model.input_channels model.text_tokens model.text_width "
        "model.pooled_width autoencoder.downsampling dataset.prefetch_factor dataset.dummy_size "
        "dataset.bucket_step dataset.num_frames diffusion.timestep_shift_base "
        "training.batch_size training.global_batch_size training.steps training.gc_freq "
        "training.data_parallel_replicate_degree training.context_parallel_degree "
        "checkpoint.interval metrics.log_freq metrics.sample_batch_size sampling.num_steps "
        "sampling.guidance_channels sampling.images_per_class sampling.max_classes validation.num_images "
        "evaluation.num_samples "
        "profiling.profile_freq comm.init_timeout_seconds comm.train_timeout_seconds text_encoder.max_length "
        "training.max_rollbacks autotune.batch_size_multiple autotune.max_batch_size optimizer.ns_steps",
    ),
    (
        "must be at least 2: the first step warms up",
        lambda value: value >= 2,
        "autotune.steps",
    ),
    (
        "must be 0 or more",
        lambda value: value >= 0,
        "model.text_blocks model.text_kernel "
        "dataset.num_classes dataset.num_workers dataset.shuffle_tags dataset.held_out "
        "training.max_norm optimizer.lr optimizer.weight_decay optimizer.adamw_lr "
        "lr_scheduler.warmup_steps checkpoint.keep_latest_k metrics.sample_freq sampling.guidance_scale lora.rank "
        "diffusion.embedded_guidance sampling.embedded_guidance "
        "validation.freq evaluation.freq evaluation.seed comm.trace_buf_size",
    ),
    (
        "must be two or three integers from 1 to 65536",
        lambda values: len(values) in (2, 3) and min(values) >= 1 and max(values) <= 65_536,
        "model.sample_size",
    ),
    (
        "must be odd: a word and as many on each side, or 0",
        lambda value: value == 0 or value % 2 == 1,
        "model.text_kernel",
    ),
    (
        "must be greater than 0",
        lambda value: value > 0,
        "model.rope_theta model.timestep_scale diffusion.logit_normal_std diffusion.timestep_shift "
        "sampling.timestep_shift diffusion.min_snr_gamma optimizer.eps autotune.memory_limit_gib lora.alpha "
        "dataset.remote_cache_gib",
    ),
    (
        "must not be empty",
        lambda value: bool(value.strip()),
        "dataset.trigger_word",
    ),
    (
        "must be greater than 0",
        lambda values: min(values, default=0) > 0,
        "autoencoder.scale",
    ),
    (
        "must be above 0 and below 0.2887, the width of a uniform average",
        lambda value: 0 < value < 0.2887,
        "ema.width",
    ),
    (
        "must be above 1, or 0 for none",
        lambda value: value == 0 or value > 1,
        "training.loss_spike_factor",
    ),
    (
        "must be between 0 and 1",
        lambda value: 0 <= value <= 1,
        "diffusion.label_dropout lr_scheduler.decay_ratio lr_scheduler.min_lr_factor activation_checkpoint.fraction",
    ),
    (
        "must be 0 or more and below 1",
        lambda value: 0 <= value < 1,
        "optimizer.beta1 optimizer.beta2 optimizer.momentum ema.decay autotune.memory_margin",
    ),
    (
        "must be 0 or more and below 2^63",
        lambda value: 0 <= value < 2**63,
        "training.seed",
    ),
    (
        "must be at least 1, or -1 for all ranks left",
        lambda value: value >= 1 or value == -1,
        "training.data_parallel_shard_degree",
    ),
    (
        "must be a plain folder name inside the run directory, without `..`",
        _is_inner_folder,
        "checkpoint.folder metrics.save_tb_folder profiling.save_traces_folder profiling.save_memory_snapshot_folder",
    ),
    (
        "must be a plain folder name without slashes, of at most 200 bytes",
        _is_plain_name,
        "metrics.experiment_name",
    ),
]
"""(what is right, its test, the options it applies to). Options left open (None or auto) are not tested."""


def validate(config: Config) -> None:
    """Check all rules of a stored configuration that depend only on the options. Parts of training are not opened."""
    validate_values(config)
    validate_parts(config, is_training=False)


def validate_values(config: Config) -> None:
    """The rules that do not import torch."""
    values = flatten(config)
    _refuse_secrets(values)
    for right, is_right, options in _RULES:
        for option in options.split():
            if values[option] not in (None, "auto") and not is_right(values[option]):
                raise option_error(option, values[option], right)
    _validate_model(config)
    _validate_effects(config)
    _validate_image_size(config)
    _validate_global_batch_size(config)
    _validate_streaming(config)
    _validate_evaluation(config)
    _validate_guidance_interval(config)
    _validate_activation_checkpoint(config)


def _refuse_secrets(values: Mapping[str, Any]) -> None:
    for option, value in values.items():
        if any(isinstance(text, str) and has_secret(text) for text in (value if isinstance(value, list) else [value])):
            right = (
                "has a password, a key or a token, which the run would store; leave it out and set environment "
                "variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN), or fsspec's configuration"
            )
            raise option_error(option, value, right)


def validate_parts(config: Config, *, is_training: bool = True) -> None:
    """The rules of a published model's family, of the objective, and of other parts whose files import torch.

    Args:
        is_training: also those of parts that only training uses.
    """
    name, family = config.model.name, _family(config)
    if family is not None:
        _check_flavor(config.model.flavor, family.flavors, whose=f" for {name}")
        _raise_first(config, family.option_mistakes(config))
    _refuse_without_effect(config, _WITHOUT_EFFECT_IN_FAMILY)
    _validate_plug_ins(config)
    _validate_objective(config)
    if is_training:
        validate_training_parts(config)


def _validate_model(config: Config) -> None:
    is_published = config.model.name in FAMILIES
    if config.model.text is None:
        values = flatten(config)
        right = f"{config.model.name} defines its own" if is_published else "has no effect without model.text"
        for option in ("model.text_blocks", "model.text_kernel"):  # 0 in runs from before these options
            if values[option]:
                raise option_error(option, values[option], f"{right}; leave it out")
    if is_published:
        return
    if config.model.name in FLAVORS_OF:
        _check_flavor(config.model.flavor, FLAVORS_OF[config.model.name])
    _validate_own_model(config)


def _check_flavor(flavor: str, flavors: Collection[str], *, whose: str = "") -> None:
    if flavor not in flavors:
        hint = did_you_mean(flavor, flavors)
        raise option_error("model.flavor", flavor, f"must be one of {', '.join(flavors)}{whose}{hint}")


def _family(config: Config) -> Any:
    """The class of a published model's family (finetune/published/base.py); None for a model in models/."""
    return registered(FAMILIES, config.model.name) if config.model.name in FAMILIES else None


_WITHOUT_EFFECT: list[tuple[Callable[[Config], bool], str, str]] = [
    (
        lambda config: config.model.name not in FAMILIES,
        "model.path lora.rank lora.alpha lora.target_modules lora.assistant_path quantize.base",
        "applies only to published models; leave it out for {name}",
    ),
    (
        lambda config: config.model.name not in FAMILIES and config.model.text is None,
        "model.text_tokens model.text_width model.pooled_width sampling.prompts sampling.negative_prompt",
        "has no effect without model.text; set --model.text in_context, cross_attention or joint, or leave it out",
    ),
    (
        lambda config: config.model.name in FAMILIES,
        "model.preset model.block model.patch_size model.conditioning model.norm_type model.qk_norm model.mlp "
        "model.position model.rope_theta model.timestep_scale model.timestep_frequencies model.learn_sigma "
        "model.patch_bottleneck model.text model.text_tokens model.text_width model.pooled_width",
        "{name} defines its own; leave it out",
    ),
    (
        lambda config: config.diffusion.loss_weighting == "none",
        "diffusion.min_snr_gamma",
        "has no effect without weights; set --diffusion.loss_weighting min_snr, or leave it out",
    ),
    (
        lambda config: config.checkpoint.initial_load_path is None,
        "checkpoint.initial_load_convention",
        "has no effect without checkpoint.initial_load_path; leave it out",
    ),
    (
        lambda config: not config.metrics.enable_tensorboard,
        "metrics.legacy_tags",
        "has no effect without TensorBoard; set --metrics.enable_tensorboard, or leave it out",
    ),
    (
        lambda config: config.ema.width is not None,
        "ema.decay ema.warmup",
        "has no effect with ema.width; leave it out, or set its default, {default}",
    ),
    (
        lambda config: config.lora.rank == 0,
        "lora.alpha lora.target_modules lora.assistant_path",
        "has no effect with lora.rank 0, which trains all weights",
    ),
    (
        lambda config: not config.checkpoint.enable_checkpoint,
        "training.on_nonfinite",
        "needs checkpoint.enable_checkpoint to return to",
    ),
    (
        lambda config: config.dataset.streaming,
        "training.on_nonfinite",
        "skips data, which dataset.streaming cannot do; must be stop",
    ),
    (
        lambda config: config.checkpoint.enable_checkpoint,
        "checkpoint.save_final",
        "checkpoint.enable_checkpoint saves the last step too; leave it out, or set both to false",
    ),
    (
        lambda config: config.optimizer.name == "AdamW8bit",
        "checkpoint.async_mode",
        "torch cannot stage the tensors of AdamW8bit for a background save; must be disabled",
    ),
    (
        lambda config: config.optimizer.name in ("AdamW", "AdamW8bit"),
        "optimizer.adjust_lr_fn optimizer.momentum optimizer.nesterov optimizer.ns_steps optimizer.ns_dtype",
        "applies only to optimizer.name Muon; leave it out, or set its default, {default}",
    ),
    (
        lambda config: config.optimizer.name in ("AdamW", "AdamW8bit"),
        "optimizer.adamw_lr",
        "applies only to optimizer.name Muon; leave it out",
    ),
    (
        lambda config: config.optimizer.name == "Muon" and config.model.name in FAMILIES,
        "optimizer.name",
        "knows the matrices of our own blocks only; must be AdamW or AdamW8bit for a published model",
    ),
    (lambda config: config.optimizer.lr == 0, "optimizer.adamw_lr", "needs an optimizer.lr greater than 0"),
    (
        lambda config: config.optimizer.adamw_lr is None,
        "optimizer.adjust_lr_fn",
        "needs optimizer.adamw_lr, because a rate of Muon is too high for the weights that AdamW updates",
    ),
]
"""(condition, options that must then keep their default, the message). The first match raises."""


_WITHOUT_EFFECT_IN_FAMILY: list[tuple[Callable[[Config], bool], str, str]] = [
    (
        lambda config: not getattr(_family(config), "embeds_guidance", False),
        "diffusion.embedded_guidance sampling.embedded_guidance",
        "{name} does not embed a guidance scale; leave it out",
    ),
]
"""The same, for a rule that asks the family."""

_IDLE: list[tuple[Callable[[Config, str | None], bool], str, str]] = [
    (lambda config, device: device == "cpu", "training.enable_cpu_offload", "a GPU"),
    (
        lambda config, device: device == "cpu" and config.training.attention_backend != "math",
        "training.attention_backend",
        "a GPU",
    ),
    (lambda config, _: not config.training.compile, "compile.", "training.compile"),
    (lambda config, _: not config.float8.enable_float8_linear, "float8.", "float8.enable_float8_linear"),
    (
        lambda config, _: config.activation_checkpoint.mode != "selective",
        "activation_checkpoint.selective_ac_option",
        'activation_checkpoint.mode = "selective"',
    ),
    (
        lambda config, _: config.activation_checkpoint.mode != "fraction",
        "activation_checkpoint.fraction",
        'activation_checkpoint.mode = "fraction"',
    ),
    (lambda config, _: not config.ema.enable, "ema.decay ema.warmup ema.width", "ema.enable"),
    (lambda config, _: config.dataset.num_workers == 0, "dataset.prefetch_factor", "dataset.num_workers above 0"),
    (
        lambda config, _: config.dataset.dataset_name != "dummy",
        "dataset.dummy_",
        'dataset.dataset_name = "dummy"',
    ),
    (lambda config, _: config.model.name in FAMILIES, "model.patch_size", "a model that is not published"),
    (
        lambda config, _: config.training.on_nonfinite != "rollback",
        "training.loss_spike_factor training.max_rollbacks",
        'training.on_nonfinite = "rollback"',
    ),
    (
        lambda config, _: not config.checkpoint.enable_checkpoint,
        "checkpoint.interval checkpoint.keep_latest_k checkpoint.async_mode",
        "checkpoint.enable_checkpoint",
    ),
    (
        lambda config, _: bool(config.model.text_kernel) and not config.model.text_positions,
        "model.text_kernel",
        "model.text_positions",
    ),
    (lambda config, _: not config.metrics.enable_sampling, "metrics.sample_freq", "metrics.enable_sampling"),
    (
        lambda config, _: config.sampling.guidance_scale == 1,
        "sampling.negative_prompt",
        "a sampling.guidance_scale other than 1",
    ),
    (lambda config, _: not config.metrics.enable_tensorboard, "metrics.save_tb_folder", "metrics.enable_tensorboard"),
    (lambda config, _: not config.metrics.enable_wandb, "metrics.wandb_project", "metrics.enable_wandb"),
    (
        lambda config, _: not (config.profiling.enable_profiling or config.profiling.enable_memory_snapshot),
        "profiling.profile_freq",
        "profiling.enable_profiling",
    ),
]
"""(condition, options or beginnings of them that then have no effect, what they need). Jobs accept them, so that a file
for GPUs also runs on a CPU; their first lines list them. Grids refuse them as axes."""


def missing_for_effect(config: Config, option: str, *, device: str | None = None) -> str | None:
    """What `option` needs to have an effect under these settings; None if it has one, or on an unknown device."""
    return next(
        (need for is_idle, names, need in _IDLE if option.startswith(tuple(names.split())) and is_idle(config, device)),
        None,
    )


def _validate_effects(config: Config) -> None:
    _refuse_without_effect(config, _WITHOUT_EFFECT)


def _refuse_without_effect(config: Config, table: list[tuple[Callable[[Config], bool], str, str]]) -> None:
    values, defaults = flatten(config), flatten(Config())
    for holds, options, right in table:
        for option in options.split() if holds(config) else ():
            if values[option] != defaults[option]:
                default = json.dumps(defaults[option])
                raise option_error(option, values[option], right.format(name=config.model.name, default=default))


def _validate_own_model(config: Config) -> None:
    position = config.model.position or ("sincos" if config.model.preset == "official" else "rope")
    if config.dataset.aspect_buckets and position != "rope":
        right = f"{position} positions are a table for one size; set --model.position rope, or leave it out"
        raise option_error("dataset.aspect_buckets", True, right)


def _validate_image_size(config: Config) -> None:
    size, patch_size = config.dataset.image_size, config.model.patch_size
    if size is None:
        return
    if config.model.name in FAMILIES:
        patch_size = 1  # the family checks its own
    if len(size) not in (1, 2) or min(size) < 1:
        raise option_error("dataset.image_size", size, "must be one or two positive integers, 32 or [32, 48]")
    if not config.autoencoder.online and any(side % patch_size for side in size):
        right = f"must be a multiple of model.patch_size = {patch_size}"
        raise option_error("dataset.image_size", size, right)


def _validate_global_batch_size(config: Config) -> None:
    global_batch_size, batch_size = config.training.global_batch_size, config.training.batch_size
    if global_batch_size is None or batch_size is None or batch_size == "auto":
        return
    if global_batch_size % batch_size:
        right = f"must be a multiple of training.batch_size = {batch_size} times the number of ranks"
        raise option_error("training.global_batch_size", global_batch_size, right)


def _validate_streaming(config: Config) -> None:
    for option, freq in (("validation.freq", config.validation.freq), ("evaluation.freq", config.evaluation.freq)):
        if config.dataset.streaming and freq:
            right = "reads held-out images in a different order, which dataset.streaming cannot do; must be 0"
            raise option_error(option, freq, right)


def _validate_evaluation(config: Config) -> None:
    if not config.evaluation.metrics:
        raise option_error("evaluation.metrics", [], f"must be one or more of {', '.join(METRICS)}")
    if config.evaluation.freq == 0:
        return
    if config.model.name in FAMILIES:
        right = "evaluates no published models, whose samples validation compares; must be 0"
        raise option_error("evaluation.freq", config.evaluation.freq, right)
    if config.model.text is not None and (config.autoencoder.is_given or config.dataset.aspect_buckets):
        right = "evaluates models of captions on pixels of one size only; must be 0 for others"
        raise option_error("evaluation.freq", config.evaluation.freq, right)


def _validate_guidance_interval(config: Config) -> None:
    interval = config.sampling.guidance_interval
    if len(interval) != 2 or not 0 <= interval[0] <= interval[1] <= 1:
        right = "must be two numbers, 0 <= from <= to <= 1"
        raise option_error("sampling.guidance_interval", interval, right)


def _validate_activation_checkpoint(config: Config) -> None:
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isascii() and option.isdigit() and int(option) >= 1):
        right = "must be an integer of at least 1, or op"
        raise option_error("activation_checkpoint.selective_ac_option", option, right)


def validate_training_parts(config: Config) -> None:
    """The rules of parts that only training uses: optimizer, schedule, meters. Their files import torch."""
    option = "optimizer.name"
    found, options = resolve(OPTIMIZERS, option, config.optimizer.name)
    check_options(found, option, config.optimizer.name, num_arguments=1, options=options)
    option = "lr_scheduler.schedule"
    schedule = create(SCHEDULES, option, config.lr_scheduler.schedule, config.lr_scheduler)
    for step in (1, config.lr_scheduler.warmup_steps + 1, config.training.steps):
        schedule.rate(step, steps=config.training.steps)  # refuses what is not a rate
    for text in config.metrics.meters:
        meter, options = resolve(METERS, "metrics.meters", text)
        check_options(meter, "metrics.meters", text, num_arguments=1, options=options)


def _validate_plug_ins(config: Config) -> None:
    """Import the user's own classes and functions, and check what they are."""
    if config.model.name not in MODELS:
        resolve(ARCHITECTURES, "model.name", config.model.name)
    resolve(BLOCKS, "model.block", config.model.block)


def _validate_objective(config: Config) -> None:
    """Rules of the objective itself, of its sampler and ingredients, and of context parallelism."""
    values, defaults = flatten(config), flatten(Config())
    changed = {option for option, value in values.items() if value != defaults[option]}
    objective, _ = resolve(OBJECTIVES, "diffusion.objective", config.diffusion.objective)
    method = objective.sampler_method
    sampler = type(create(SAMPLERS, "sampling.sampler", config.sampling.sampler))
    base = pkgutil.resolve_name(str(SAMPLERS.base))
    if not hasattr(base, method):
        right = f"has sampler_method {method}, which no sampler has; must be flow or levels"
        raise option_error("diffusion.objective", config.diffusion.objective, right)
    if not overrides(sampler, method, base):
        able = [name for name in SAMPLERS if overrides(registered(SAMPLERS, name), method, base)]
        right = f"does not work with {config.diffusion.objective}; must be {', '.join(able)}"
        raise option_error("sampling.sampler", config.sampling.sampler, right)
    _raise_first(config, objective.option_mistakes(config, changed))
    first = pkgutil.resolve_name(str(OBJECTIVES.base))
    if not overrides(objective, "loss", first) and not overrides(objective, "error", first):
        right = "has neither error nor loss; must have one of them"
        raise option_error("diffusion.objective", config.diffusion.objective, right)
    owner = config.diffusion.objective if overrides(objective, "loss", first) else None  # of the loss
    for text in config.diffusion.ingredients:
        ingredient, _ = resolve(INGREDIENTS, "diffusion.ingredients", text)
        has_loss = overrides(ingredient, "loss", first)
        if owner == config.diffusion.objective or (owner and has_loss):
            right = f"{owner} has a loss of its own, which {entry_name(text)} cannot change; leave one of them out"
            raise option_error("diffusion.ingredients", config.diffusion.ingredients, right)
        owner = entry_name(text) if has_loss else owner
        _raise_first(config, ingredient.mistakes(config, objective))
    if config.training.context_parallel_degree > 1:
        _raise_first(config, pkgutil.resolve_name(CONTEXT_PARALLEL).option_mistakes(config))


def _raise_first(config: Config, mistakes: Iterable[tuple[str, str]]) -> None:
    for option, right in mistakes:
        raise option_error(option, attrgetter(option)(config), right)
