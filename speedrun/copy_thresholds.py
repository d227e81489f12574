#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How near to training images are real images of other places? `python speedrun/copy_thresholds.py`, a few minutes.

The samples of a perfect model are like such images, so the check against copies has to let them pass. Earth holds out
one tenth of the world. The training crops of each other tenth are compared with it: both have their nearest crop in the
rest of the training set. A row also shows the figures after a twentieth of its images became copies.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import FOLDER
from ladder import MOST_CLOSER, MOST_CLOSEST

sys.path.insert(0, str(FOLDER.parent))  # a clone that is not installed works too

from torchditan.config.command_line import ScriptParser
from torchditan.datasets.earth import BLOCK, Crop, Earth
from torchditan.errors import ConfigError
from torchditan.extras.evaluation.efficientnet_lite import open_effnet
from torchditan.extras.evaluation.metric import Evaluation
from torchditan.extras.evaluation.neighbours import nearest_distances, share_closer, share_very_close
from torchditan.run.progress import report_progress

SIZE = 32
COPIES = 0.05


def tenths(crop: Crop) -> set[int]:
    """The tenths of the world that a crop overlaps, 0 to 9. Earth holds out tenth 0."""
    corners = [(crop.top + down, crop.left + right) for down in (0, SIZE - 1) for right in (0, SIZE - 1)]
    return {(left // BLOCK + 3 * (top // BLOCK)) % 10 for top, left in corners}


def main() -> None:
    _, rest = ScriptParser(__doc__, options=()).parse(sys.argv[1:])
    if rest:
        raise ConfigError(f"{rest[0]} is not expected")
    train, held_out = (Earth(size=SIZE, split=split) for split in ("train", "validation"))
    extractor = open_effnet(Evaluation(class_names=train.class_names, seed=0))
    with report_progress("features"):
        features, others = (
            extractor(torch.from_numpy(part.pixels).permute(0, 3, 1, 2)).pool for part in (train, held_out)
        )
    places = [tenths(crop) for crop in train.crops]
    print(f"with {COPIES:.0%} copies in brackets; the check allows {MOST_CLOSER} and {MOST_CLOSEST}")
    print("tenth  crops  closer than held-out  closest 1%")
    shares = []
    for tenth in range(1, 10):
        inside = torch.tensor([place == {tenth} for place in places])
        outside = torch.tensor([tenth not in place for place in places])
        held_out_distances, _ = nearest_distances(others, features[outside])
        distances, _ = nearest_distances(features[inside], features[outside])
        copied = distances.clone()
        copied[:: round(1 / COPIES)] = 0
        (closer, closest), (closer_copied, closest_copied) = (
            (share_closer(each, held_out_distances), share_very_close(each, held_out_distances))
            for each in (distances, copied)
        )
        shares.append(closer)
        row = f"{closer:10.3f} ({closer_copied:.3f})  {closest:10.3f} ({closest_copied:.3f})"
        print(f"{tenth:5}  {len(distances):5}  {row}")
    values = torch.tensor(shares)
    print(f"closer than held-out: mean {values.mean():.3f}, standard deviation {values.std():.3f}")


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
