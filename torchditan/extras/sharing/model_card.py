# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""README.md of a shared model or of shared latents: a card in the format of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import from_dict
from torchditan.data_stream.latent_index import LatentIndex
from torchditan.extras.evaluation.card import Card, cards_of_run, settings_of
from torchditan.extras.evaluation.card_tables import columns, one_line, shown, table
from torchditan.extras.sharing.shared_config import shipped_configuration
from torchditan.registry import entry_name
from torchditan.run.reading import read_metrics
from torchditan.sampling.drawing import sampling_settings

_NOT_STATED = "not stated by whoever shared it"
_CLASSES_SHOWN = 50
_EVALUATION = (
    *("weights", "ema_decay", "ema_width", "seeds", "options.class_balance", "options.rounding", "options.batch_size"),
    "precision",
)
"""Settings of a card, besides its sampling options, that the card of a model states."""


@dataclass(frozen=True)
class Statements:
    """What only the user knows about a shared folder."""

    license: str | None = None
    """Identifier of the licence of the weights, such as cc-by-4.0."""
    data_license: str | None = None
    """Licence of the data, or where it comes from."""
    note: str | None = None
    """Markdown."""
    repository: str | None = None
    """owner/name on the hub, if it is pushed there."""

    @property
    def place(self) -> str:
        return f"hub:{self.repository}" if self.repository else "FOLDER"


def model_card(
    weights: Weights, statements: Statements, *, public: Mapping[str, Any], files: Path, name: str, dtype: str
) -> tuple[str, list[str]]:
    """The text of README.md, and what it lacks.

    Args:
        weights: those of the folder, with all that is known about their run.
        public: config.json of the folder.
        files: the folder with all other files.
        name: of the folder.
        dtype: of the weights in the folder: float32 or bfloat16.
    """
    config, place = public["config"], statements.place
    model, dataset = config["model"], config["dataset"]
    is_text_to_image = model["text"] is not None or dataset["dataset_name"] == "captions"
    kind = "text-to-image" if is_text_to_image else "unconditional-image-generation"
    size = " x ".join(map(str, dataset["image_size"]))
    evaluation = _evaluation_of(weights)
    evaluate = f"torchditan evaluate RUN --step {weights.step} --weights {weights.kind}"
    sections = [
        _front_matter(statements, dataset["dataset_name"], "diffusion-transformer", kind, pipeline_tag=kind),
        f"# {(statements.repository or name).split('/')[-1]}",
        f"A diffusion transformer that draws images of {size} pixels, trained with TorchDiTan ({model['name']} "
        f"{model['flavor']}, patch size {model['patch_size']}; {weights.kind} weights of step {weights.step:,}).",
        "![samples](samples.png)" if (files / "samples.png").exists() else "",
        statements.note or "",
        f"""## Open it

Install TorchDiTan with its extra `share`. CONFIG is a configuration with this model.

```bash
torchditan generate {place}
torchditan train CONFIG --checkpoint.initial_load_path {place}
```

```python
import torchditan

model = torchditan.load("{place}")
images = model.sample({"classes=[0, 1], " if len(weights.class_names) > 1 else ""}seed=0)  # (N, C, H, W) uint8
```""",
        f"""## Data

- dataset: {_code(dataset["dataset_name"])}
- fingerprint: {_code(dataset["fingerprint"] or "none for this dataset")}
- image size: {size}
- classes: {_classes(weights.class_names)}
- origin and licence: {statements.data_license or _NOT_STATED}""",
        _training(weights, public),
        _figures(evaluation, config["sampling"], dtype=dtype) if evaluation else _no_figures(evaluate),
        _licences(statements),
        f"""## Limits

- It draws what its training data shows, with its gaps and its bias, and may repeat single images.
- It was trained at one size, {size} pixels.
- It was not checked for any particular use. The licence of the weights does not cover rights in the data.""",
        "`diffusers/` has the same weights for diffusers." if (files / "diffusers").exists() else "",
    ]
    lacks = [] if evaluation else [f"no figures: {evaluate} computes them"]
    return "\n\n".join(filter(None, sections)) + "\n", lacks


