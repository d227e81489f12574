# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Rules over several options, a function for each section. Rules for one option are at its field in options.py.

A rule yields the option and what would be right. Families of published models and objectives define their own rules.
Their files import torch, so these rules come last.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from torchditan.config.declarations import Idle
from torchditan.config.options import FLAVORS_OF, Config, flatten
from torchditan.config.schema import check_declared, options
from torchditan.errors import did_you_mean, has_secret, option_error
from torchditan.registry import (
    ARCHITECTURES,
    BLOCKS,
    FAMILIES,
    INGREDIENTS,
    METERS,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    SAMPLERS,
    SCHEDULES,
    Registry,
    check_options,
    create,
    entry_name,
    job_part,
    overrides,
    registered,
    resolve,
)

Mistakes = Iterator[tuple[str, str]]
"""Options, each with what would be right."""


def validate(config: Config) -> None:
    """Check all rules of a stored configuration that depend only on the options. Parts of training are not opened."""
    validate_values(config)
    validate_parts(config, is_training=False)


def validate_values(config: Config) -> None:
    """The rules that do not import torch."""
    for rules in (_secrets, _values, _needs, *_SECTIONS):
        _raise_first(config, rules(config))


def validate_parts(config: Config, *, is_training: bool = True) -> None:
    """The rules of a published model's family, of the objective, and of other parts whose files import torch.

    Args:
        is_training: also those of parts that only training uses.
    """
    name = config.model.name
    family = registered(FAMILIES, name) if name in FAMILIES else None  # None: a model in models/
    if family is not None:
        _raise_first(config, _flavor(config, family.flavors, whose=f" for {name}"))
        _raise_first(config, family.option_mistakes(config))
    if not getattr(family, "embeds_guidance", False):
        for option in ("diffusion.embedded_guidance", "sampling.embedded_guidance"):
            if (value := attrgetter(option)(config)) != options()[option].default:
                raise option_error(option, value, f"{name} does not embed a guidance scale; leave it out")
    if name not in MODELS:
        architecture, values = resolve(ARCHITECTURES, "model.name", name)
        check_declared(architecture, "model.name", name, values)
    resolve(BLOCKS, "model.block", config.model.block)
    _validate_objective(config)
    if is_training:
        validate_training_parts(config)


def missing_for_effect(config: Config, name: str, *, device: str | None = None) -> str | None:
    """What an option needs to have an effect under these settings; None if it has one, or on an unknown device."""
    needs = options()[name].needs if name in options() else ()
    return next((need.what for need in needs if need.is_missing(config, device=device)), None)


def _secrets(config: Config) -> Mistakes:
    for option, value in flatten(config).items():
        if any(isinstance(text, str) and has_secret(text) for text in (value if isinstance(value, list) else [value])):
            yield (
                option,
                "has a password, a key or a token, which the run would store; leave it out and set environment "
                "variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN), or fsspec's configuration",
            )


def _values(config: Config) -> Mistakes:
    for name, value in flatten(config).items():
        if not options()[name].allows(value):
            yield name, options()[name].expected


def _needs(config: Config) -> Mistakes:
    values = flatten(config)
    for name, option in options().items():
        for need in option.needs if values[name] != option.default else ():
            if not isinstance(need, Idle) and need.is_missing(config):
                default = f", or set its default, {option.shown_default}" if option.shown_default else ""
                yield name, f"needs {need.what}{_choices_of(need.what)}; leave it out{default}"


def _choices_of(what: str) -> str:
    """` (in_context, cross_attention, joint)`: the values that set an option."""
    choices = options()[what].choices if what in options() else ()
    return f" ({', '.join(choices)})" if choices else ""


def _model(config: Config) -> Mistakes:
    if (name := entry_name(config.model.name)) in FLAVORS_OF:
        yield from _flavor(config, FLAVORS_OF[name])
    if config.model.timestep_frequencies in ("ddt", "gaussian") and config.model.timestep_scale != 1:
        yield "model.timestep_scale", f"must be 1 with model.timestep_frequencies {config.model.timestep_frequencies}"


def _flavor(config: Config, flavors: Collection[str], *, whose: str = "") -> Mistakes:
    flavor = config.model.flavor
    if flavor not in flavors:
        yield "model.flavor", f"must be one of {', '.join(flavors)}{whose}{did_you_mean(flavor, flavors)}"


