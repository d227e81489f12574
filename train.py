#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train a diffusion transformer: `python train.py --job.config_file quickstart.toml` (several ranks: torchrun)."""

from __future__ import annotations

import sys


def main() -> None:
    from torchditan.config.loader import load_config, to_toml
    from torchditan.config.options import dataset_channels

    config = load_config(sys.argv[1:])

    from data import build_dataset
    from torchditan.distributed.process_group import Rank
    from torchditan.job.optional_parts import choose_parts
    from torchditan.job.prepare import prepare_job
    from torchditan.run.progress import report_progress
    from torchditan.trainer import run

    channels = dataset_channels(config)
    validation = None
    with report_progress(f"opening {config.dataset.dataset_name}"):
        train = build_dataset(config.dataset, split="train", input_channels=channels)
        if config.validation.freq or config.evaluation.freq:
            validation = build_dataset(config.dataset, split="validation", input_channels=channels)
    job = prepare_job(config, train, validation, **choose_parts(config, train))
    if config.job.print_config:
        if Rank.from_environment().rank == 0:
            print(to_toml(config if job is None else job.config))
    elif job is not None:
        run(job)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
