# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""README.md of a shared model or of shared latents: a card in the format of the Hugging Face hub.

Texts of the run or of the user (class names, notes) are escaped: they cannot add HTML, links or headings to the card.
What is unknown is called so.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchditan.evaluation.card import Card, settings_of
from torchditan.evaluation.card_tables import columns, one_line, shown, table
from torchditan.registry import entry_name

NOT_STATED = "not stated by whoever shared it"
_CLASSES_SHOWN = 50
_EVALUATION = ("weights", "ema_decay", "ema_width", "seeds", "class_balance", "rounding", "batch_size", "precision")
"""Settings of a card, besides its sampling options, that the card of a model states."""


@dataclass(frozen=True)
class Statements:
    """What only the user knows about a shared folder."""

    license: str | None = None
    """Identifier of the licence of the weights, such as cc-by-4.0."""
    data_license: str | None = None
    """Licence of the data, or where it comes from."""
    note: str | None = None
    repository: str | None = None
    """owner/name on the hub, if it is pushed there."""


@dataclass(frozen=True)
class Facts:
    """What is known about a shared model."""

    manifest: Mapping[str, Any]
    """config.json of the folder."""
    name: str
    """Of the folder."""
    configuration: str | None
    """The shipped one that the run began from."""
    metrics: Sequence[Mapping[str, Any]]
    """Records of metrics.jsonl up to the step of the weights."""
    evaluation: Card | None
    """The newest one of these weights with the sampling options in `manifest`."""
    evaluate: str
    """The command that makes one."""
    has_other_evaluations: bool
    """Whether there are evaluations of these weights with other sampling options."""
    is_imported: bool
    has_samples: bool
    has_diffusers: bool


