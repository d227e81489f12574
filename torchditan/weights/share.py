# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Writes a trained model as a folder to share: weights, config.json, a model card and a picture of samples.

Notable:
- the folder is complete or does not exist; samples are drawn from the written files, which so prove that they open;
- config.json has the options of shared_config.py, and the picture shows no images of the dataset;
- shared.py opens it. It checks the files that config.json lists; the card and the picture may be edited.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchditan.autoencoders import runs_code
from torchditan.config.errors import ConfigError
from torchditan.config.loader import from_dict
from torchditan.config.options import flatten
from torchditan.evaluation.card import cards_of_run
from torchditan.evaluation.drawing import sampling_settings
from torchditan.evaluation.grid_picture import save_grid, stills
from torchditan.run import provenance
from torchditan.run.atomic_files import new_folder, sha256_of, write_file
from torchditan.run.directory import to_json
from torchditan.run.reading import read_metrics
from torchditan.weights.diffusers_export import export_to_diffusers
from torchditan.weights.exporting import save_weights
from torchditan.weights.model_card import Facts, Statements, model_card
from torchditan.weights.opening import Kind, Weights, open_model
from torchditan.weights.shared import (
    CONFIG_FILE,
    FORMAT_VERSION,
    LIBRARY,
    WEIGHTS_FILE,
    is_shared,
    refuse_existing,
)
from torchditan.weights.shared_config import SHARED, shared_config, shared_hardware, shipped_configuration
from torchditan.weights.trained_model import TrainedModel

SAMPLES_FILE = "samples.png"
CARD_OF_MODEL = "README.md"
DIFFUSERS = "diffusers"
_OF_THE_PICTURE = (
    *("model.path", "autoencoder.path", "text_encoder.path", "sampling.prompts", "sampling.negative_prompt"),
)
"""Options of the run that its picture needs and config.json does not have."""


@dataclass(frozen=True)
class Shared:
    """Result of `share_model`."""

    weights: Weights
    notes: list[str]
    """What the folder lacks, and why; a line each."""


def share_model(
    source: Path,
    folder: Path,
    *,
    step: int | None = None,
    kind: Kind | None = None,
    dtype: torch.dtype = torch.float32,
    statements: Statements,
    with_samples: bool = True,
    overwrite: bool = False,
) -> Shared:
    """Write weights to a folder that others can open, with its card.

    Args:
        source: an address of `open_weights`.
        folder: the folder to create.
        step: of a run's checkpoint; None takes the newest.
        kind: averaged or raw; None takes the averaged ones if the run kept them.
        dtype: of the weights, float32 or bfloat16.
        statements: what only the user knows, such as the licence.
        with_samples: draw a picture of samples.
        overwrite: replace `folder` if it is a shared model.

    Raises:
        ConfigError: the weights do not exist or belong to a LoRA, the autoencoder is missing, or `folder` exists or
            cannot be written.
    """
    refuse_existing(folder, overwrite=overwrite, is_ours=is_shared)
    weights = open_model(source, step=step, kind=kind)
    assert weights.config is not None
    run, content = weights.run, weights.content
    config = shared_config(weights.config)
    public = replace(weights, config=config)
    own, kept = flatten(from_dict(weights.config)), flatten(from_dict(config))
    dropped = [name for name in SHARED if own[name] != kept[name]]
    notes = [f"not in {CONFIG_FILE}: {', '.join(dropped)}"] if dropped else []
    with new_folder(folder, replace=overwrite) as new:
        save_weights(new / WEIGHTS_FILE, public, dtype=dtype)
        files = {WEIGHTS_FILE: _entry(new / WEIGHTS_FILE)}
        manifest = _manifest(public, content, files)
        write_file(new / CONFIG_FILE, to_json(manifest, indent=2) + b"\n")
        left_out = _export_to_diffusers(weights, new / DIFFUSERS, dtype=dtype)
        if left_out is not None:
            notes.append(f"no folder for diffusers: {left_out}")
        has_samples = False
        if with_samples:
            try:
                missing = _draw_samples(new, weights.config)
            except ConfigError as error:
                raise ConfigError(f"{error}; or leave the picture out with --without_samples") from None
            has_samples = missing is None
            notes += [f"no {SAMPLES_FILE}: {missing}"] if missing else []
        cards = [] if run is None else cards_of_run(run)
        evaluations = [card for card in cards if (card.step, card.weights) == (weights.step, weights.kind)]
        own_sampling = sampling_settings(from_dict(weights.config).sampling)
        evaluation = next((card for card in evaluations if card.sampling == own_sampling), None)
        evaluate = f"torchditan evaluate RUN --step {weights.step} --weights {weights.kind}"
        if evaluations and evaluation is None:
            notes.append(
                "no figures: these weights were evaluated only with other [sampling] options than those of the run; "
                f"{evaluate} computes them"
            )
        facts = Facts(
            manifest,
            name=folder.resolve().name,
            configuration=shipped_configuration(from_dict(weights.config)),
            metrics=[] if run is None else _metrics(run, weights.step),
            evaluation=evaluation,
            evaluate=evaluate,
            has_other_evaluations=bool(evaluations),
            is_imported="imported" in content,
            has_samples=has_samples,
            has_diffusers=left_out is None,
        )
        write_file(new / CARD_OF_MODEL, model_card(facts, statements).encode())
    return Shared(weights, notes)


