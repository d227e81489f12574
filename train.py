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
    from torchditan.config.options import dataset_channels
    from torchditan.config.rules import validate_parts
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
    validate_parts(config)

    from data import build_dataset
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
        if is_first:
            print(to_toml(config if job is None else job.config))
    elif job is not None:
        run(job)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