def model_card(facts: Facts, statements: Statements) -> str:
    """The text of README.md."""
    manifest = facts.manifest
    config = manifest["config"]
    place = statements.repository and f"hub:{statements.repository}"
    title = statements.repository.split("/")[1] if statements.repository else facts.name
    takes_prompts = config["model"]["text"] is not None or config["dataset"]["dataset_name"] == "captions"
    task = "text-to-image" if takes_prompts else "unconditional-image-generation"
    front = {
        "library_name": "torchditan",
        "license": statements.license,
        "pipeline_tag": task,
        "tags": ["diffusion-transformer", task, *_dataset_tag(config["dataset"]["dataset_name"])],
    }
    size = "x".join(map(str, config["dataset"]["image_size"] or ()))
    sections = [
        _front_matter(front),
        f"# {escape(title)}",
        f"A diffusion transformer that draws images of {size} pixels, trained with TorchDiTan"
        f" ({_model(config)}; {manifest['weights']} weights of step {manifest['step']:,}).",
        "![samples](samples.png)" if facts.has_samples else "",
        escape(statements.note) if statements.note else "",
        _opening(place or "FOLDER", is_placeholder=place is None, num_classes=len(manifest["class_names"])),
        _data(facts, statements),
        _training(facts),
        _figures(facts),
        _licences(statements),
        _limits(facts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def latents_card(index: Mapping[str, Any], statements: Statements, *, name: str, splits: Mapping[str, int]) -> str:
    """README.md of shared latents.

    Args:
        index: index.json of the first split.
        splits: name -> number of latents.
        name: of the folder.
    """
    place = f"hub:{statements.repository}" if statements.repository else "FOLDER"
    front = {"license": statements.license, "tags": ["latents", *_dataset_tag(index["dataset"])]}
    rows = [[split, f"{count:,}"] for split, count in splits.items()]
    autoencoder = index["autoencoder"]
    origin = _code(autoencoder["path"] or autoencoder["name"])
    classes = _classes(index["class_names"])
    sections = [
        _front_matter(front),
        f"# {escape(statements.repository.split('/')[1] if statements.repository else name)}",
        f"Images of the dataset {_code(index['dataset'])}, encoded once with TorchDiTan, to train on without the "
        "autoencoder.",
        escape(statements.note) if statements.note else "",
        columns(["split", "latents"], rows),
        f"- latents: {' x '.join(map(str, index['latent_shape']))}, {index['dtype']}, of images of "
        f"{' x '.join(map(str, index['image_size']))} pixels\n"
        f"- autoencoder: {_code(autoencoder['name'])}, {_code(autoencoder['fingerprint'])}, {origin}\n"
        f"- mirrored images: {'yes' if index['flipped'] else 'no'}",
        f"Classes: {classes}" if classes else "",
        "## Train on them\n\n```bash\n"
        f"torchditan train CONFIG --dataset.dataset_name latents --dataset.root_dir {place}\n```",
        _licences(statements),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def escape(text: str) -> str:
    """Text of others as one line of Markdown, without HTML, links, emphasis or headings of its own."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_{}\[\]()#+!|~:@-])", r"\\\1", html.escape(line, quote=False))


def _code(text: Any) -> str:
    """A short value as code."""
    return f"`{' '.join(str(text).replace('`', '').split())}`"


def _front_matter(values: Mapping[str, Any]) -> str:
    """YAML; JSON writes its texts and lists in a form that YAML reads."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items() if value]
    return "\n".join(["---", *lines, "---"])


def _dataset_tag(dataset: str) -> list[str]:
    """The name of a dataset, without its options; none for code of the user, `module:name`."""
    name = entry_name(dataset)
    return [] if ":" in name else [name]


def _model(config: Mapping[str, Any]) -> str:
    return f"{config['model']['name']} {config['model']['flavor']}, patch size {config['model']['patch_size']}"


def _opening(place: str, *, is_placeholder: bool, num_classes: int) -> str:
    where = "; FOLDER is this folder" if is_placeholder else ""
    share = ", and `pip install 'torchditan[share]'` in its environment" if place.startswith("hub:") else ""
    draw = "classes=[0, 1], seed=0" if num_classes > 1 else "seed=0"
    return f"""## Open it

Install TorchDiTan as its README says{share}. CONFIG is a configuration with this model{where}.

```bash
torchditan generate {place}
torchditan train CONFIG --checkpoint.initial_load_path {place}
```

```python
import torchditan

model = torchditan.load("{place}")
images = model.sample({draw})  # (N, C, H, W) uint8
```"""


def _data(facts: Facts, statements: Statements) -> str:
    dataset = facts.manifest["config"]["dataset"]
    classes = _classes(facts.manifest["class_names"])
    known = facts.evaluation.reference if facts.evaluation else None
    count = known.num_images if known and known.source == "train" else None
    lines = [
        f"- dataset: {_code(dataset['dataset_name'])}",
        f"- fingerprint: {_code(dataset['fingerprint']) if dataset['fingerprint'] else 'none for this dataset'}",
        *([f"- training images: {count:,}"] if count else []),
        f"- image size: {' x '.join(map(str, dataset['image_size'] or ['unknown']))}",
        f"- classes: {classes or 'none'}",
        f"- origin and licence: {escape(statements.data_license) if statements.data_license else NOT_STATED}",
    ]
    return "\n".join(["## Data", "", *lines])


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(escape(name) for name in names[:_CLASSES_SHOWN])
    return shown + (f" and {len(names) - _CLASSES_SHOWN} more" if len(names) > _CLASSES_SHOWN else "")


def _training(facts: Facts) -> str:
    manifest = facts.manifest
    hardware, versions = manifest["hardware"], manifest["versions"] or {}
    device = hardware.get("device_name") or "not recorded"
    last = facts.metrics[-1] if facts.metrics else {}
    seconds, flops = last.get("elapsed_s"), _flops(facts.metrics, hardware.get("device_count"))
    number = hardware.get("device_count") or 1
    lines = [
        f"- hardware: {escape(str(device))}" + (f", {number} devices" if number > 1 else ""),
        f"- time: {_duration(seconds) if seconds else 'not recorded'}",
        f"- images seen: {manifest['images_seen']:,}",
        f"- model FLOPs: {f'{flops:.2g}' if flops else 'not recorded'}",
        f"- code: {', '.join(f'{name} {version}' for name, version in versions.items() if version)}"
        + (f", commit {_code(manifest['git_commit'])}" if manifest["git_commit"] else ""),
    ]
    how = "The options of the training are in `config.json`, without those of the machine."
    if facts.configuration:
        how = f"The run began from `torchditan train {facts.configuration}`. {how}"
    if facts.is_imported:
        how = "These weights were imported; how they were trained is not known here."
    return "\n".join(["## Training", "", how, "", *lines])


def _flops(metrics: Iterable[Mapping[str, Any]], num_devices: int | None) -> float | None:
    """Model FLOPs of all steps, from the rate of each record; None if one is missing."""
    total, seen = 0.0, 0
    for record in metrics:
        rate, images, speed = (record.get(key) for key in ("tflops_per_device", "images_seen", "images_per_second"))
        if not rate or not images or not speed or num_devices is None:
            return None
        total += (images - seen) / speed * rate * 1e12 * num_devices
        seen = images
    return total or None


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _figures(facts: Facts) -> str:
    card = facts.evaluation
    if card is None:
        found = "evaluated only with other sampling options than those of the run"
        return (
            f"## Figures\n\nThese weights were {found if facts.has_other_evaluations else 'not evaluated'}: no figures."
            f" `{facts.evaluate}` computes them."
        )
    seeds = f"{len(card.seeds)} x " if len(card.seeds) > 1 else ""
    against = {"train": "training images", "held_out": "held-out images", "file": "a file of reference images"}
    how = "" if card.reference is None else f", against {against[card.reference.source]}"
    public = facts.manifest["config"]["sampling"]
    settings = {name: value for name, value in settings_of(card).items() if name in _EVALUATION}
    settings |= {
        f"sampling.{name}": value if value == public[name] else "not public" for name, value in card.sampling.items()
    }
    rows = [[f"`{name}`", one_line(shown(name, value)) or "none"] for name, value in settings.items()]
    return "\n\n".join(
        [
            "## Figures",
            table(card),
            f"{seeds}{card.num_samples:,} samples{how}. Training again with another seed changes them further.",
            "All options that change the figures:",
            columns(["option", "value"], rows),
        ]
    )


def _licences(statements: Statements) -> str:
    of_weights = _code(statements.license) if statements.license else NOT_STATED
    return (
        f"## Licence\n\n- this folder: {of_weights}\n"
        f"- the data: {escape(statements.data_license) if statements.data_license else NOT_STATED}"
    )


def _limits(facts: Facts) -> str:
    config = facts.manifest["config"]
    lines = [
        "- It draws what its training data shows, with its gaps and its bias, and may repeat single images.",
        f"- It was trained at one size, {' x '.join(map(str, config['dataset']['image_size'] or ['unknown']))} pixels.",
        "- It was not checked for any particular use. The licence of the weights does not cover rights in the data.",
    ]
    if config["autoencoder"]["name"] is not None:
        lines.append("- Its samples are latents; the autoencoder that decodes them loses fine detail.")
    if facts.has_diffusers:
        lines.append("- `diffusers/` has the same weights for diffusers.")
    return "\n".join(["## Limits", "", *lines])