def _manifest(public: Weights, content: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    """config.json of the folder."""
    return {
        "library_name": LIBRARY,
        "format_version": FORMAT_VERSION,
        "torchditan_version": provenance.versions("torchditan")["torchditan"],
        "files": files,
        "step": public.step,
        "images_seen": public.images_seen,
        "weights": public.kind,
        "class_names": public.class_names,
        "config": public.config,
        "git_commit": public.git_commit,
        "versions": content.get("versions"),
        "hardware": shared_hardware(content),
    }


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_of(path), "size": path.stat().st_size}


def _metrics(run: Path, step: int | None) -> list[dict[str, Any]]:
    """The records of a run up to this step."""
    return [record for record in read_metrics(run) if step is None or record.get("step", 0) <= step]


def _export_to_diffusers(weights: Weights, folder: Path, *, dtype: torch.dtype) -> str | None:
    """Write the folder of diffusers. Returns why there is none."""
    try:
        export_to_diffusers(weights, folder, dtype=dtype)
    except ConfigError as error:
        return str(error).removeprefix('--format = "diffusers": ').removesuffix("; must be torchditan")
    for file in folder.rglob("*.json"):  # diffusers notes where a model came from
        content = json.loads(file.read_bytes())
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            write_file(file, to_json(content, indent=2) + b"\n")
    return None


def _draw_samples(folder: Path, config: dict[str, dict[str, Any]]) -> str | None:
    """Draw the grid of the run's `[sampling]` options with the files of a shared folder. Returns why not.

    Real images are not shown: they may be private. The prompts are.
    """
    own = flatten(from_dict(config))
    flags = {name: own[name] for name in _OF_THE_PICTURE if own[name] is not None}
    if own["autoencoder.name"] is not None and runs_code(own["autoencoder.name"]):
        return "its autoencoder is TorchScript, which runs code"
    trained = TrainedModel.open(folder, dtype=None, flags=flags)
    sampling = trained.config.sampling
    if trained.takes_prompts and not sampling.prompts:
        return "the run has no sampling.prompts"
    rows = trained.rows()
    samples = trained.generate_rows(rows, samples_per_row=sampling.images_per_class, seed=0, batch_size=64)
    title = f"step {trained.step}, {trained.weights} weights, {sampling.sampler} {sampling.num_steps} steps, "
    title += f"guidance {sampling.guidance_scale:g}, seed 0"
    pictures = stills(trained.to_pixels(samples))
    save_grid(folder / SAMPLES_FILE, pictures, None, rows.names, title=title)
    return None
