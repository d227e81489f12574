# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The command `torchditan`, and `python -m torchditan`: dispatches to torchditan/commands/, and imports only what runs.

Under torchrun: `torchrun --nproc_per_node 8 -m torchditan train imagenet_pixels`.
"""

from __future__ import annotations

import sys

from torchditan import __version__
from torchditan.commands import COMMANDS


def usage() -> str:
    """The text of `torchditan --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"torchditan {__version__}: trains diffusion transformers, from a laptop CPU to nodes of GPUs",
            "",
            "  torchditan train quickstart                  digits, in minutes on two CPU cores",
            "  torchditan generate outputs/quickstart       draws from it",
            "  torchrun --nproc_per_node 8 -m torchditan train imagenet_pixels --dataset.root_dir /data/imagenet",
            "",
            "commands:",
            *lines,
            "",
            "`torchditan COMMAND --help` has the options of each.",
        ]
    )


def run(name: str) -> int:
    """Run a command with the arguments in `sys.argv`. Returns the exit code of the process."""
    from importlib import import_module

    from torchditan.supervision.exit_status import run_job

    return run_job(lambda: import_module(COMMANDS[name].module).main())


def main() -> int:
    """Entry point of the command `torchditan`."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        from torchditan.errors import did_you_mean

        hint = did_you_mean(name, COMMANDS) or f"; must be one of {', '.join(COMMANDS)}"
        print(f"error: {name} is not a command{hint}", file=sys.stderr)
        return 2
    sys.argv = [f"torchditan {name}", *arguments]
    return run(name)


if __name__ == "__main__":
    sys.exit(main())
