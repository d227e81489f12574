# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train a diffusion transformer: `torchditan train quickstart`, or `python train.py --job.config_file quickstart`.

`--preview` only shows what would be trained: a description of the data, and a picture of 16 samples.

Several ranks: `torchrun --nproc_per_node 8 -m torchditan train NAME`, or `torchrun --nproc_per_node 8 train.py ...`.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    # What imports no torch comes first: torch takes seconds.
    from torchditan.config.loader import describe_configurations, parse_config, to_toml
    from torchditan.datasets.options import check_root
    from torchditan.errors import option_error
    from torchditan.run.directory import run_path

    is_first = os.environ.get("RANK", "0") == "0"
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        argv[:1] = ["--job.config_file", argv[0]]
    if not argv:
        if is_first:
            print(describe_configurations(), flush=True)
        right = "must be one of these names, or a path: torchditan train quickstart"
        raise option_error("job.config_file", None, right)
    is_preview = "--preview" in argv
    config = parse_config([flag for flag in argv if flag != "--preview"])
    check_root(config.dataset)
    if is_preview:
        from torchditan.commands.preview import preview

        if is_first:
            print("\n".join(preview(config)))
        return
    if is_first and not config.job.print_config:
        print(f"starting {run_path(config)}", flush=True)

    from torchditan.job.prepare import prepare
    from torchditan.trainer import Trainer

    job = prepare(config)
    if config.job.print_config:
        if is_first:
            print(to_toml(config if job is None else job.config))
    elif job is not None:
        Trainer(job).train()
