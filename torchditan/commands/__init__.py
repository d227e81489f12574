# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What users run: the commands of `torchditan`. train.py starts the same code in a checkout.

Importing this package imports no other module, so that `torchditan --help` is fast.
"""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """An entry of `torchditan --help`."""

    module: str
    """Its function `main` reads `sys.argv`."""
    help: str


COMMANDS = {
    "list": Command("torchditan.commands.list_configs", "the configurations, each with its hardware and its cost"),
    "train": Command("torchditan.commands.train", "train a configuration, or continue its run"),
    "generate": Command("torchditan.commands.generate", "draw samples of a run"),
    "evaluate": Command("torchditan.commands.evaluate", "sample quality, with intervals and a card that repeats it"),
    "encode": Command("torchditan.commands.encode_latents", "encode a dataset as latents, once"),
    "pack": Command("torchditan.commands.pack", "pack a dataset into WebDataset shards"),
    "plan": Command("torchditan.extras.planner.__main__", "memory and time of a configuration on a device, without it"),
    "ablate": Command("torchditan.extras.ablation.__main__", "run a grid of options, and measure each"),
    "speedrun": Command("torchditan.commands.speedrun", "train and score an entry of the open speedrun, or list them"),
    "report": Command("torchditan.commands.report", "one page about runs, or about a grid"),
    "import": Command("torchditan.commands.import_weights", "a checkpoint of others becomes a run"),
    "export": Command("torchditan.commands.export", "the weights of a run, as one file"),
    "share": Command("torchditan.commands.share", "a model or latents as a folder for others, and on the hub"),
    "refit_time": Command("torchditan.commands.refit_time", "weights for one-step training, by a new embedding of t"),
    "export_lora": Command("torchditan.commands.export_lora", "a LoRA as one file, or folded into its model"),
    "download": Command("torchditan.commands.download_assets", "the files of published models that a job needs"),
}
