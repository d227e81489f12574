# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plan a run without a GPU: memory of each device, a lower bound of the time, the settings that fit.

torchditan plan dit_7b --device a100-80gb --num_devices 8
torchditan plan dit_7b --device h100 --num_devices 8 --training.batch_size 4
torchditan plan sd3_medium_lora_int8 --device l4 --dataset.image_size 1024
"""

from __future__ import annotations

import argparse
import sys

from torchditan.config.command_line import ScriptParser, count
from torchditan.supervision.exit_status import reader_may_leave, run_job

_SECTIONS = (
    "model",
    "lora",
    "quantize",
    "text_encoder",
    "dataset",
    "autoencoder",
    "diffusion",
    "training",
    "activation_checkpoint",
    "compile",
    "float8",
    "ema",
    "optimizer.name",
)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this tool, and the remaining flags for the configuration."""
    parser = ScriptParser(__doc__, options=_SECTIONS)
    parser.add_argument("config", help="configuration: a path, or a name in train_configs/")
    parser.add_argument("--device", help="required: accelerator, for example a100-80gb; cpu plans only memory")
    parser.add_argument("--num_devices", type=count, default=1, help="devices of the run (default: 1)")
    arguments, flags = parser.parse(argv)
    if arguments.device is None:
        from torchditan.extras.planner.devices import NAMES

        parser.error(f"the following arguments are required: --device, one of {', '.join(NAMES)}")
    return arguments, flags


@reader_may_leave()
def main() -> None:
    args, flags = parse(sys.argv[1:])

    from torchditan.config.loader import load_config
    from torchditan.extras.planner import plan_report as report
    from torchditan.extras.planner.alternatives import alternatives, is_better
    from torchditan.extras.planner.plan import plan_run
    from torchditan.run.progress import report_progress

    config = load_config(["--job.config_file", args.config, *flags])
    with report_progress("planning"):
        plan = plan_run(config, device=args.device, num_devices=args.num_devices)
    print(report.describe(plan))
    if plan.device is None:
        return
    of_any_global_batch = config.replace({"training.global_batch_size": None})
    with report_progress("planning other settings"):
        found, without_limit = (
            alternatives(job, args.device, args.num_devices, batch_size=plan.batch_size)
            for job in (config, of_any_global_batch)
        )
    best, other = found[0].largest, without_limit[0].largest
    print(f"\n{report.comparison(found)}")
    print(report.recommendation(best))
    if is_better(other, best):
        print(report.other_global_batch(other, best))
    print(f"\n{report.NOTE}")


if __name__ == "__main__":
    sys.exit(run_job(main))
