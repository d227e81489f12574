#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train a diffusion transformer: `python train.py --job.config_file quickstart.toml` (several ranks: torchrun)."""

from __future__ import annotations

import os
import sys


def main() -> None:
    # What imports no torch comes first: torch takes seconds.
    from data.options import check_root
    from torchditan.config.errors import option_error
    from torchditan.config.loader import describe_configurations, parse_config, to_toml
    from torchditan.run.directory import run_path

    is_first = os.environ.get("RANK", "0") == "0"
    if not sys.argv[1:]:
        if is_first:
            print(describe_configurations(), flush=True)
        right = "must be one of these names, or a path: python train.py --job.config_file quickstart"
        raise option_error("job.config_file", None, right)
    config = parse_config(sys.argv[1:])
    check_root(config.dataset)
    if is_first and not config.job.print_config:
        print(f"starting {run_path(config.job.dump_folder, str(config.metrics.experiment_name))}", flush=True)

    from torchditan.job.prepare import prepare
    from torchditan.trainer import Trainer

    job = prepare(config)
    if config.job.print_config:
        if is_first:
            print(to_toml(config if job is None else job.config))
    elif job is not None:
        Trainer(job).train()


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
