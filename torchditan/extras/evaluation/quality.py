# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metrics `effnet` and `inception`: every figure that compares features of generated and real images.

| figure | meaning | good |
|---|---|---|
| FID, sFID | Fréchet distance of pooled and of spatial features to the reference | low |
| FD | Fréchet distance of another extractor than Inception-2015 | low |
| IS | Inception Score: splits of 5,000 images; one split if there are fewer | high |
| KID | kernel distance: 100 subsets of 1,000; a smaller set is in each subset as a whole | 0 |
| precision, recall | share of generated (real) images near a real (generated) one, k = 3 | high |
| density, coverage | real images near a generated one; share of real images with one near, k = 5 | high |
| KID to held-out | kernel distance to the held-out images | like that of the reference to them, held-out KID |
| held-out FD, held-out KID | the same distance of held-out images: the floor at that many images | |
| copies: closer than held-out | P(generated image is closer to its nearest training image than a held-out one) | 0.5 |
| copies: closest 1% | share of generated images closer than 99% of held-out ones | 0.01 |
| copies: distance | median distance of a generated image to its nearest training image | |
| copies: held-out distance | the same of a held-out image | |

Figures of Inception-2015 have these names; those of another extractor end with its name, as in `KID-EffNetLite0`.

Notable:
- the reference is the training images, or `Evaluation.reference`. Copies are always of training images;
- fewer training images than features have no FID, sFID and FD; the other figures are computed;
- features are kept, not images: for 50,000 images 0.24 GiB with EfficientNet-Lite0, 0.94 GiB with Inception-2015;
- features are sorted before they are compared, so neither the number of ranks nor the order of batches changes a bit;
- halves alternate in the order of labels, then numbers, so both have the same classes. A half with too few images for
  a covariance of full rank has no Fréchet distance;
- splits of the Inception Score are consecutive images in the order of numbers, whose labels are in random order, as in
  ADM's evaluator. Splits with equal class counts would score higher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchditan.errors import ConfigError
from torchditan.extras.evaluation.distances import (
    FeatureStatistics,
    Gaussian,
    frechet_distance,
    gaussian_of,
    inception_score,
    kernel_distance,
    require_full_rank,
    statistics_of,
)
from torchditan.extras.evaluation.efficientnet_lite import open_effnet
from torchditan.extras.evaluation.extractors import CachedFeatures, Extractor, full_float32, join_features
from torchditan.extras.evaluation.inception import open_inception
from torchditan.extras.evaluation.metric import Evaluation, Figure, Pictures, Source
from torchditan.extras.evaluation.neighbours import (
    K_DENSITY_COVERAGE,
    K_PRECISION_RECALL,
    compare_with_halves,
    nearest_distances,
    real_radii,
    require_neighbours,
    share_closer,
    share_very_close,
)
from torchditan.extras.evaluation.sample_batches import (
    check_same_size,
    has_images,
    image_shape,
    read_images,
    read_statistics,
)
from torchditan.run.progress import report_progress

READ_AT_A_TIME = 256
"""Images of a reference file in one batch of the cache."""
FEWEST_HELD_OUT = 20
"""Held-out images for an interval of the copy check: it covers the choice of samples, and not that of so few images."""


class Reference(NamedTuple):
    """The images that generated ones should resemble; kept on the CPU, and compared on the extractor's device."""

    pool: Tensor | None
    """(M, D) features; None if a file has statistics only."""
    radii: Tensor | None
    """`real_radii(pool)`."""
    gaussian: Gaussian | None
    """None for so few images that their covariance has no full rank."""
    spatial: Gaussian | None

    def to(self, device: torch.device | str) -> Reference:
        moved: Any = (None if part is None else part.to(device) for part in self)
        return Reference(*moved)


