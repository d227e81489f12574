# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Command lines of the scripts that read a run: argparse, with one line for a mistake instead of a usage."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from torchditan.config import ConfigError, did_you_mean


class RunParser(argparse.ArgumentParser):
    """Takes a run directory, the step of a checkpoint, and `--sampling.*` and `--autoencoder.path` flags."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            epilog="Every --sampling.key of train.py works here too, over the run's own settings, and so does "
            "--autoencoder.path.",
        )
        self.add_argument("run", type=Path, help="run directory, outputs/quickstart say")
        self.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")

    def parse(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """(arguments of the script, flags of the configuration); any other flag is a ConfigError."""
        arguments, flags = self.parse_known_args(argv)
        own = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        for flag in flags:
            name = flag.split("=")[0]
            if name.startswith("--") and not name.startswith(("--sampling.", "--autoencoder.path")):
                hint = did_you_mean(name, own) or f"; there are {', '.join(own)}, --sampling.key, --autoencoder.path"
                raise ConfigError(f"{name} is no option of this script{hint}")
        return arguments, flags

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def count(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)