def latents_card(indices: Mapping[str, LatentIndex], statements: Statements, *, name: str) -> str:
    """README.md of shared latents, from the public index of each split."""
    index = next(iter(indices.values()))
    autoencoder = [index.autoencoder_name, index.fingerprint, index.autoencoder_path]
    sections = [
        _front_matter(statements, index.dataset, "latents"),
        f"# {(statements.repository or name).split('/')[-1]}",
        f"Images of the dataset {_code(index.dataset)}, encoded once with TorchDiTan.",
        statements.note or "",
        columns(["split", "latents"], [[split, f"{each.num_images:,}"] for split, each in indices.items()]),
        f"""- latents: {" x ".join(map(str, index.latent_shape))}, {index.dtype}
- images: {" x ".join(map(str, index.image_size))} pixels, {"also mirrored" if index.flipped else "not mirrored"}
- autoencoder: {", ".join(_code(part) for part in autoencoder if part)}
- classes: {_classes(index.class_names)}""",
        f"""## Train on them

```bash
torchditan train CONFIG --dataset.dataset_name latents --dataset.root_dir {statements.place}
```""",
        _licences(statements),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _front_matter(statements: Statements, dataset: str, *tags: str, **more: str) -> str:
    """YAML; JSON writes its texts and lists in a form that YAML reads. A user's own `module:name` is not a tag."""
    name = entry_name(dataset)
    values = {"library_name": "torchditan", "license": statements.license, **more}
    values["tags"] = [*tags, *([] if ":" in name else [name])]  # type: ignore[assignment]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in values.items() if value), "---"])


def _code(text: Any) -> str:
    """A short text as code, which cannot write Markdown."""
    return f"`{one_line(str(text).replace('`', ''))}`"


def _classes(names: Sequence[str]) -> str:
    more = f" and {len(names) - _CLASSES_SHOWN} more" if len(names) > _CLASSES_SHOWN else ""
    return ", ".join(map(_code, names[:_CLASSES_SHOWN])) + more if names else "none"


def _evaluation_of(weights: Weights) -> Card | None:
    """The newest evaluation of these weights with the sampling options of their run."""
    own = sampling_settings(from_dict(weights.config or {}).sampling)
    cards = [] if weights.run is None else cards_of_run(weights.run)
    fitting = [card for card in cards if (card.step, card.weights) == (weights.step, weights.kind)]
    return next((card for card in fitting if card.sampling == own), None)


def _training(weights: Weights, public: Mapping[str, Any]) -> str:
    metrics = [] if weights.run is None else read_metrics(weights.run)
    last: dict[str, Any] = next((record for record in reversed(metrics) if record["step"] <= (weights.step or 0)), {})
    seconds, hardware = last.get("elapsed_s"), public["hardware"]
    devices = hardware.get("device_count") or 1
    rate, speed = last.get("tflops_per_device"), last.get("images_per_second")
    flops = weights.images_seen * rate * 1e12 * devices / speed if weights.images_seen and rate and speed else None
    versions = ", ".join(f"{name} {version}" for name, version in (public["versions"] or {}).items() if version)
    started = shipped_configuration(from_dict(weights.config or {}))
    how = f"The run began from `torchditan train {started}`. " if started else ""
    if (initial := from_dict(weights.config or {}).checkpoint.initial_load_path) is not None:
        named = f", {_code(initial)}" if initial.startswith("hub:") else ""
        how += f"It started from the weights of another model{named}. "
    if "imported" in weights.content:
        how = "These weights were imported; how they were trained is not known here. "
    return f"""## Training

{how}The options are in `config.json`, without those of the machine.

- hardware: {_code(hardware.get("device_name") or "not recorded")}, {devices} device(s)
- time: {f"{seconds / 3600:,.2f} hours" if seconds else "not recorded"}
- images seen: {weights.images_seen:,}
- model FLOPs: {f"{flops:.2g}" if flops else "not recorded"}
- code: {versions}, commit {_code(weights.git_commit)}"""


def _figures(card: Card, public: Mapping[str, Any], *, dtype: str) -> str:
    against = {"train": "training images", "held_out": "held-out images", "file": "a file of reference images"}
    how = "" if card.reference is None else f", against {against[card.reference.source]}"
    evaluated, known = card.precision.split(",")[0], settings_of(card)
    rounding = "" if evaluated == dtype else f" They are of the weights in {evaluated}; the file here has {dtype}."
    settings = {name.removeprefix("options."): known[name] for name in _EVALUATION if name in known}
    settings |= {
        f"sampling.{name}": value if value == public[name] else "not public" for name, value in card.sampling.items()
    }
    rows = [[f"`{name}`", one_line(shown(name, value))] for name, value in settings.items()]
    return f"""## Figures

{table(card)}

{len(card.seeds)} x {card.num_samples:,} samples{how}. Training again with another seed changes them further.{rounding}

All options that change the figures:

{columns(["option", "value"], rows)}"""


def _no_figures(evaluate: str) -> str:
    why = "These weights were not evaluated with the options `[sampling]` of config.json"
    return f"## Figures\n\n{why}. `{evaluate}` computes the figures."


def _licences(statements: Statements) -> str:
    license = _code(statements.license) if statements.license else _NOT_STATED
    return f"## Licence\n\n- this folder: {license}\n- the data: {statements.data_license or _NOT_STATED}"
