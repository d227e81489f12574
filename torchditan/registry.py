# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The implementations behind option values. One line adds an objective, a block, a metric ... (docs/extending.md).

A line has the form `"value": "module:name"`. The module is imported only for a job with that value, so this file does
not import torch. config/options.py takes the choices of its options from it.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

from torchditan.errors import ConfigError, did_you_mean, first_line, option_error


class Registry(dict[str, str]):
    """name -> "module:name", or the class or function itself.

    An option that it serves also takes `module:name` of the user's own, and the names of installed plug-ins: packages
    with entry points of the group `torchditan.samplers` and so on.

    Args:
        group: of the entry points.
        entries: those of this package.
        base: the class that entries inherit from, as "module:name"; None for functions.
    """

    def __init__(self, group: str, entries: Mapping[str, str], *, base: str | None = None) -> None:
        super().__init__(entries)
        self.group = group
        self.base = base

    def place(self, name: str) -> str | None:
        """`module:name` of an entry, of an installed plug-in, or of the user's own; None for an unknown name."""
        if (place := self.get(name)) is not None:
            return place
        if ":" in name:
            return name
        return installed_plug_ins(self.group).get(name)

    def names(self) -> list[str]:
        """Those of its entries and of installed plug-ins."""
        return [*self, *installed_plug_ins(self.group)]


@functools.lru_cache(maxsize=64)
def installed_plug_ins(group: str) -> dict[str, str]:
    """name -> `module:name` of the entry points of a group."""
    from importlib.metadata import entry_points  # slow, and seldom needed

    return {entry.name: entry.value for entry in entry_points(group=group)}


OBJECTIVES = Registry(
    "torchditan.objectives",
    {
        "flow_matching": "torchditan.diffusion.flow_matching:FlowMatching",
        "ddpm": "torchditan.diffusion.ddpm:DDPM",
        "imf": "torchditan.diffusion.mean_flow:MeanFlow",
    },
    base="torchditan.diffusion.objectives:Objective",
)
"""`diffusion.objective`: classes that follow `torchditan.diffusion.objectives.Objective`."""

INGREDIENTS = Registry(
    "torchditan.ingredients",
    {
        "cosine_velocity": "torchditan.extras.methods.cosine_velocity:CosineVelocity",
        "irepa": "torchditan.extras.methods.repa:IREPA",
        "repa": "torchditan.extras.methods.repa:REPA",
    },
    base="torchditan.diffusion.objectives:Ingredient",
)
"""`diffusion.ingredients`: subclasses of `torchditan.diffusion.objectives.Ingredient`."""

SAMPLERS = Registry(
    "torchditan.samplers",
    {
        "euler": "torchditan.diffusion.samplers:Euler",
        "heun": "torchditan.diffusion.samplers:Heun",
        "dpmpp_2m": "torchditan.diffusion.dpm_solver:DPMSolver2M",
        "ddim": "torchditan.diffusion.samplers:DDIM",
        "ancestral": "torchditan.diffusion.samplers:Ancestral",
    },
    base="torchditan.diffusion.samplers:Sampler",
)
"""`sampling.sampler`: subclasses of `torchditan.diffusion.samplers.Sampler`."""

JOB_PARTS = {
    "model.name": "torchditan.extras.published.families:build_published_spec",  # of a published model
    "model.text": "torchditan.extras.captions.dataset:open_captions",
    "autoencoder.name": "torchditan.extras.latents.latent_space:build_sample_space",
    "training.batch_size": "torchditan.extras.ablation.autotune:resolve_batch_size",  # of "auto"
    "training.context_parallel_degree": "torchditan.distributed.context_parallel:option_mistakes",
    "checkpoint.initial_load_path": "torchditan.extras.weights.initial:load_initial_weights",
    "lora.initial_load_path": "torchditan.extras.weights.initial:identity_of",  # of the LoRA that a LoRA starts from
    "evaluation.freq": "torchditan.extras.evaluation.during_training:TrainingEvaluation",
    "memory": "torchditan.extras.planner.plan:plan_run",  # no option: a line before the first step
}
"""Option, or a name of our own -> what a job calls. With the plug-ins in the tables below, it is the only link from the
core to `extras/`."""


