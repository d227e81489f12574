# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The configurations in train_configs/, each with a line, its hardware and its cost; and the models that ship."""

from __future__ import annotations

import sys

from torchditan.config.command_line import ScriptParser
from torchditan.config.loader import describe_configurations
from torchditan.extras.weights.shared import shipped_models
from torchditan.supervision.exit_status import reader_may_leave


@reader_may_leave()
def main() -> None:
    ScriptParser(__doc__, options=()).parse_args(sys.argv[1:])
    print(describe_configurations())
    for model in shipped_models():
        print(f"`torchditan generate {model}` draws from the trained model that ships with this package.")