class Quality:
    """All figures of one extractor, a `Metric`. A subclass opens the extractor; one line in `METRICS` adds it.

    Raises:
        ConfigError: the weights are missing or are others, the reference file belongs to another extractor, or a file
            of the cache is damaged.
    """

    needs_labels: ClassVar[bool] = False
    verdicts: ClassVar[Mapping[str, bool]] = {}

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.extractor = self.open_extractor(evaluation)
        self.extractors = {self.extractor.name: self.extractor.sha256}
        self._extract_real = CachedFeatures(self.extractor, evaluation.cache_folder)
        path = evaluation.reference
        self._file_statistics = (None, None) if path is None else self._read_file_statistics(path)
        self._parts: dict[str, list[dict[str, Tensor]]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._of_real: dict[str, Any] = {}
        """Computed from real images at the first `compute`, and kept for further sampling seeds. On the CPU: during
        training, the model needs the memory of the device between evaluations."""

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        raise NotImplementedError

    def name_of(self, figure: str) -> str:
        """The full name of a figure of the table above."""
        return f"{figure}-{self.extractor.name}"

    def check(self, counts: Mapping[Source, int], *, image_size: tuple[int, int]) -> None:
        """Refuse too few generated, training or reference images, and a reference of another size.

        With too few training images for a Fréchet distance, the other figures are still computed.
        """
        path, num_features, name = self.evaluation.reference, self.extractor.num_features, self.evaluation.samples_name
        if path is not None or counts["train"] > num_features:
            require_full_rank(counts["generated"], num_features, name=name)
        if path is None:
            require_neighbours(counts["generated"], K_PRECISION_RECALL, name=name)
            require_neighbours(counts["train"], K_DENSITY_COVERAGE, name="training images")
            return
        num_images = 0
        if has_images(path):
            num_images, *size = image_shape(path)
            check_same_size(image_size, (size[0], size[1]), name=str(path))
            require_neighbours(num_images, K_DENSITY_COVERAGE, name=str(path))
        if self._file_statistics[0] is None:
            require_full_rank(num_images, num_features, name=str(path))

    def update(self, pictures: Pictures) -> None:
        """Add a batch. Sources and pictures come in any order.

        Raises:
            ConfigError: generated and training images, which are the reference, have two sizes.
        """
        self._sizes[pictures.source] = (pictures.images.shape[2], pictures.images.shape[3])
        has_file, is_generated = self.evaluation.reference is not None, pictures.source == "generated"
        if not has_file and {"generated", "train"} <= self._sizes.keys():
            check_same_size(self._sizes["generated"], self._sizes["train"], name="training images")
        features = (self.extractor if is_generated else self._extract_real)(pictures.images)
        part = {"numbers": pictures.numbers, "pool": features.pool}
        if features.spatial is not None and (is_generated or (pictures.source == "train" and not has_file)):
            part["spatial"] = features.spatial
        if features.logits is not None and is_generated:
            part["logits"] = features.logits
        if pictures.labels is not None and is_generated:
            part["labels"] = pictures.labels
        self.merge(part, pictures.source)

    def state(self, source: Source) -> dict[str, Tensor]:
        return dict(self._sorted(source))

    def merge(self, state: Mapping[str, Tensor], source: Source) -> None:
        if state:
            self._parts.setdefault(source, []).append(dict(state))
            self._forget_real(source)

    def forget(self, source: Source) -> None:
        self._parts.pop(source, None)
        self._sizes.pop(source, None)
        self._forget_real(source)

    def _forget_real(self, source: Source) -> None:
        if source != "generated":
            self._of_real.clear()

    def _kept(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives for the real images, computed once."""
        if name not in self._of_real:
            self._of_real[name] = compute()
        return self._of_real[name]

    def compute(self) -> dict[str, Any]:
        """The figures of the table above by their full names; copies and floor only with held-out images.

        Raises:
            ConfigError: the reference file cannot be read.
        """
        comparisons = (
            *(self._frechet, self._inception_score, self._kernel),
            *(self._neighbours, self._floor_figures, self._copies),
        )
        results: dict[str, Any] = {}
        what, total = f"comparing features of {self.extractor.name}", 1 + len(comparisons)
        with report_progress(what, total=total, unit="parts") as advance, full_float32(self.extractor.device):
            reference = self._kept("reference", self._open_reference).to(self.extractor.device)
            pool = self._pool("generated")
            advance(1)
            for compare in comparisons:
                results |= compare(pool, reference)
                advance(1)
        return {
            self.name_of(name): one._replace(extractor=self.extractor.name) if isinstance(one, Figure) else one
            for name, one in results.items()
        }

    def _frechet(self, pool: Tensor, reference: Reference) -> dict[str, Any]:
        """FD and sFD, or the reason why there is none."""
        num_features = self.extractor.num_features
        if reference.gaussian is None:
            found = len(self._sorted("train")["pool"])
            return {"FD": f"not computed: {found:,} training images are too few, must be more than {num_features:,}"}
        figures = {"FD": frechet_figure(pool, reference.gaussian)}
        spatial = self._sorted("generated").get("spatial")
        if spatial is not None and reference.spatial is not None:
            figures["sFD"] = frechet_figure(spatial.to(pool.device), reference.spatial)
        return figures

    def _inception_score(self, pool: Tensor, reference: Reference) -> dict[str, Figure]:
        generated = self._sorted("generated")
        if "logits" not in generated:
            return {}
        in_order = generated["logits"][generated["numbers"].argsort()]
        return {"IS": with_halves(inception_score, in_order)}

    def _kernel(self, pool: Tensor, reference: Reference) -> dict[str, Figure]:
        others = {"KID": reference.pool, "KID to held-out": self._pool("held_out")}
        return {
            name: with_halves(partial(kernel_distance, references=other), pool, smallest=2)
            for name, other in others.items()
            if other is not None and len(other) > 1
        }

    def _neighbours(self, pool: Tensor, reference: Reference) -> dict[str, Figure]:
        """Precision, recall, density and coverage."""
        if reference.pool is None:
            return {}
        whole, halves = compare_with_halves(pool, reference.pool, radii=reference.radii)
        return {
            name: Figure(value, len(pool), None if halves is None else (halves[0][i], halves[1][i]))
            for i, (name, value) in enumerate(whole._asdict().items())
        }

    def _floor_figures(self, pool: Tensor, reference: Reference) -> dict[str, Figure]:
        """Distances of held-out images: Fréchet if their covariance has full rank, KID from two images on."""
        held_out, floor = self._pool("held_out"), {}
        if len(held_out) > self.extractor.num_features and reference.gaussian is not None:
            gaussian = reference.gaussian
            distance = self._kept("held-out FD", lambda: frechet_distance(gaussian, gaussian_of(held_out)))
            floor["held-out FD"] = Figure(distance, len(held_out))
        if len(held_out) > 1 and reference.pool is not None:
            train = reference.pool
            distance = self._kept("held-out KID", lambda: kernel_distance(held_out, train))
            floor["held-out KID"] = Figure(distance, len(held_out))
        return floor

    def _copies(self, pool: Tensor, reference: Reference) -> dict[str, Any]:
        if not (self._parts.get("held_out") and self._parts.get("train")):
            return {"copies": "not computed: needs held-out images and training images"}
        training = self._pool("train")
        distances, _ = nearest_distances(pool, training)
        held_out = self._kept("distances", lambda: nearest_distances(self._pool("held_out"), training)[0].cpu()).to(
            pool.device
        )
        figures = {
            "copies: closer than held-out": with_halves(lambda part: share_closer(part, held_out), distances),
            "copies: closest 1%": with_halves(lambda part: share_very_close(part, held_out), distances),
            "copies: distance": with_halves(lambda part: part.median().item(), distances),
            "copies: held-out distance": Figure(held_out.median().item(), len(held_out)),
        }
        if len(held_out) >= FEWEST_HELD_OUT:
            return figures
        why = f"not given: {len(held_out)} held-out images, fewer than {FEWEST_HELD_OUT}"
        return {name: figure._replace(no_interval=why) for name, figure in figures.items()}

    def _open_reference(self) -> Reference:
        """The training images, or the images and statistics of a file. One that lacks `mu_s` gives no sFD."""
        path, (gaussian, spatial_gaussian) = self.evaluation.reference, self._file_statistics
        device = self.extractor.device
        if path is None:
            train = self._sorted("train")
            pool, spatial = train["pool"], train.get("spatial")
        elif has_images(path):
            batches = read_images(path, batch_size=READ_AT_A_TIME)
            features = join_features([self._extract_real(images) for images in batches])
            pool, spatial = features.pool, features.spatial
        else:
            return Reference(None, None, gaussian, spatial_gaussian)
        if gaussian is None and len(pool) > pool.shape[1]:
            gaussian = gaussian_of(pool.to(device)).to("cpu")
            spatial_gaussian = None if spatial is None else gaussian_of(spatial.to(device)).to("cpu")
        return Reference(pool, real_radii(pool.to(device)).cpu(), gaussian, spatial_gaussian)

    def _read_file_statistics(self, path: Path) -> tuple[Gaussian | None, Gaussian | None]:
        found = read_statistics(path, extractor=self.extractor.name)
        pool, num_features = found[0], self.extractor.num_features
        if pool is None and not has_images(path):
            raise ConfigError(f"{path}: has neither images (arr_0) nor statistics (mu, sigma)")
        if pool is not None and len(pool.mean) != num_features:
            raise ConfigError(f"{path}: its statistics are of {len(pool.mean)} features, must be {num_features}")
        return found

    def _pool(self, source: Source) -> Tensor:
        """Sorted pooled features (N, D) of a source, on the device; N is 0 without images."""
        return self._sorted(source).get("pool", torch.empty(0, 0)).to(self.extractor.device)

    def _sorted(self, source: Source) -> dict[str, Tensor]:
        """The data of a source in the order of labels, then numbers; kept in this order from then on."""
        parts = self._parts.get(source, [])
        if not parts:
            return {}
        numbers = torch.cat([part["numbers"] for part in parts])
        order = numbers.argsort(stable=True)
        assert not (numbers[order].diff() == 0).any(), f"{source} images were added twice"
        if "labels" in parts[0]:
            labels = torch.cat([part["labels"] for part in parts])
            order = order[labels[order].argsort(stable=True)]
        if len(parts) > 1 or not torch.equal(order, torch.arange(len(order))):
            # Name by name, and without the parts: two copies of all features may not fit.
            self._parts[source] = [
                {name: torch.cat([part.pop(name) for part in parts])[order] for name in list(parts[0])}
            ]
        return self._parts[source][0]


class EffNetQuality(Quality):
    """`FD-EffNetLite0` and the other figures over EfficientNet-Lite0, which works offline."""

    verdicts: ClassVar[Mapping[str, bool]] = {
        "FD-EffNetLite0": False,
        "KID-EffNetLite0": False,
        "recall-EffNetLite0": True,
        "coverage-EffNetLite0": True,
    }

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        return open_effnet(evaluation)


class InceptionQuality(Quality):
    """FID and the other figures over Inception-2015, as ADM's evaluator and torch-fidelity define them."""

    verdicts: ClassVar[Mapping[str, bool]] = {"FID": False, "KID": False, "recall": True, "coverage": True}

    def open_extractor(self, evaluation: Evaluation) -> Extractor:
        return open_inception(evaluation)

    def name_of(self, figure: str) -> str:
        return figure.replace("FD", "FID")


def with_halves(measure: Callable[[Tensor], float], rows: Tensor, *, smallest: int = 1) -> Figure:
    """`measure` of all rows, and of every second one from the first and from the second on.

    Args:
        smallest: minimum number of rows for `measure`. If a half has fewer, the figure has no halves.
    """
    halves = (measure(rows[0::2]), measure(rows[1::2])) if len(rows) // 2 >= smallest else None
    return Figure(measure(rows), len(rows), halves)


def frechet_figure(features: Tensor, reference: Gaussian) -> Figure:
    """Of features (N, D), N > D; the covariance of a half needs N / 2 > D."""
    even, odd = statistics_of(features[0::2]), statistics_of(features[1::2])
    whole = FeatureStatistics(features.shape[1], features.device)
    for half in (even, odd):
        whole.merge(half)
    found = frechet_distance(reference, whole.gaussian())
    if odd.count <= features.shape[1]:
        return Figure(found, len(features))
    halves = (frechet_distance(reference, even.gaussian()), frechet_distance(reference, odd.gaussian()))
    return Figure(found, len(features), halves)