def job_part(option: str) -> Any:
    """Import the function of `JOB_PARTS`.

    Raises:
        ConfigError: `torchditan.extras` is not installed.
    """
    try:
        return pkgutil.resolve_name(JOB_PARTS[option])
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("torchditan.extras"):
            raise
        raise ConfigError(f"{option}: needs torchditan.extras, which is not installed") from None


LAUNCHERS = Registry(
    "torchditan.launchers",
    {
        "local": "torchditan.extras.ablation.launch:LocalLauncher",
        "slurm": "torchditan.extras.ablation.launch:SlurmLauncher",
    },
    base="torchditan.extras.ablation.launch:Launcher",
)
"""`--launcher` of `torchditan ablate`: subclasses of `torchditan.extras.ablation.launch.Launcher`."""

BLOCKS = Registry(
    "torchditan.blocks",
    {
        "dit": "torchditan.models.dit:DiTBlock",
        "joint": "torchditan.models.joint_block:JointBlock",
    },
    base="torchditan.models.dit:Block",
)
"""`model.block`: subclasses of `torchditan.models.dit.Block`."""

OPTIMIZERS = Registry(
    "torchditan.optimizers",
    {
        "AdamW": "torchditan.optim.optimizers:adamw",
        "AdamW8bit": "torchditan.optim.adamw_8bit:adamw_8bit",
        "Muon": "torchditan.optim.muon:muon",
    },
)
"""`optimizer.name`: functions from the `[optimizer]` options to a list of `ParameterGroup` (optim/optimizers.py)."""

SCHEDULES = Registry(
    "torchditan.schedules",
    {
        "constant": "torchditan.optim.schedules:Constant",
        "cosine": "torchditan.optim.schedules:Cosine",
        "linear": "torchditan.optim.schedules:Linear",
        "wsd": "torchditan.optim.schedules:WarmupStableDecay",
    },
    base="torchditan.optim.schedules:Schedule",
)
"""`lr_scheduler.schedule`: subclasses of `torchditan.optim.schedules.Schedule`."""

METERS = Registry(
    "torchditan.meters",
    {
        "update_norm": "torchditan.optim.meters:UpdateNorm",
    },
    base="torchditan.optim.meters:Meter",
)
"""`metrics.meters`: subclasses of `torchditan.optim.meters.Meter`."""

ARCHITECTURES = Registry(
    "torchditan.architectures",
    {
        "dit": "torchditan.models:build_dit_spec",
        "ddt": "torchditan.extras.methods.ddt:build_ddt_spec",
    },
)
"""`model.name`: functions from the `[model]` options to the `ModelSpec` of an architecture. Options may follow the
name."""


class Families(Registry):
    """Also contains the classes of installed plug-ins and of `module:Class`. A function is an architecture."""

    def __contains__(self, name: object) -> bool:
        """Imports what is not from this package.

        Raises:
            ConfigError: that cannot be imported, or is a class of something else.
        """
        if not isinstance(name, str) or super().__contains__(name) or name in ARCHITECTURES or self.place(name) is None:
            return super().__contains__(name)
        found, _ = resolve(ARCHITECTURES, "model.name", name)
        return isinstance(found, type) and resolve(self, "model.name", name)[0] is found


FAMILIES = Families(
    "torchditan.architectures",
    {
        "flux": "torchditan.extras.published.flux:Flux",
        "sd3": "torchditan.extras.published.sd3:SD3",
        "sdxl": "torchditan.extras.published.sdxl:SDXL",
        "mochi": "torchditan.extras.published.mochi:Mochi",
        "hunyuan_video": "torchditan.extras.published.hunyuan_video:HunyuanVideo",
        "wan": "torchditan.extras.published.wan:Wan",
        "qwen_image": "torchditan.extras.published.qwen_image:QwenImage",
        "flux2": "torchditan.extras.published.flux2:Flux2",
        "z_image": "torchditan.extras.published.z_image:ZImage",
    },
    base="torchditan.extras.published.base:PublishedModel",
)
"""`model.name`: families of published models, subclasses of `PublishedModel` (docs/extending.md)."""


class Registries(ChainMap[str, str]):
    """Several registries as one."""

    def place(self, name: str) -> str | None:
        return next((place for part in self.maps if (place := cast(Registry, part).place(name)) is not None), None)

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for part in self.maps for name in cast(Registry, part).names()))


MODELS = Registries(FAMILIES, ARCHITECTURES)
"""All values of `model.name`, those of models/ first."""

