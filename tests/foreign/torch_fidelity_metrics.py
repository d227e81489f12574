# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torch-fidelity's tests of its metrics on our evaluator: batch sizes, precision and recall, the Fréchet distance.

    python tests/foreign/torch_fidelity_metrics.py --source TORCH_FIDELITY_CHECKOUT

The network of the batch-size tests is our Inception-2015 with random weights: the published ones need a download.
torch-fidelity imports torchvision for data sets and other networks: names imported from it stand for nothing.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import foreign_suite
import torch
from torch import Tensor, nn

from torchditan.evaluation import neighbours
from torchditan.evaluation.distances import Gaussian, frechet_distance
from torchditan.evaluation.extractors import Extractor
from torchditan.evaluation.inception import NUM_POOL_FEATURES, Inception2015
from torchditan.evaluation.metric import Evaluation, Pictures
from torchditan.evaluation.quality import Quality, inception_score

TESTS = (
    "tests/torch_pure/batching/test_batchsize_independence.py",
    "tests/torch_pure/misc/test_prc_convention.py",
    "tests/torch_pure/misc/test_fid_stats_fn.py",
)
NETWORK = "a network that our evaluator does not have"
SKIPPED = {
    "*_vgg16fe_*": NETWORK,
    "*_clipfe_*": NETWORK,
    "*_dinov2fe_*": NETWORK,
    "*_fp64_*": "float64 features; ours are float32",
    "*_fp32_cuda": "needs a GPU",
}
LOGIT_SCALE = 2
"""Of the weights of the last layer: logits of deviation 0.8 over pictures, scores of 1.2 to 1.3."""


@functools.cache
def network() -> Inception2015:
    """With random weights that keep the size of activations, and logits that differ between pictures of noise.

    The features of such pictures are alike. The last layer ignores what they share, or one class would have all of the
    probability, and every score would be 1.
    """
    torch.manual_seed(0)
    model = Inception2015()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    noise = torch.randint(0, 255, (8, 3, 299, 299), dtype=torch.uint8)
    shared = nn.functional.normalize(model(noise).pool.mean(0), dim=0)
    nn.init.normal_(model.fc.weight, std=LOGIT_SCALE)
    model.fc.weight.sub_((model.fc.weight @ shared).outer(shared))
    return model


class OurQuality(Quality):
    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        return Extractor(
            name="random",
            sha256="",
            num_features=NUM_POOL_FEATURES,
            network=network(),
            device=torch.device("cpu"),
        )


def calculate_metrics(input1: Any, *, isc_splits: int, batch_size: int, **without: Any) -> dict[str, float]:
    """The Inception Score of a dataset whose pictures our evaluator receives in batches of `batch_size`."""
    quality = OurQuality(Evaluation(class_names=[], seed=0))
    images = torch.stack([input1[i] for i in range(len(input1))])
    batches = zip(images.split(batch_size), torch.arange(len(images)).split(batch_size), strict=True)
    for batch, numbers in batches:
        quality.update(Pictures(batch, labels=None, numbers=numbers, source="generated"))
    logits = quality.state("generated")["logits"]
    score = inception_score(logits, images_per_split=len(images) // isc_splits)
    print(f"Inception Score {score} of {len(images)} images in batches of {batch_size}")
    return {"inception_score_mean": score}


def precision_and_recall(generated: Tensor, real: Tensor, *, batch_size: int = neighbours.BLOCK) -> tuple[float, float]:
    with mock.patch.object(neighbours, "BLOCK", batch_size):
        figures, _ = neighbours.compare_with_halves(generated, real)
    return figures.precision, figures.recall


def distance(first: dict[str, Any], second: dict[str, Any], *, verbose: bool) -> dict[str, float]:
    gaussians = [Gaussian(torch.from_numpy(one["mu"]), torch.from_numpy(one["sigma"])) for one in (first, second)]
    return {"frechet_inception_distance": frechet_distance(*gaussians)}


def replace(module: ModuleType) -> None:
    ours = {
        "calculate_metrics": calculate_metrics,
        "calculate_precision_recall_full": precision_and_recall,
        "calculate_precision_recall_part": precision_and_recall,
        "impl_lib": distance,
    }
    for name, function in ours.items():
        if hasattr(module, name):
            setattr(module, name, function)


if __name__ == "__main__":
    foreign_suite.stand_in_for(["torchvision"])
    sys.exit(foreign_suite.main(__doc__ or "", tests=TESTS, replace=replace, skipped=SKIPPED))
