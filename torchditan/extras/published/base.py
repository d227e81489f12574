# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A published transformer behind our interface: the parts that all families of models share.

Notable:
- a family is a small subclass of `PublishedModel`. It defines its sizes, its caption embeddings, and one `predict` that
  calls the transformer as its own pipeline does. docs/extending.md has the steps;
- diffusers builds the model with its parameters on the meta device and its buffers on the CPU. For 12B parameters this
  takes a second. Weights follow one tensor at a time, read from files or drawn from (seed, name) as for our own models;
- inputs, above all the timestep, stay float32 up to the first layer that has weights. Those layers, outside the blocks,
  cast their inputs to the dtype that their weights have during training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from torchditan.config.optional_libraries import import_optional
from torchditan.config.options import Config
from torchditan.errors import ConfigError, first_line
from torchditan.models.initialization import draw_normal, draw_xavier_uniform
from torchditan.models.spec import Condition, TensorSpec


@dataclass(frozen=True)
class Flavor:
    """One published size of a family."""

    hub_name: str
    """Pipeline on the Hugging Face hub."""
    config: dict[str, Any]
    """Arguments of the transformer's class, as its config.json has them."""
    text_length: int
    """Number of tokens per caption."""
    shift: float | None = None
    """Shift of its pipeline's timesteps. None: the shift depends on the sample size."""
    pipeline_class: str | None = None
    """Its pipeline in diffusers, if it differs from that of its family."""
    is_distilled: bool = False
    """Whether its weights are distilled to a few steps and have no base; a LoRA needs `lora.assistant_path`."""
    resolution: str | None = None
    """Default resolution of grids, height x width x frames: `480x832x81`. None: 64 x 64, two latent frames."""
    downsampling: int | None = None
    """Pixels per latent cell, along height and width, if they differ from those of its family."""