METRICS = Registry(
    "torchditan.metrics",
    {
        "classifier": "torchditan.extras.evaluation.classifier:ClassifierAccuracy",
        "clip": "torchditan.extras.evaluation.clip_score:ClipScore",
        "dinov2": "torchditan.extras.evaluation.dinov2:DINOv2Quality",
        "effnet": "torchditan.extras.evaluation.quality:EffNetQuality",
        "inception": "torchditan.extras.evaluation.quality:InceptionQuality",
        "prompts": "torchditan.extras.evaluation.scene_prompts:ScenePrompts",
    },
)
"""`--metrics` of torchditan evaluate: classes that follow `torchditan.extras.evaluation.metric.Metric`. Subclasses of
`torchditan.extras.evaluation.quality.Quality` give the Fréchet distance and its other figures over an extractor of
yours."""

TEXT_ENCODERS = Registry(
    "torchditan.text_encoders",
    {
        "auto": "torchditan.extras.captions.encode:AutomaticEncoder",
        "pipeline": "torchditan.extras.captions.encode:PipelineEncoders",
        "transformers": "torchditan.extras.captions.single_encoder:SingleEncoder",
        "wordllama": "torchditan.extras.captions.static_embeddings:StaticEmbeddings",
    },
    base="torchditan.extras.captions.encode:TextEncoder",
)
"""`text_encoder.name`: subclasses of `torchditan.extras.captions.encode.TextEncoder`."""

DATASETS = Registry(
    "torchditan.datasets",
    {
        "captions": "torchditan.datasets.captions:build",
        "cifar10": "torchditan.datasets.cifar10:build",
        "digits": "torchditan.datasets.digits:build",
        "dummy": "torchditan.datasets.dummy:build",
        "earth": "torchditan.datasets.earth:build",
        "folder": "torchditan.datasets.folder:build",
        "imagenet": "torchditan.datasets.imagenet:build",
        "imagenet_hub": "torchditan.datasets.imagenet:build_hub",
        "latents": "torchditan.datasets.latents:build",
        "scenes": "torchditan.datasets.scenes:build",
        "webdataset": "torchditan.datasets.webdataset:build",
    },
)
"""`dataset.dataset_name`: functions `build`, as data/__init__.py describes."""

AUTOENCODERS = Registry(
    "torchditan.autoencoders",
    {
        "haar": "torchditan.extras.autoencoders.haar:open_haar",
        "cosmos": "torchditan.extras.autoencoders.cosmos:open_cosmos",
        "diffusers": "torchditan.extras.autoencoders.published:open_published",
        **dict.fromkeys(
            ("sd-vae", "sdxl", "sd3", "flux", "flux2", "dc-ae"),
            "torchditan.extras.autoencoders.published:open_published",
        ),
        **dict.fromkeys(("cosmos-ci8x8", "cosmos-ci16x16"), "torchditan.extras.autoencoders.cosmos:open_cosmos"),
        "rae": "torchditan.extras.autoencoders.rae:open_rae",
    },
)
"""`autoencoder.name`: functions from `[autoencoder]` to an `Autoencoder`. extras/autoencoders/catalogue.py has the
published ones."""

FORMATS = Registry(
    "torchditan.formats",
    {
        "dit": "torchditan.extras.weights.formats.dit:convert_dit",
        "sit": "torchditan.extras.weights.formats.dit:convert_sit",
        "repa": "torchditan.extras.weights.formats.dit:convert_repa",
        "lightningdit": "torchditan.extras.weights.formats.lightningdit:convert",
        "ddt": "torchditan.extras.weights.formats.ddt:convert_ddt",
        "dit_dh": "torchditan.extras.weights.formats.ddt:convert_dit_dh",
        "diffusers": "torchditan.extras.weights.formats.diffusers_dit:convert",
    },
)
"""`--format` of an import: functions `convert(source: Weights, **given) -> Weights` (docs/extending.md)."""


def registered(registry: Registry, text: str) -> Any:
    """Import the entry of this name; see `Registry.place`. Options after the name are ignored."""
    place = registry.place(entry_name(text))
    assert place is not None, f"{text}: the configuration was not checked"
    return place if callable(place) else pkgutil.resolve_name(place)


def entry_name(text: str) -> str:
    """The name in the value of an option: `wsd` of `wsd power=2`."""
    return text.split()[0] if text.split() else ""


