# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Command lines of the scripts: argparse, with one line for a mistake instead of a usage."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from torchditan.config.errors import ConfigError, did_you_mean, option_error


class ScriptParser(argparse.ArgumentParser):
    """Takes a script's own arguments, and leaves flags of the configuration over.

    Args:
        description: heads `--help`.
        options: of train.py that work here too: sections ("dataset"), or single ones ("autoencoder.path").
    """

    def __init__(self, description: str | None, *, options: tuple[str, ...]) -> None:
        self._shown = [f"--{option}" if "." in option else f"--{option}.key" for option in options]
        self._prefixes = tuple(f"--{option}" if "." in option else f"--{option}." for option in options)
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            epilog=f"{', '.join(self._shown)} of train.py work here too.",
        )

    def parse(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """(arguments of the script, flags of the configuration); any other flag is a ConfigError."""
        arguments, flags = self.parse_known_args(argv)
        own = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        for flag in flags:
            name = flag.split("=")[0]
            if name.startswith("--") and not name.startswith(self._prefixes):
                hint = self._configuration_flag(name) or did_you_mean(name, own)
                hint = hint or f"; there are {', '.join([*own, *self._shown])}"
                raise ConfigError(f"{name} is no option of this script{hint}")
        return arguments, flags

    def _configuration_flag(self, name: str) -> str:
        """`; did you mean --sampling.guidance_scale?` of `--guidance_scale`, which lacks its section."""
        from torchditan.config.loader import options

        key = name.removeprefix("--").replace("-", "_")
        taken = [f"--{option}" for option in options() if f"--{option}".startswith(self._prefixes)]
        same_key = [option for option in taken if option.split(".")[1] == key]
        return f"; did you mean {' or '.join(same_key)}?" if same_key else ""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class RunParser(ScriptParser):
    """Takes a run directory and the step of a checkpoint; the flags left over go over the run's own settings."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description, options=("sampling", "autoencoder.path", "text_encoder.path"))
        self.add_argument("run", type=Path, help="run directory, outputs/quickstart say")
        self.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")


def check_output(option: str, path: Path) -> None:
    """Refuse, before any work, a file that could not be written.

    Raises:
        ConfigError: it is a folder, or in one that cannot be written to.
    """
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise option_error(option, str(path), "must be a file in a folder that can be written to")


def count(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)
