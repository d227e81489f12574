# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export a run as a folder that diffusers opens; a run of the native model for DiTPipeline, if its options allow it.

Notable about the native model:
- DiTPipeline has one architecture, one objective and one sampler. A run with other options is refused, with their
  names and the right values;
- its null class is 1000: the label table is written with 1001 rows, our null class last and zeros between;
- the run's autoencoder is copied if DiTPipeline decodes with it as we do. Otherwise the folder has no autoencoder, and
  you pass one to the pipeline;
- `torchditan.extras.weights.formats.diffusers_dit` reads the folder again, to the bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchditan.checkpoint.safetensors_files import TensorToWrite, write_weights
from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import from_dict
from torchditan.config.options import Config
from torchditan.errors import ConfigError, option_error
from torchditan.extras.autoencoders import kind_of
from torchditan.extras.autoencoders.published import FILES as VAE_FILES
from torchditan.extras.autoencoders.published import find_published
from torchditan.extras.latents.latent_space import open_decoder
from torchditan.extras.weights.formats.diffusers_dit import (
    CLASS_NAME,
    EXPORT_FILE,
    LABEL_TABLE,
    NOISE_SCHEDULES,
    PREDICTIONS,
    REQUIRED,
    SCHEDULER_FILE,
    SCHEDULER_LIKE_OURS,
    names_in_diffusers,
)
from torchditan.extras.weights.pipeline_export import INDEX_FILE, WEIGHTS_FILE, ExportedPipeline, export_pipeline
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.models import ModelSpec
from torchditan.models.dit import NORM_EPS, DiTConfig
from torchditan.registry import FAMILIES
from torchditan.run.atomic_files import new_folder

NULL_CLASS = 1000
"""The null class of every DiTPipeline."""

_NEEDED: dict[str, Any] = {
    "conditioning": "adaln",
    "norm_type": "np_layernorm",
    "qk_norm": False,
    "mlp": "gelu",
    "position": "sincos",
    "timestep_scale": 1000.0,
    "timestep_frequencies": "diffusers",
    "block": "dit",
    "patch_bottleneck": 0,
    "text": None,
}
"""Options of [model] that DiTPipeline needs."""
_VERSION = "0.42.0"
"""The version of diffusers that these files were written for and tested with."""
_INDEX = {
    "_class_name": "DiTPipeline",
    "_diffusers_version": _VERSION,
    "scheduler": ["diffusers", "DDIMScheduler"],
    "transformer": ["diffusers", CLASS_NAME],
    "vae": ["diffusers", "AutoencoderKL"],
}
"""model_index.json, without `id2label`."""