def _dataset(config: Config) -> Mistakes:
    is_published = config.model.name in FAMILIES  # whose family checks both
    position = config.model.position or ("sincos" if config.model.preset == "official" else "rope")
    if config.dataset.aspect_buckets and not is_published and position != "rope":
        right = f"{position} positions are a table for one size; set --model.position rope, or leave it out"
        yield "dataset.aspect_buckets", right


def _training(config: Config) -> Mistakes:
    global_batch_size, batch_size = config.training.global_batch_size, config.training.batch_size
    if isinstance(batch_size, int) and (global_batch_size or 0) % batch_size:
        right = f"must be a multiple of training.batch_size = {batch_size} times the number of ranks"
        yield "training.global_batch_size", right
    if config.dataset.streaming and config.training.on_nonfinite != "stop":
        yield "training.on_nonfinite", "skips data, which dataset.streaming cannot do; must be stop"


def _optimizer(config: Config) -> Mistakes:
    if entry_name(config.optimizer.name) == "Muon" and config.model.name in FAMILIES:
        right = "knows the matrices of our own blocks only; must be AdamW or AdamW8bit for a published model"
        yield "optimizer.name", right
    if "adjust_lr_fn=original" in config.optimizer.name.split() and config.optimizer.adamw_lr is None:
        yield "optimizer.adamw_lr", "must be set with adjust_lr_fn=original, whose lr does not suit AdamW"
    if config.optimizer.lr == 0 and config.optimizer.adamw_lr is not None:
        yield "optimizer.adamw_lr", "needs an optimizer.lr greater than 0"


def _checkpoint(config: Config) -> Mistakes:
    if config.checkpoint.enable_checkpoint and not config.checkpoint.save_final:
        right = "checkpoint.enable_checkpoint saves the last step too; leave it out, or set both to false"
        yield "checkpoint.save_final", right
    if config.optimizer.name == "AdamW8bit" and config.checkpoint.async_mode != "disabled":
        right = "torch cannot stage the tensors of AdamW8bit for a background save; must be disabled"
        yield "checkpoint.async_mode", right


def _validation(config: Config) -> Mistakes:
    for option in ("validation.freq", "evaluation.freq"):
        if config.dataset.streaming and attrgetter(option)(config):
            yield option, "reads held-out images in a different order, which dataset.streaming cannot do; must be 0"


def _evaluation(config: Config) -> Mistakes:
    if config.evaluation.freq == 0:
        return
    if config.model.name in FAMILIES:
        yield "evaluation.freq", "evaluates no published models, whose samples validation compares; must be 0"
    if config.model.text is not None and (config.autoencoder.is_given or config.dataset.aspect_buckets):
        yield "evaluation.freq", "evaluates models of captions on pixels of one size only; must be 0 for others"


_SECTIONS = (_model, _dataset, _training, _optimizer, _checkpoint, _validation, _evaluation)


def validate_training_parts(config: Config) -> None:
    """The rules of parts that only training uses: optimizer, schedule, meters. Their files import torch."""
    _entry(OPTIMIZERS, "optimizer.name", config.optimizer.name)
    option = "lr_scheduler.schedule"
    schedule = create(SCHEDULES, option, config.lr_scheduler.schedule, config.lr_scheduler)
    for step in (1, config.lr_scheduler.warmup_steps + 1, config.training.steps):
        schedule.rate(step, steps=config.training.steps)  # refuses what is not a rate
    for text in config.metrics.meters:
        _entry(METERS, "metrics.meters", text)


def _entry(registry: Registry, option: str, text: str) -> None:
    """Check an entry that is called with one argument, and the options after its name."""
    found, values = resolve(registry, option, text)
    check_options(found, option, text, num_arguments=1, options=values)
    check_declared(found, option, text, values)


def _validate_objective(config: Config) -> None:
    """Rules of the objective itself, of its sampler and ingredients, and of context parallelism."""
    values, defaults = flatten(config), flatten(Config())
    changed = {option for option, value in values.items() if value != defaults[option]}
    objective, _ = resolve(OBJECTIVES, "diffusion.objective", config.diffusion.objective)
    method = objective.sampler_method
    sampler = type(create(SAMPLERS, "sampling.sampler", config.sampling.sampler))
    base = pkgutil.resolve_name(str(SAMPLERS.base))
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
        _raise_first(config, job_part("training.context_parallel_degree")(config))


def _raise_first(config: Config, mistakes: Iterable[tuple[str, str]]) -> None:
    for option, right in mistakes:
        raise option_error(option, attrgetter(option)(config), right)