class PublishedModel(nn.Module):
    """A transformer of diffusers: `forward(x_t, t, cond)`, with t = 0 noise and t = 1 data, or `model_time` of t.

    Args:
        transformer: result of `build_transformer`.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("name", "model_class", "pipeline_class", "flavors", "tensors")
    """What a subclass must define."""
    name: ClassVar[str]
    """Name of the family: the value of `model.name`, unless that is `module:Class`."""
    model_class: ClassVar[str]
    """Class of the transformer in diffusers."""
    pipeline_class: ClassVar[str]
    """Class of the pipeline. Its text encoders compute the conditions, and it loads exported LoRAs."""
    subfolder: ClassVar[str] = "transformer"
    """Folder of the transformer in a saved pipeline."""
    objective: ClassVar[str] = "flow_matching"
    """Training objective, a value of `diffusion.objective`."""
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """Attribute names of the transformer that hold the repeated blocks."""
    latent_downsampling: ClassVar[int] = 8
    """Pixels per latent cell, along height and width; `Flavor.downsampling` overrides it."""
    temporal_downsampling: ClassVar[int] = 1
    """Frames per latent frame."""
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    """Layers that a LoRA adapts by default."""
    embeds_guidance: ClassVar[bool] = False
    """Whether flavors with `guidance_embeds` in their config take a guidance scale."""
    original_layers: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Publisher's layer name (* for the number of a block) -> layers of diffusers that form its rows, in order.
    LoRAs with kohya's or ComfyUI's names need this table."""
    dropped_layers: ClassVar[tuple[str, ...]] = ()
    """Prefixes of the publisher's layer names that some reader drops from a LoRA, so that no file has them."""
    lora_readers: ClassVar[Mapping[str, tuple[str, ...]]] = {"diffusers": ("diffusers",)}
    """Format of an exported LoRA -> programs that read all of it."""
    caption_tokenizer: ClassVar[str | None] = "tokenizer"
    """Folder of the pipeline's tokenizer that cuts captions to `text_length`. None: it puts them into a template."""
    sets_hooks: ClassVar[bool] = False
    """Whether `predict` sets hooks (`called_with`), which torch.compile cannot trace."""
    kept: ClassVar[frozenset[str]] = frozenset()
    """Tensors of the condition that are kept when the caption is dropped."""
    flavors: ClassVar[dict[str, Flavor]]
    init_weights: Callable[[int], None]
    """Fills every parameter and buffer from files or from a seed; set by `Recipe.build`."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer: Any = transformer
        self._filled_buffers = dict(self.named_buffers())
        in_blocks = {module for block in self.blocks() for module in block.modules()}
        for module in set(self.modules()) - in_blocks:
            if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
                module.register_forward_pre_hook(_cast_to_weight)

    @classmethod
    def option_mistakes(cls, config: Config) -> Iterator[tuple[str, str]]:
        """(option, what would be right) for each option that does not fit a published model."""
        if config.diffusion.objective != cls.objective:
            right = f"{cls.name} was trained with {cls.objective}; set --diffusion.objective {cls.objective}"
            yield "diffusion.objective", right
        if config.lora.rank and config.float8.enable_float8_linear:
            right = "applies only to trained layers, and a LoRA freezes them; must be false"
            yield "float8.enable_float8_linear", right
        for name, _, value in (text.partition("=") for text in config.model.overrides):
            if not (name.isidentifier() and value):
                yield "model.overrides", "must be NAME=VALUE, for example num_layers=2"

    @classmethod
    def latent_channels(cls, config: Mapping[str, Any]) -> int:
        """Channels of a sample for this config of the transformer."""
        return int(config["in_channels"])

    @classmethod
    def downsampling_of(cls, flavor: str) -> int:
        """Pixels per latent cell of a flavor, along height and width."""
        return cls.flavors[flavor].downsampling or cls.latent_downsampling

    @classmethod
    def tensors(
        cls, config: Mapping[str, Any], *, sample_shape: tuple[int, ...], text_length: int
    ) -> dict[str, TensorSpec]:
        """Tensors that a caption is encoded to, by their names in the pipeline's `encode_prompt`."""
        raise NotImplementedError

    @classmethod
    def tensor_names(cls, flavor: str) -> set[str]:
        """Names of the condition tensors of a flavor."""
        found, sizes = cls.flavors[flavor], cls.flavors[flavor].config
        shape = (cls.latent_channels(sizes), *cls.patch_size(sizes))  # of one token
        return set(cls.tensors(sizes, sample_shape=shape, text_length=found.text_length))

    @classmethod
    def patch_size(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Latent cells per token, along each dimension of a sample after the channels."""
        return (2, 2)

    @classmethod
    def shift(cls, flavor: Flavor, *, num_tokens: int) -> float:
        """Shift of the training timesteps for this number of tokens, and of sampling without a `sampling_shift`."""
        assert flavor.shift is not None
        return flavor.shift

    @classmethod
    def sampling_shift(cls, *, num_tokens: int) -> Callable[[int], float] | None:
        """Number of steps -> shift of its pipeline, where that is another one than in training."""
        return None

    @classmethod
    def encode_captions(cls, pipeline: Any, captions: list[str], *, max_length: int) -> dict[str, torch.Tensor]:
        """Embeddings of captions from the text encoders of the pipeline, (n, ...) each, by the names of `tensors`.

        Args:
            pipeline: of `pipeline_class`, without transformer and autoencoder.
            captions: n texts.
            max_length: tokens of each.
        """
        raise NotImplementedError

    @classmethod
    def encode_samples(
        cls, pipeline: Any, encode: Callable[[torch.Tensor], torch.Tensor], samples: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Tensors that the samples themselves add to the condition, those of `kept`; (n, ...) each.

        Args:
            pipeline: of the flavor's class, with only its image encoders.
            encode: pixels (n, 3, F, H, W) in [-1, 1] -> normalised latents.
            samples: pixels (n, 3, F, H, W) in [-1, 1].
        """
        raise NotImplementedError

    @classmethod
    def takes_videos(cls) -> bool:
        """Whether samples are (C, F, H, W) instead of (C, H, W)."""
        return len(cls.patch_size(next(iter(cls.flavors.values())).config)) == 3

    def blocks(self) -> nn.ModuleList:
        """The repeated blocks, in execution order."""
        return nn.ModuleList(block for name in self.block_lists for block in getattr(self.transformer, name))

    def predict(self, x: torch.Tensor, noise_level: torch.Tensor, cond: Condition) -> torch.Tensor:
        """Velocity from data to noise, noise - x, in the transformer's own sign convention.

        Args:
            x: (B, C, [F,] H, W) float32.
            noise_level: (B,) float32; 1 is noise and 0 is data. Schedulers call it sigma.
            cond: the tensors that `tensors` declares, and `guidance` (B,) if the model embeds a guidance scale.
        """
        raise NotImplementedError

    def forward(self, x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        """x - noise (B, C, [F,] H, W) from x_t of that shape and t (B,) in [0, 1]."""
        return -self.predict(x_t, 1 - t, cond)

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Set the buffers that `to_empty` left uninitialised and no file contains: position tables."""
        for name, buffer in self.named_buffers():
            buffer.copy_(self._filled_buffers[name])


def draw_weight(seed: int, name: str, shape: torch.Size, *, is_norm: bool) -> torch.Tensor:
    """Initial value for models without published weights: ones for norms, zeros for biases, Xavier for the rest."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if is_norm and len(shape) == 1:
        return torch.ones(shape)
    if len(shape) < 2:
        return draw_normal(seed, name, shape, std=0.02)
    return draw_xavier_uniform(seed, name, shape)


def build_transformer(model_class: str, config: Mapping[str, Any]) -> nn.Module:
    """A transformer of diffusers, its parameters on the meta device and its buffers on the CPU.

    Raises:
        ConfigError: diffusers is missing, or does not accept the config.
    """
    diffusers = require("diffusers")
    try:
        with torch.device("cpu"), parameters_on_meta():
            return getattr(diffusers, model_class)(**config)
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        reader = f"{model_class} of diffusers {diffusers.__version__}"
        raise ConfigError(f"model.overrides: {reader} does not accept these sizes: {first_line(error)}") from error


def sizes_of_class(model_class: str) -> dict[str, Any]:
    """Keys that a class of diffusers accepts from a config.json, with their defaults."""
    accepted = inspect.signature(getattr(require("diffusers"), model_class)).parameters
    return {name: parameter.default for name, parameter in accepted.items()}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules created in this context have parameters on meta. Their buffers hold real values."""
    layers = (nn.Linear, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm)
    constructors = {layer: layer.__init__ for layer in layers}
    register_parameter = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register_parameter(module, name, parameter)

    def on_meta(constructor: Any) -> Any:
        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("device", "meta")  # large tensors are never allocated
            constructor(module, *args, **kwargs)

        return construct

    try:
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        for layer, constructor in constructors.items():
            layer.__init__ = on_meta(constructor)  # type: ignore[method-assign]
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        for layer, constructor in constructors.items():
            layer.__init__ = constructor  # type: ignore[method-assign]


@contextmanager
def called_with(module: nn.Module, *first: torch.Tensor) -> Iterator[None]:
    """Context in which `module` gets these first arguments, for transformers that would round the timestep."""
    handle = module.register_forward_pre_hook(lambda _module, inputs: (*first, *inputs[len(first) :]))
    try:
        yield
    finally:
        handle.remove()


def require(module: str) -> ModuleType:
    """Import diffusers, transformers or peft; the error explains how to install them."""
    return import_optional(module, extra="finetune")


def _cast_to_weight(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = module.weight.dtype
    assert isinstance(dtype, torch.dtype)
    if not dtype.is_floating_point:  # an int8 layer computes in the dtype of its input
        return inputs
    return tuple(
        value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in inputs
    )
