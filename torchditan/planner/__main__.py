# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plan a run without a GPU: memory of each device, time of a step, the settings that fit.

python -m torchditan.planner dit_7b --device a100-80gb --num_devices 8
python -m torchditan.planner dit_7b --device h100 --num_devices 8 --training.batch_size 4
python -m torchditan.planner dit_7b --device h100 --num_devices 8 --sweep --price_per_hour 2.5
python -m torchditan.planner sd3_medium_lora_int8 --device l4 --dataset.image_size 1024
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchditan.config.command_line import ScriptParser, check_output, count, positive
from torchditan.config.errors import option_error
from torchditan.config.options import Config
from torchditan.planner.alternatives import alternatives, parallel_modes, ranking
from torchditan.planner.plan import Plan, largest_batch, plan_run, with_options

__all__ = ["Plan", "largest_batch", "plan_run"]

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
_SWEEP = [2**power for power in range(3, 13)]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this tool, and the remaining flags for the configuration."""
    parser = ScriptParser(__doc__, options=_SECTIONS)
    parser.prog = "python -m torchditan.planner"
    parser.add_argument("config", help="configuration of train.py: a path, or a name in train_configs/")
    parser.add_argument("--device", required=True, help="accelerator, for example a100-80gb; cpu plans only memory")
    parser.add_argument("--num_devices", type=count, default=1, help="devices of the run (default: 1)")
    parser.add_argument("--sweep", action="store_true", help="also plan 8 to 4096 devices: a table and a plot")
    parser.add_argument("--plot", type=Path, default=Path("plan.svg"), help="plot of --sweep (default: plan.svg)")
    parser.add_argument("--price_per_hour", type=positive, help="price of a device for an hour: adds the run's cost")
    return parser.parse(argv)


def main() -> None:
    args, flags = parse(sys.argv[1:])

    from torchditan.config.loader import load_config
    from torchditan.planner import plan_report as report
    from torchditan.run.atomic_files import write_file
    from torchditan.run.progress import report_progress

    check_output("--plot", args.plot)
    config = load_config(["--job.config_file", args.config, *flags])
    with report_progress("planning"):
        plan = plan_run(config, device=args.device, num_devices=args.num_devices)
    if plan.time is None and (args.sweep or args.price_per_hour):
        option, value = ("--sweep", True) if args.sweep else ("--price_per_hour", args.price_per_hour)
        right = "needs modelled times, which are not available for cpu or training.enable_cpu_offload; leave it out"
        raise option_error(option, value, right)
    print(report.describe(plan, config, price_per_hour=args.price_per_hour))
    if plan.time is None:
        return
    of_any_global_batch = config.replace({"training.global_batch_size": None})
    with report_progress("planning other settings"):
        largest = alternatives(config, args.device, args.num_devices)
        without_limit = alternatives(of_any_global_batch, args.device, args.num_devices)
        same_batch = at_one_batch(config, largest, args.device, plan.batch_size)
    print(f"\n{report.comparison(same_batch, largest)}")
    print(report.recommendation(largest))
    if ranking(without_limit[0]) < ranking(largest[0]):
        print(report.other_global_batch(without_limit[0], largest[0]))
    if args.sweep:
        plans = sweep(of_any_global_batch, args.device, plan.batch_size)
        print(f"\nestimates for the same batch per device on more devices:\n{report.scaling(plans)}")
        title = f"{report.model_name(config)} on {args.device}"
        write_file(args.plot, report.scaling_svg(plans, title).encode())
        print(f"plot: {args.plot}")
    print(f"\n{report.assumptions()}")


def at_one_batch(config: Config, largest: list[Plan], device: str, batch_size: int) -> list[Plan]:
    """The settings of these plans, all with the same batch per device."""
    plans = []
    for plan in largest:
        mode, *option = plan.checkpointing.split()
        changed = with_options(
            config,
            batch_size=batch_size,
            replicate=plan.replicate,
            shard=plan.shard,
            mode=mode,
            option=option[0] if option else None,
        )
        plans.append(plan_run(changed, device=device, num_devices=plan.num_devices))
    return plans


def sweep(config: Config, device: str, batch_size: int) -> list[Plan]:
    """The same batch per device on 8 to 4096 devices, in every parallel mode."""
    return [
        plan_run(
            with_options(config, batch_size=batch_size, replicate=replicate, shard=shard),
            device=device,
            num_devices=num_devices,
        )
        for num_devices in _SWEEP
        for replicate, shard in parallel_modes(config, num_devices, device)
    ]


if __name__ == "__main__":
    from torchditan.supervision.exit_status import reader_may_leave, run_job

    sys.exit(run_job(reader_may_leave()(main)))
