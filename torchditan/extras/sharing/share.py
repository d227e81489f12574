# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Writes a folder to share: a trained model with its card and a picture of samples, or encoded latents.

Notable:
- the folder is complete or does not exist; samples are drawn from the written files, which so prove that they open;
- config.json has the options of shared_config.py, and the picture shows no images of the dataset;
- extras/weights/shared.py opens a model, data/latents.py latents. You may edit the card and the picture.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchditan.checkpoint.weights import Kind, Weights, write_model_file
from torchditan.config.loader import from_dict
from torchditan.config.options import flatten
from torchditan.datasets.latents import splits_of
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders import runs_code
from torchditan.extras.latents.shared import link_latents
from torchditan.extras.sharing.model_card import Statements, latents_card, model_card
from torchditan.extras.sharing.shared_config import SHARED, shared_config
from torchditan.extras.weights.diffusers_export import export_to_diffusers
from torchditan.extras.weights.opening import open_model
from torchditan.extras.weights.shared import CONFIG_FILE, LIBRARY, WEIGHTS_FILE, is_shared
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.run.atomic_files import new_folder, sha256_of, write_file
from torchditan.run.directory import to_json
from torchditan.sampling.grid_picture import save_grid, stills

CARD_FILE = "README.md"
_HARDWARE = ("device", "device_name", "device_count", "cpu", "cpu_count", "cpu_threads")
_OF_THE_PICTURE = (
    *("model.path", "autoencoder.path", "text_encoder.path", "sampling.prompts", "sampling.negative_prompt"),
)
"""Options of the run that its picture needs and config.json does not have."""


def share(
    source: Path,
    folder: Path,
    *,
    statements: Statements,
    step: int | None = None,
    kind: Kind | None = None,
    dtype: torch.dtype = torch.float32,
    with_samples: bool = True,
    overwrite: bool = False,
) -> tuple[str, list[str]]:
    """Write weights or encoded latents to a folder that others can open, with its card.

    Args:
        source: a folder of latents, or an address of `open_weights`.
        folder: the folder to create.
        step, kind, dtype: which weights, and their precision; see `open_weights` and `write_model_file`.
        statements: what only the user knows, such as the licence.
        with_samples: draw a picture of samples.
        overwrite: replace `folder` if it was shared, too.

    Returns:
        What was shared, and what the folder lacks, a line each.

    Raises:
        ConfigError: the weights do not exist or belong to a LoRA, the autoencoder or a shard is missing, or `folder`
            exists or cannot be written.
    """

    def is_replaced(found: Path) -> bool:
        card = found / CARD_FILE
        if not overwrite or not card.is_file() or found.resolve() == source.resolve():
            return False
        is_ours = card.read_text(encoding="utf-8", errors="replace").startswith(f'---\nlibrary_name: "{LIBRARY}"')
        return is_shared(found) or (is_ours and bool(splits_of(found)))

    name, dtype_name = folder.resolve().name, str(dtype).removeprefix("torch.")
    with new_folder(folder, replace=is_replaced) as new:
        if splits_of(source):
            indices, notes = link_latents(source, new)
            what = ", ".join(f"{index.num_images:,} latents ({split})" for split, index in indices.items())
            text = latents_card(indices, statements, name=name)
        else:
            weights = open_model(source, step=step, kind=kind)
            what = f"{weights.kind} weights of step {weights.step}, {dtype_name}"
            description, notes = _write_model(weights, new, dtype=dtype, with_samples=with_samples)
            text, lacks = model_card(weights, statements, public=description, files=new, name=name, dtype=dtype_name)
            notes += lacks
        write_file(new / CARD_FILE, text.encode())
    return what, notes


def _write_model(
    weights: Weights, folder: Path, *, dtype: torch.dtype, with_samples: bool
) -> tuple[dict[str, Any], list[str]]:
    """Write the weights, config.json, the folder for diffusers and the picture.

    Returns:
        The content of config.json, and what is missing.
    """
    assert weights.config is not None
    config = shared_config(weights.config)
    write_model_file(folder / WEIGHTS_FILE, replace(weights, config=config), dtype=dtype)
    hardware = weights.content.get("hardware") or {}
    description = {
        "library_name": LIBRARY,
        "sha256": sha256_of(folder / WEIGHTS_FILE),
        "step": weights.step,
        "images_seen": weights.images_seen,
        "weights": weights.kind,
        "class_names": weights.class_names,
        "config": config,
        "git_commit": weights.git_commit,
        "versions": weights.content.get("versions"),
        "hardware": {key: hardware[key] for key in _HARDWARE if key in hardware},
    }
    write_file(folder / CONFIG_FILE, to_json(description, indent=2) + b"\n")
    own, kept = flatten(from_dict(weights.config)), flatten(from_dict(config))
    dropped = [name for name in SHARED if own[name] != kept[name]]
    notes = [f"not in {CONFIG_FILE}: {', '.join(dropped)}"] if dropped else []
    try:
        export_to_diffusers(weights, folder / "diffusers", dtype=dtype)
    except ConfigError as error:
        notes.append(f"no folder for diffusers: {error}")
    for file in (folder / "diffusers").rglob("*.json"):  # diffusers notes where a model came from
        content = json.loads(file.read_bytes())
        if content.pop("_name_or_path", None) is not None:
            write_file(file, to_json(content, indent=2) + b"\n")
    if with_samples:
        notes += _draw_samples(folder, own)
    return description, notes


def _draw_samples(folder: Path, own: dict[str, Any]) -> list[str]:
    """Draw samples.png with the files of a shared folder and the run's `[sampling]` options. Returns why not.

    Real images are not shown: they may be private. The prompts are.
    """
    if own["autoencoder.name"] is not None and runs_code(own["autoencoder.name"]):
        return ["no samples.png: its autoencoder is TorchScript, which runs code"]
    flags = {name: own[name] for name in _OF_THE_PICTURE if own[name] is not None}
    trained = TrainedModel.open(folder, dtype=None, flags=flags)
    sampling = trained.config.sampling
    if trained.takes_prompts and not sampling.prompts:
        return ["no samples.png: the run has no sampling.prompts"]
    rows = trained.rows()
    samples = trained.generate_rows(rows, samples_per_row=sampling.images_per_class, seed=0, batch_size=64)
    title = f"step {trained.step}, {trained.weights} weights, {sampling.sampler} {sampling.num_steps} steps, "
    title += f"guidance {sampling.guidance_scale:g}, seed 0"
    pictures = stills(trained.to_pixels(samples))
    save_grid(folder / "samples.png", pictures, None, rows.names, title=title)
    return []