def resolve(registry: Registry, option: str, text: str) -> tuple[Any, dict[str, Any]]:
    """Import an entry and read the options after its name: `wsd power=2`.

    Args:
        registry: one of the tables above.
        option: name of the option that has the value, for messages.
        text: its value: a name in the registry or `module:name`, then `key=value` with numbers, true, false, none,
            lists such as 2,5, or words.

    Raises:
        ConfigError: an unknown name, a module that cannot be imported, something else than a subclass of the base, or
            text that is not `key=value`.
    """
    name = entry_name(text)
    options: dict[str, Any] = {}
    for word in text.split()[1:]:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise option_error(option, text, f"{word} must be key=value, such as weight=0.1")
        if key in options:
            raise option_error(option, text, f"has {key} twice; leave one out")
        options[key] = parse_value(value)
    if registry.place(name) is None:
        known = f"one of {', '.join(registry)}, or " if registry else ""
        raise option_error(option, text, f"must be {known}module:name{did_you_mean(name, registry.names())}")
    try:
        found = registered(registry, name)
    except Exception as error:  # whatever a module of the user's raises
        line = f"{type(error).__name__}: {first_line(error)}"
        right = f"cannot be imported ({line}); must be module:name on the Python path, which PYTHONPATH extends"
        if name.partition(":")[0].endswith(".py"):
            right = f"must be {name.replace('.py:', ':', 1)}, without .py"
        raise option_error(option, text, right) from None
    if registry.base is None:
        if not callable(found):
            raise option_error(option, text, f"is a {type(found).__name__}; must be a function or a class")
        return found, options
    base = pkgutil.resolve_name(registry.base)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise option_error(option, text, f"must be a subclass of {base.__module__}.{base.__name__}")
    if missing := [method for method in getattr(found, "REQUIRED", ()) if not overrides(found, method, base)]:
        raise option_error(option, text, f"lacks {missing[0]}, which {base.__name__} does not define")
    return found, options


def overrides(kind: type, method: str, base: type) -> bool:
    """Whether a subclass has a method of its own; see `REQUIRED` of the base."""
    return _plain(getattr(kind, method, None)) is not _plain(getattr(base, method, None))


def _plain(method: Any) -> Any:
    """The function of a class method, which differs from access to access."""
    return getattr(method, "__func__", method)


def objective_kinds(objective: str, ingredients: Sequence[str]) -> list[Any]:
    """The classes of `diffusion.objective` and `diffusion.ingredients`."""
    return [registered(OBJECTIVES, objective), *(registered(INGREDIENTS, text) for text in ingredients)]


def create(registry: Registry, option: str, text: str, *args: Any) -> Any:
    """Import an entry, and call it with these arguments and the options after its name: `resolve` and `build`."""
    found, options = resolve(registry, option, text)
    return build(found, option, text, *args, **options)


def build(
    found: Callable[..., Any],
    option: str,
    text: str,
    *args: Any,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Call what `resolve` found with the options after its name.

    Args:
        given: keyword arguments that are not options.

    Raises:
        ConfigError: it does not have one of these options.
    """
    given = given or {}
    check_options(found, option, text, num_arguments=len(args), given=given, options=options)
    try:
        return found(*args, **given, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and not text.split()[1:]:
            raise  # a fault of the code, which needs its traceback
        line = f"{type(error).__name__}: {first_line(error)}"
        raise option_error(option, text, f"does not accept these options: {line}") from error


def check_options(
    found: Callable[..., Any],
    option: str,
    text: str,
    *,
    num_arguments: int,
    options: Mapping[str, Any],
    given: Collection[str] = (),
) -> None:
    """Refuse options that a function or class does not have.

    Args:
        num_arguments: number of leading parameters that are not options.
        given: names of other parameters that are not options.
    """
    signature = inspect.signature(found)
    try:
        signature.bind(*[None] * num_arguments, **{**dict.fromkeys(given), **options})
    except TypeError as error:
        known = ", ".join(name for name in [*signature.parameters][num_arguments:] if name not in given) or "none"
        raise option_error(option, text, f"{error}; the options of {entry_name(text)}: {known}") from None


def parse_value(text: str) -> Any:
    """A number, true, false, none, a list such as 2,5, or else a word, from text."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return [parse_value(part) for part in text.split(",") if part]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
