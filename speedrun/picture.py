# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Scored samples of entries next to training images: `python -m speedrun.picture muon_batch_16 official_dit --seed 10`.

It reads what `torchditan speedrun earth ENTRY --seeds 10` left in outputs/speedrun. The first samples of each class are
shown, so the entries have the same noise, and nobody chose them. Training images are drawn at random.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from speedrun.entries import load, load_track
from speedrun.run import Trial
from torchditan.config.command_line import ScriptParser, check_output, count
from torchditan.datasets.earth import Earth
from torchditan.errors import ConfigError, option_error
from torchditan.extras.evaluation.class_balance import order_of_classes
from torchditan.run.atomic_files import write_file
from torchditan.sampling.grid_picture import draw

MOST_ENTRIES = 3
NUM_SAMPLES = 2048  # as in earth/track.toml


def of_each_class(images: np.ndarray, labels: np.ndarray, *, num_classes: int, columns: int) -> Tensor:
    """The first images of each class: (N, H, W, 3) uint8 -> (classes, columns, H, W, 3)."""
    rows = [images[np.flatnonzero(labels == label)[:columns]] for label in range(num_classes)]
    return torch.from_numpy(np.stack(rows))


def heading_and_samples(trial: Trial) -> tuple[str, np.ndarray]:
    """What to write above an entry's samples, and the samples, (N, H, W, 3) uint8.

    Raises:
        ConfigError: they are not there.
    """
    samples = trial.evaluation / "samples.npz"
    is_scored = trial.result_path.exists()
    if not (is_scored and samples.exists()):
        command = f"torchditan speedrun earth {trial.entry.name} --seeds {trial.seed}"
        # Without --check, the command does not repeat a result.
        made = f"{command} --check makes it in outputs/speedrun/earth/check" if is_scored else f"{command} makes it"
        raise ConfigError(f"{samples} does not exist; {made}")
    figures = json.loads(trial.result_path.read_bytes())["figures"]
    heading = f"{trial.entry.name}: {trial.entry.images:,} images, FD-EffNetLite0 {figures['fd']:.1f}"
    with np.load(samples) as file:
        return heading, file["arr_0"]


def main() -> None:
    parser = ScriptParser(__doc__, options=())
    add = parser.add_argument
    add(
        "entries", metavar="ENTRY", nargs="+", help=f"names of files in speedrun/earth/entries/, at most {MOST_ENTRIES}"
    )
    add("--seed", type=int, default=10, help="training seed (default: 10)")
    add("--columns", type=count, default=5, help="samples of each class (default: 5)")
    add("--outputs", type=Path, default=Path("outputs/speedrun/earth"), help="folder of the runs")
    add("--out", type=Path, default=Path("speedrun.png"), help="picture to write (default: speedrun.png)")
    args, rest = parser.parse(sys.argv[1:])
    if rest or len(args.entries) > MOST_ENTRIES:
        raise ConfigError(f"{(rest or args.entries)[-1]} is not expected; a picture has at most {MOST_ENTRIES} entries")
    check_output("--out", args.out)
    track = load_track("earth")
    trials = [Trial(load(track, name), args.seed, {}, args.outputs, track.results) for name in args.entries]
    found = [heading_and_samples(trial) for trial in trials]

    real = Earth(size=32, split="train")
    num_classes = len(real.class_names)
    counts = np.bincount(real.class_labels, minlength=num_classes).tolist()
    labels = order_of_classes(
        NUM_SAMPLES, num_classes=num_classes, class_balance="data", class_counts=counts, seed=0
    ).numpy()
    if args.columns > np.bincount(labels).min():
        right = f"must be at most {np.bincount(labels).min()}, the samples of the rarest class"
        raise option_error("--columns", args.columns, right)
    drawn = [*((heading, images, labels) for heading, images in found)]
    places = np.random.default_rng(0).permutation(len(real))  # the first crops of a class are neighbours
    drawn.append(("training images", real.pixels[places], real.class_labels[places]))
    blocks = [
        (heading, of_each_class(images, labels, num_classes=num_classes, columns=args.columns))
        for heading, images, labels in drawn
    ]
    title = f"The first samples of each class, training seed {args.seed}"
    picture, _ = draw(blocks, real.class_names, title, scale=2)
    encoded = io.BytesIO()
    picture.save(encoded, format="PNG")
    write_file(args.out, encoded.getvalue())
    print(args.out)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
