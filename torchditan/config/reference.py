# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Generator of docs/options.md, the reference of all options, from options.py.

    python -m torchditan.config.reference > docs/options.md

tests/repository/test_option_reference.py fails if the page is out of date. This file must not import torch.
"""

from __future__ import annotations

import inspect
import sys

from torchditan.config.legacy_keys import RENAMED_KEYS
from torchditan.config.options import Config
from torchditan.config.schema import Option, options
from torchditan.config.trajectory import TRAJECTORY_KEYS

_INTRODUCTION = """\
# Option reference

Every option of `torchditan train`, its values, its default and what it does. This page is generated; do not edit it.
After you change `torchditan/config/options.py`, run `python -m torchditan.config.reference > docs/options.md`.

- The option `training.steps` is the key `steps` under `[training]` in a TOML file, and the flag
  `--training.steps` on the command line. [configuration.md](configuration.md) describes both notations.
- A dash as the default means that the option is left open. The dataset, the model preset or another option fills it in.
- **fixed** marks an option that decides what a run learns. It cannot change in an existing run: to change it, start a
  new run. All other options may change when a run resumes. For
  `training.steps`, [the schedule sets limits](checkpoints.md#resume).
"""


def reference() -> str:
    """The page as Markdown."""
    lines = [_INTRODUCTION]
    for section, declared in vars(Config()).items():
        lines += [f"## [{section}]", inspect.getdoc(declared) or "", ""]
        lines += ["| option | value | default | on resume | what it does |", "|---|---|---|---|---|"]
        lines += [_row(option) for name, option in options().items() if name.split(".")[0] == section]
        lines.append("")
    lines += ["## Other names", "These keys are read as the options on the right.", ""]
    lines += ["| key | option |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED_KEYS.items()]
    return "\n".join(lines)


def _row(option: Option) -> str:
    resume = "fixed" if option.name in TRAJECTORY_KEYS else ""
    default = f"`{option.shown_default}`" if option.shown_default else "-"
    cells = [f"`{option.name}`", option.value, default, resume, " ".join(option.help.split())]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.stdout.write(reference() + "\n")
