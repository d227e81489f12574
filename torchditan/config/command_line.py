# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Command lines of torchditan/commands/: argparse, but an error is one line without the usage."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

from torchditan.errors import ConfigError, did_you_mean, option_error


class ScriptParser(argparse.ArgumentParser):
    """Parses the command's own arguments and returns the configuration flags unparsed.

    Args:
        description: first text of `--help`.
        options: options of training that the command accepts, as sections ("dataset") or names ("autoencoder.path").
    """

    def __init__(self, description: str | None, *, options: tuple[str, ...]) -> None:
        self._shown = [f"--{option}" if "." in option else f"--{option}.key" for option in options]
        self._prefixes = tuple(f"--{option}" if "." in option else f"--{option}." for option in options)
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            epilog=_epilog(self._shown),
        )

    def parse(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return (arguments of the command, configuration flags). Raises ConfigError for any other flag."""
        from torchditan.config.schema import options

        arguments, flags = self.parse_known_args(argv)
        own = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        for flag in flags:
            name = flag.split("=")[0]
            if name.startswith("--") and not name.startswith(self._prefixes):
                taken = [flag for flag in map("--{}".format, options()) if flag.startswith(self._prefixes)]
                hint = (
                    did_you_mean(name, own if "." in name else [*own, *taken])
                    or f"; must be one of {', '.join([*own, *self._shown])}"
                )
                raise ConfigError(f"{name} is not an option here{hint}")
        if flags and not self._prefixes:
            raise ConfigError(f"{flags[0]} is one argument too many; see --help")
        return arguments, flags

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _epilog(shown: list[str]) -> str | None:
    if not shown:
        return None
    key = " For key, put the name of an option in that section." if any(name.endswith(".key") for name in shown) else ""
    return f"This command also takes options of `torchditan train`: {', '.join(shown)}.{key}"


class RunParser(ScriptParser):
    """Parses a run directory and which of its weights. The remaining flags replace the run's own settings."""

    def __init__(self, description: str | None, *, is_run_required: bool = True) -> None:
        paths = ("autoencoder.path", "dataset.root_dir", "model.path", "text_encoder.path")
        super().__init__(description, options=("sampling", *paths))
        number = None if is_run_required else "?"
        self.add_argument(
            "run",
            type=Path,
            nargs=number,
            help="run directory, such as outputs/quickstart, or a shared model (docs/checkpoints.md)",
        )
        add_weights_choice(self)

    def error(self, message: str) -> NoReturn:
        is_alone = message.endswith("required: run")
        super().error(f"{message}, {RUN_EXAMPLES}" if is_alone else message)


RUN_EXAMPLES = "such as outputs/quickstart, or earth, a model that ships with the package"


def add_weights_choice(parser: ScriptParser) -> None:
    """Which weights of a run a script reads."""
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--weights", choices=("ema", "raw"), help="which weights (default: ema if the run has them)")


def add_float32_matmul_precision(parser: ScriptParser) -> None:
    """The precision in which a script draws; that of the run applies only to its training."""
    parser.add_argument(
        "--float32_matmul_precision",
        choices=("highest", "high", "medium"),
        default="highest",
        help="of the model's float32 products (default: highest, whatever the run's was)",
    )


def check_output(option: str, path: Path) -> None:
    """Check, before any work, that a file can be written.

    Raises:
        ConfigError: the path is a folder, or its folder is not writable.
    """
    existing = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise option_error(option, str(path), "must be a file in a writable folder")


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Check, before any work, that a .safetensors file may be written here.

    Raises:
        ConfigError: it has another ending, or exists without `--overwrite`.
    """
    if path.suffix != ".safetensors" or path.is_dir():
        raise option_error("OUT", str(path), "must be a file that ends in .safetensors")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; choose another name, or replace it with --overwrite")


def count(text: str) -> int:
    """Type of an argument that is a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)
