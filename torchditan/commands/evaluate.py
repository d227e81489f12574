# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run's guided samples against real images, with a card that says how to repeat them (docs/evaluation.md).

torchditan evaluate outputs/quickstart
torchditan evaluate outputs/quickstart --sampling.num_steps 10 25 50 --sampling.guidance_scale 1 2 4
torchditan evaluate outputs/imagenet --metrics inception --num_samples 50000 --reference VIRTUAL_imagenet256.npz
torchditan evaluate --images samples.npz --reference reference.npz --metrics inception
torchditan evaluate outputs/scenes --metrics prompts
torchrun --nproc_per_node 8 -m torchditan evaluate outputs/imagenet --num_samples 50000
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchditan.config.command_line import (
    RUN_EXAMPLES,
    RunParser,
    add_float32_matmul_precision,
    check_output,
    count,
)
from torchditan.config.optional_libraries import import_optional
from torchditan.config.options import Sampling
from torchditan.errors import ConfigError, option_error
from torchditan.extras.evaluation import DEFAULT_METRICS, NUM_SAMPLES
from torchditan.extras.evaluation.card import CARD_FILE, Card
from torchditan.extras.evaluation.card_tables import table
from torchditan.extras.weights.shared import check_address
from torchditan.registry import METRICS
from torchditan.supervision.exit_status import OutOfMemory, is_out_of_memory

OF_SAMPLES = (
    *("num_samples", "step", "weights", "class_balance", "save_images", "rounding", "seeds"),
    *("float32_matmul_precision", "prompts"),
)
"""Options without effect on the images of a file."""
TIMEOUT_S = 6 * 3600
"""Rank 0 compares features while the others wait."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the remaining flags for the run's configuration. Imports no torch.

    Raises:
        ConfigError: an option is wrong, or has no effect together with another one.
    """
    parser = RunParser(__doc__, is_run_required=False)
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help=f"what to compute, any of {', '.join(METRICS)} (default: {' and '.join(DEFAULT_METRICS)}, if possible)",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        help="texts to draw in turn, or @FILE (default: those of the metric prompts, or training captions)",
    )
    parser.add_argument(
        "--num_samples", type=count, help=f"samples of each seed (default: {NUM_SAMPLES}, or fewer for a small dataset)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the noise (default: 1)")
    parser.add_argument("--seeds", type=count, default=1, help="number of seeds, from --seed on (default: 1)")
    parser.add_argument("--batch_size", type=count, default=250, help="samples at once on each rank (default: 250)")
    parser.add_argument(
        "--class_balance",
        choices=("data", "balanced", "random"),
        default="data",
        help="classes: as often as in the training images, equally often, or drawn at random (default: data)",
    )
    parser.add_argument(
        "--rounding",
        choices=("nearest", "down"),
        default="nearest",
        help="from the model's output to 8 bits (default: nearest; ADM's scripts round down)",
    )
    add_float32_matmul_precision(parser)
    parser.add_argument("--epochs", type=count, default=20, help="epochs of the classifier (default: 20)")
    parser.add_argument("--reference", type=Path, help=".npz of images or statistics that replaces the training images")
    parser.add_argument(
        "--without_data", action="store_true", help="with --reference: read no images of the run, so no copy check"
    )
    parser.add_argument("--images", type=Path, help=".npz of images to evaluate instead of the run's samples")
    parser.add_argument("--inception_weights", type=Path, help="weights file (default: torch-fidelity's, downloaded)")
    parser.add_argument(
        "--out", type=Path, help="folder of the card (default: in evaluation/ of the run, or outputs/NAME)"
    )
    parser.add_argument("--save_images", action="store_true", help="write the samples as samples.npz, as ADM's scripts")
    args, flags = parser.parse(argv)
    without_effect = [name for name in OF_SAMPLES if getattr(args, name) != parser.get_default(name)]
    check(args, [*(f"--{name}" for name in without_effect), *flags])
    return args, flags


def check(args: argparse.Namespace, of_samples: Sequence[str]) -> None:
    """Refuse arguments that do not go together. `of_samples`: those given that change only samples of a run."""
    if args.run is None and args.images is None:
        raise ConfigError(f"the following arguments are required: run, {RUN_EXAMPLES}; it comes before the options")
    if args.images is not None and of_samples:
        raise ConfigError(f"{of_samples[0]} has no effect with --images; leave it out")
    if args.reference is None and args.without_data:
        raise option_error("--without_data", True, "needs a --reference to compare with")
    if args.reference is None and args.run is None:
        raise option_error("--reference", None, "must be given with --images, or give the run whose data is compared")
    if args.out is not None:
        check_output("--out", args.out / CARD_FILE)


def split_flags(flags: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The flags that have one value, and `{"num_steps": ["1", "2"]}`: the options of [sampling] that have several.

    `--sampling.guidance_interval 0.2 0.8` is one value, as elsewhere; several are `0,1 0.2,0.8`.
    """
    from torchditan.sampling.drawing import sampling_settings

    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    fixed: list[str] = []
    several: dict[str, list[str]] = {}
    for group in groups:
        option, equals, first = group[0].partition("=")
        name, values = option.removeprefix("--sampling."), [*([first] if equals else []), *group[1:]]
        is_one = len(values) < 2 or (name == "guidance_interval" and not all("," in value for value in values))
        if is_one or option == name or name not in sampling_settings(Sampling()):
            fixed += group
        else:
            several[name] = list(dict.fromkeys(values))
    return fixed, several


def show(args: argparse.Namespace, points: Sequence[Mapping[str, str]], found: Sequence[tuple[Path, Card]]) -> None:
    """Print the figures; those of several values as one table, which is also written."""
    from torchditan.extras.evaluation.evaluation_run import note, short_hash
    from torchditan.extras.report.sampling_table import write_table

    folders, cards = zip(*found, strict=True)
    if points[0]:
        name = f"{'_'.join(points[0])}_{short_hash([folder.name for folder in folders])}"
        folder = args.out or folders[0].parent / name
        print(write_table(folder, points, cards))
        note(f"table and plot: {folder}")
    else:
        print(table(cards[0]))
    for name, reason in cards[0].other.items():
        if isinstance(reason, str):
            print(f"{name}: {reason}")


def main() -> None:
    args, flags = parse(sys.argv[1:])
    if args.run is not None:
        check_address(args.run)

    import torch
    import torch.distributed as dist

    from torchditan.distributed.cpu_threads import configure_cpu
    from torchditan.distributed.process_group import Rank, check_devices, init_process_group
    from torchditan.extras.evaluation.evaluation_run import evaluate

    configure_cpu()
    torch.set_float32_matmul_precision(args.float32_matmul_precision)
    rank = Rank.from_environment()
    check_devices(rank)
    if rank.world_size > 1:
        init_process_group(rank, timeout_seconds=TIMEOUT_S)
    try:
        fixed, several = split_flags(flags)
        points = [dict(zip(several, values, strict=True)) for values in itertools.product(*several.values())]
        if several:
            import_optional("matplotlib", extra="evaluation")  # before the slow work
        found = evaluate(args, fixed, points, rank)
        if rank.rank == 0:
            show(args, points, found)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except (MemoryError, RuntimeError, torch.OutOfMemoryError) as error:
        if not is_out_of_memory(error):
            raise
        right = "finished samples are kept; run the same command again, while drawing with a smaller --batch_size"
        raise OutOfMemory(f"out of memory at --batch_size = {args.batch_size}: {right}") from None
