# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Download in advance what a job needs from the Hugging Face hub: weights, text encoders, autoencoder, LoRAs, data.

torchditan download flux_schnell_lora
torchditan download sd3_medium_lora_int8 --dataset.hub_name some/captioned-images

To use them on a machine without network access, copy the hub's cache (the folder HF_HOME) there and set
HF_HUB_OFFLINE=1. For gated models, accept their terms on the hub's page, then run `hf auth login` or set HF_TOKEN.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchditan.config.options import Autoencoder, Config


def parse(argv: list[str]) -> Config:
    """The job's configuration: a file or a name in train_configs/, and the flags of train.py."""
    from torchditan.config.command_line import ScriptParser
    from torchditan.config.loader import load_config

    parser = ScriptParser(__doc__, options=("model", "text_encoder", "autoencoder", "lora", "dataset"))
    parser.add_argument("config", help="configuration file, or its name in train_configs/")
    arguments, flags = parser.parse(argv)
    return load_config(["--job.config_file", arguments.config, *flags])


def wanted(config: Config) -> list[tuple[str, str, list[str]]]:
    """(option, hub name, file patterns) of everything that is on the hub and not in a local folder."""
    from torchditan.extras.autoencoders.rae import ENCODER_FILES
    from torchditan.extras.captions.encode import TEXT_PARTS
    from torchditan.extras.captions.single_encoder import FILES
    from torchditan.extras.published.families import family
    from torchditan.extras.published.stored_weights import place_of_lora
    from torchditan.registry import AUTOENCODERS, FAMILIES, resolve
    from torchditan.run.hub import is_hub_name

    found: list[tuple[str, str, list[str]]] = []

    def add(option: str, name: str | None, patterns: list[str]) -> None:
        if name is not None and is_hub_name(name):
            found.append((option, name, patterns))

    takes_captions = config.dataset.dataset_name == "captions"
    text = [f"{part}*/*" for part in TEXT_PARTS] if takes_captions else []
    vae = [] if config.autoencoder.path or config.autoencoder.name else ["vae/*"]
    whole = ["model_index.json", "scheduler/*", *text, *vae]
    if config.model.name in FAMILIES:
        subfolder = family(config.model.name).subfolder
        patterns = [f"{subfolder}/*.json", f"{subfolder}/*.safetensors"]
        add("model.path", config.model.path, [*patterns, *(whole[:2] if config.text_encoder.path else whole)])
    single = FILES if config.model.name not in FAMILIES else []
    add("text_encoder.path", config.text_encoder.path, [*whole, *single])
    add("autoencoder.path", *files_of_autoencoder(config.autoencoder))
    if config.autoencoder.name is not None:
        _, given = resolve(AUTOENCODERS, "autoencoder.name", config.autoencoder.name)
        add("autoencoder.name", given.get("encoder"), [*ENCODER_FILES])
    if config.lora.assistant_path is not None:
        add("lora.assistant_path", *place_of_lora(config.lora.assistant_path))
    return found


def files_of_autoencoder(options: Autoencoder) -> tuple[str | None, list[str]]:
    """(hub name or None, its files). Exact names, since a pattern such as *.safetensors also matches other folders."""
    from torchditan.extras.autoencoders import cosmos, kind_of, published
    from torchditan.extras.autoencoders.catalogue import PUBLISHED

    entry = PUBLISHED.get(options.name or "")
    if kind_of(options.name or "diffusers") == "cosmos":
        files, folders = cosmos.FILES, [""]
    else:
        files, folders = published.FILES, ["", "vae"]  # a complete pipeline has its autoencoder in vae/
    place = options.path
    if place is None and entry is not None:
        place, folders = entry.hub_name, [entry.subfolder]
    return place, [f"{folder}/{file}" if folder else file for folder in folders for file in files]


def main() -> None:
    config = parse(sys.argv[1:])

    from torchditan.run.hub import fetch

    assets = wanted(config)
    for option, name, patterns in assets:
        print(f"{option}: {name} ...", flush=True)
        folder = fetch(name, patterns=patterns, what="its files", option=option)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"  {folder} ({size / 1e9:.1f} GB)")
    if config.dataset.hub_name is not None and not config.dataset.streaming:
        from torchditan.datasets import build_dataset

        dataset = build_dataset(config.dataset, split="train")
        print(f"dataset.hub_name: {config.dataset.hub_name}, {len(dataset)} samples")
    elif not assets:
        print("this job needs nothing from the hub: everything is embedded or in a local folder")