def export_to_diffusers(weights: Weights, folder: Path, *, dtype: torch.dtype) -> ExportedPipeline:
    """Write weights in diffusers' layout, atomically: the folder is complete or does not exist.

    Args:
        weights: from `open_model`.
        folder: the folder to create; it must not exist.
        dtype: float32 or bfloat16, of the transformer. Other parts are copied unchanged.

    Raises:
        ConfigError: the run trained a LoRA or a model that diffusers does not have, or `folder` exists or cannot be
            written.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; choose another name")
    assert weights.config is not None
    if from_dict(weights.config).model.name in FAMILIES:
        return export_pipeline(weights, folder, dtype=dtype)
    return _export_dit(weights, folder, dtype=dtype)


def _export_dit(weights: Weights, folder: Path, *, dtype: torch.dtype) -> ExportedPipeline:
    assert weights.config is not None
    config = from_dict(weights.config)
    spec = stored_spec(config)
    mistakes = list(_mistakes(config, spec))
    if mistakes:
        right = f"DiTPipeline needs {', '.join(mistakes)}; must be torchditan"
        raise option_error("--format", "diffusers", right)
    with torch.device("meta"):
        weights.check(spec.build())
    assert isinstance(spec.config, DiTConfig)
    tensors = _tensors(spec.config, weights, dtype)
    vae = _find_vae(config, channels=spec.sample_shape[0])
    described = {"num_classes": spec.config.num_classes, "step": weights.step, "weights": weights.kind}
    with new_folder(folder) as new:
        inner = new if isinstance(vae, str) else new / "transformer"
        inner.mkdir(exist_ok=True)
        _write_json(inner / "config.json", _transformer_config(spec.config))
        write_weights(inner / WEIGHTS_FILE, tensors, {"format": "pt"})
        _write_json(new / SCHEDULER_FILE, _scheduler_config(config))
        _write_json(new / EXPORT_FILE, described)
        if not isinstance(vae, str):
            _copy_vae(vae, new / "vae")
            names = {"id2label": dict(enumerate(weights.class_names))} if weights.class_names else {}
            _write_json(new / INDEX_FILE, {**_INDEX, **names})
    how_to_open, left_out = f'DiTPipeline.from_pretrained("{folder}")', None
    if isinstance(vae, str):
        scheduler = f'DDIMScheduler.from_pretrained("{folder}", subfolder="scheduler")'
        how_to_open, left_out = f'DiTPipeline({CLASS_NAME}.from_pretrained("{folder}"), VAE, {scheduler})', vae
    return ExportedPipeline(how_to_open, left_out, notes=_other_samples(config))


def _mistakes(config: Config, spec: ModelSpec) -> Iterator[str]:
    """`option value (that of the run)` for each option that DiTPipeline does not have."""
    model = spec.config
    if type(model) is not DiTConfig:
        yield f"model.name dit ({config.model.name} here)"
        return
    for option, needed in _NEEDED.items():
        if (value := getattr(model, option)) != needed:
            yield f"model.{option} {_shown(needed)} ({_shown(value)} here)"
    if config.diffusion.objective != "ddpm":
        yield f"diffusion.objective ddpm ({config.diffusion.objective} here)"
    height, width = model.image_size
    if height != width:
        yield f"square samples ({height} x {width} here)"
    if model.num_classes > NULL_CLASS:
        yield f"at most {NULL_CLASS} classes ({model.num_classes} here)"


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value).strip('"')


def _tensors(model: DiTConfig, weights: Weights, dtype: torch.dtype) -> Iterator[TensorToWrite]:
    """All tensors of the diffusers state dict, each with a function that reads it."""
    for name, theirs in names_in_diffusers(model.depth).items():
        shape = weights.shapes.get(name, ())
        for number, their in enumerate(theirs):
            if name == LABEL_TABLE:
                table_shape = (NULL_CLASS + 1, model.width)
                yield TensorToWrite(their, table_shape, dtype, partial(_label_table, model, weights))
            elif ".attn.qkv." in name:
                part_shape = (model.width, *shape[1:])
                yield TensorToWrite(their, part_shape, dtype, partial(_part, weights, name, number))
            else:
                yield TensorToWrite(their, shape, dtype, partial(weights.tensor, name))


def _part(weights: Weights, name: str, number: int) -> Tensor:
    """The weight of queries (0), keys (1) or values (2)."""
    return weights.tensor(name).chunk(3)[number]


def _label_table(model: DiTConfig, weights: Weights) -> Tensor:
    """(1001, D): our classes first, our null class last. A model without classes has zeros."""
    table = torch.zeros(NULL_CLASS + 1, model.width)
    if model.num_classes:
        ours = weights.tensor(LABEL_TABLE)
        table[: model.num_classes], table[NULL_CLASS] = ours[:-1], ours[-1]
    return table


def _transformer_config(model: DiTConfig) -> dict[str, Any]:
    return {
        "_class_name": CLASS_NAME,
        "_diffusers_version": _VERSION,
        "num_layers": model.depth,
        "num_attention_heads": model.num_heads,
        "attention_head_dim": model.width // model.num_heads,
        "in_channels": model.input_channels,
        "out_channels": model.output_channels,
        "patch_size": model.patch_size,
        "sample_size": model.image_size[0],
        "num_embeds_ada_norm": NULL_CLASS,
        "norm_eps": NORM_EPS,
        **REQUIRED,
    }


def _scheduler_config(config: Config) -> dict[str, Any]:
    """A DDIMScheduler. It returns the predicted clean sample at the last level, as our sampler does."""
    spacing = config.sampling.spacing
    return {
        "_class_name": "DDIMScheduler",
        "_diffusers_version": _VERSION,
        **NOISE_SCHEDULES[config.diffusion.noise_schedule or "linear"],
        "prediction_type": PREDICTIONS[config.diffusion.prediction or "epsilon"],
        # With linspace, a DDIMScheduler steps to other levels than it evaluates (huggingface/diffusers issue 11347).
        "timestep_spacing": "trailing" if spacing == "linspace" else spacing,
        **SCHEDULER_LIKE_OURS,
    }


def _other_samples(config: Config) -> tuple[str, ...]:
    """The run's own options of [sampling] that DiTPipeline does not have, one phrase each."""
    sampling = config.sampling
    lacks = {
        "spacing": sampling.spacing == "linspace",
        "sampler": sampling.sampler == "ancestral",
        "guidance_channels": sampling.guidance_channels not in (None, config.model.input_channels),
        "guidance_interval": list(sampling.guidance_interval) != [0.0, 1.0],
        "clip_sample": bool(sampling.clip_sample),
    }
    own = [f"sampling.{key} {_shown(getattr(sampling, key))}" for key, is_lacking in lacks.items() if is_lacking]
    return (f"its samples differ from those of this run, which has {', '.join(own)}",) if own else ()


@dataclass(frozen=True)
class _Vae:
    folder: Path
    scale: float


def _find_vae(config: Config, *, channels: int) -> _Vae | str:
    """The run's autoencoder, if DiTPipeline decodes with it as we do; otherwise the reason why not."""
    section = config.autoencoder
    if section.name is None:
        return "the run was trained on pixels, and DiTPipeline decodes latents"
    if kind_of(section.name) != "diffusers":
        return f"the run's autoencoder is {section.name}, and DiTPipeline has an AutoencoderKL"
    try:
        folder = find_published(section)
    except ConfigError:
        return f"the run's autoencoder {section.path or section.name} is not on this machine"
    try:
        decoder = open_decoder(section, channels=channels, device=torch.device("cpu"))
    except ConfigError as error:  # other weights than those of the run
        return str(error)
    assert decoder.shift is not None and decoder.scale is not None
    class_name = json.loads((folder / VAE_FILES[0]).read_bytes())["_class_name"]
    if class_name != "AutoencoderKL":
        return f"the run's autoencoder is an {class_name}, and DiTPipeline has an AutoencoderKL"
    if decoder.shift.any() or decoder.scale.unique().numel() > 1:
        normalization = f"shift {decoder.shift.unique().tolist()} and scale {decoder.scale.unique().tolist()}"
        return f"the run's latents have {normalization}, and DiTPipeline has only one factor"
    return _Vae(folder, decoder.scale[0].item())


def _copy_vae(vae: _Vae, folder: Path) -> None:
    """Copy an autoencoder, with the scale of the run's latents."""
    folder.mkdir()
    config = json.loads((vae.folder / VAE_FILES[0]).read_bytes())
    _write_json(folder / VAE_FILES[0], {**config, "scaling_factor": vae.scale, "shift_factor": None})
    shutil.copyfile(vae.folder / VAE_FILES[1], folder / VAE_FILES[1])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
