# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Compare the cards of evaluations: one table with a column per card, the settings that differ on top.

torchditan compare outputs/seed0/evaluation/* outputs/seed1/evaluation/*
torchditan compare card_1.json card_2.json --out comparison.md

A card is a card.json of torchditan evaluate, or its folder. For cards that differ only in the training seed, the mean
and the spread over training seeds follow, apart from the intervals of sampling.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    from torchditan.config.command_line import ScriptParser, check_output
    from torchditan.config.errors import option_error

    parser = ScriptParser(__doc__, options=())
    parser.add_argument("cards", type=Path, nargs="+", metavar="CARD", help="card.json, or its folder; two or more")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the comparison to this file")
    args, _ = parser.parse(sys.argv[1:])
    if args.out is not None:
        check_output("--out", args.out)

    from torchditan.evaluation.card import CARD_FILE, read_card
    from torchditan.evaluation.card_tables import comparison
    from torchditan.run.atomic_files import write_file

    files = [path / CARD_FILE if path.is_dir() else path for path in args.cards]
    if len({file.resolve() for file in files}) < max(2, len(files)):
        raise option_error("CARD", [str(path) for path in args.cards], "must be two or more different cards")
    text = comparison([read_card(path) for path in args.cards])
    if args.out is not None:
        write_file(args.out, text.encode())
    print(text, end="")
