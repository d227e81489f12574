# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The grids of a run: their rows, the real images next to them, and the similarity of both.

PSNR and SSIM need a reference image for sample i:
- a held-out image of the same caption gives `psnr` and `ssim`;
- the user's own prompts have no such image. The reference is then the sample that the original model drew for the same
  prompt and noise before the first step: `psnr_to_original`, `ssim_to_original`;
- a class has no reference, and neither is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchditan.config.options import Config
from torchditan.data_stream.datasets import CorruptImageError, ImageDataset, SequentialDataset
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.run.atomic_files import atomic_writer
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.sampling.grid_picture import add_to_steps, save_grid, stills

ORIGINAL = "original.npz"
"""In samples/: the samples of the original model before the first step, and the digest of their drawing."""
_SEARCH_LIMIT = 20_000


class Grids:
    """Draws the grids of one run.

    Args:
        config: of the run.
        dataset: provides class names, or `prompts` (SampleRows).
        held_out: provides the images next to the generated ones; None uses `dataset`.
        space: converts samples to pixels.
    """

    def __init__(
        self, config: Config, dataset: ImageDataset, held_out: ImageDataset | None, *, space: SampleSpace
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.held_out = held_out
        self.space = space
        self.shows_prompts = dataset.prompts is not None
        self.rows: SampleRows = dataset.prompts or SampleRows.first_classes(
            config.sampling.max_classes, class_names=dataset.class_names
        )
        self._real: Tensor | None = None

    def drawing(self, step: int) -> Drawing:
        """The samples of the grid at this step, row by row."""
        sampling = self.config.sampling
        order = self.rows.each(sampling.images_per_class)
        return Drawing(self.rows, order, sampling, seed=self.config.training.seed, step=step)

    @property
    def has_original(self) -> bool:
        """Whether samples are drawn before the first step, from a trained model."""
        config = self.config
        begins_trained = config.model.path is not None or config.checkpoint.initial_load_path is not None
        return begins_trained and config.sampling.at_start

    def write(self, path: Path, generated: Tensor, drawing: Drawing) -> dict[str, float]:
        """Write the grid of a step, and compare it with its reference images.

        Args:
            path: PNG to write.
            generated: pixels of the drawing (N, C, [F,] H, W).

        Returns:
            `psnr` and `ssim`, or `psnr_to_original` and `ssim_to_original`, if there are references.

        Raises:
            OSError: the file cannot be written.
        """
        if self._real is None:
            self._real = self._real_images()
        rows, sampling, step = drawing.rows, drawing.sampling, drawing.step
        generated, real = stills(generated.unflatten(0, (len(rows.names), -1))), self._real
        name = str(self.config.metrics.experiment_name)
        title = f"{name}, step {step}, {sampling.sampler} {sampling.num_steps} steps"
        title += f", guidance {sampling.guidance_scale:g}"
        save_grid(path, generated, real, rows.names, title=title, real_heading=self.space.real_heading)
        if self.shows_prompts:
            add_to_steps(path.parent, generated[:, 0], rows.names, step=step, title=name)
        return self._scores(generated, path.parent, drawing)

    def _scores(self, generated: Tensor, folder: Path, drawing: Drawing) -> dict[str, float]:
        if not self.shows_prompts:
            return {}
        from torchditan.sampling.reconstruction import similarity, to_8_bit

        if self.rows.references is not None:
            assert self._real is not None
            return similarity(generated, self._real)
        if not self.has_original:
            return {}
        if drawing.step == 0:
            with atomic_writer(folder / ORIGINAL) as file:
                np.savez(file, pixels=to_8_bit(generated).byte().numpy(), drawn=np.array(drawing.digest()))
            return {}
        pixels = _read_original(folder, replace(drawing, step=0))
        scores = {} if pixels is None else similarity(generated, pixels)
        return {f"{name}_to_original": value for name, value in scores.items()}

    def _real_images(self) -> Tensor | None:
        """Pixels (rows, k, C, H, W), or None."""
        if self.rows.references is not None:
            return stills(self.rows.references[:, None])
        if self.shows_prompts:
            return None
        return real_samples(
            self.held_out or self.dataset,
            labels=self.rows.numbers,
            samples_per_label=self.config.sampling.images_per_class,
            conditional=bool(self.dataset.class_names),
            to_pixels=self.space.real_to_pixels,
        )


def _read_original(folder: Path, drawing: Drawing) -> Tensor | None:
    """Pixels (rows, k, C, H, W), or None if they were not drawn, or drawn in another way."""
    try:
        with np.load(folder / ORIGINAL, allow_pickle=False) as stored:
            if str(stored["drawn"]) != drawing.digest():
                return None
            return torch.from_numpy(stored["pixels"]).float() / 127.5 - 1
    except Exception:  # of the archive, of numpy, and of the tokenizer that it calls
        return None


def real_samples(
    dataset: ImageDataset,
    *,
    labels: list[int],
    samples_per_label: int,
    conditional: bool,
    to_pixels: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Real samples of each label, to show next to generated ones; None if the dataset can only be streamed.

    If a label has too few samples, its last one repeats; a label without samples is NaN. If the labels are not known
    in advance, 20,000 samples are searched.

    Args:
        to_pixels: samples (..., C, H, W) of the dataset -> pixels.

    Returns:
        (len(labels), samples_per_label, C, H, W) float, of `to_pixels`.
    """
    if isinstance(dataset, SequentialDataset):
        return None
    rows, missing = [], []
    for indices in _candidates(dataset, labels=labels if conditional else [], wanted=samples_per_label):
        row: list[torch.Tensor] = []
        for index in indices:
            if len(row) == samples_per_label:
                break
            with suppress(CorruptImageError):
                row.append(dataset[int(index)]["sample"])
        last = row[-1] if row else torch.zeros(dataset.sample_shape)
        rows.append(torch.stack((row + [last] * samples_per_label)[:samples_per_label]))
        missing.append(not row)
    pixels = to_pixels(torch.stack(rows))
    return pixels.masked_fill(torch.tensor(missing, device=pixels.device)[:, None, None, None, None], torch.nan)


def _candidates(dataset: ImageDataset, *, labels: list[int], wanted: int) -> list[np.ndarray]:
    """Indices of samples with each label; without labels, one row of indices spread over the dataset."""
    spread = np.arange(0, len(dataset), max(1, len(dataset) // _SEARCH_LIMIT))
    if not labels:
        return [_spread(spread, wanted)]
    known = dataset.class_labels
    if known is not None:
        return [_spread(np.flatnonzero(np.asarray(known) == label), wanted) for label in labels]
    found: dict[int, list[int]] = {label: [] for label in labels}
    for index in spread:
        with suppress(CorruptImageError):
            found.get(int(dataset[int(index)]["class_label"]), []).append(int(index))
        if all(len(indices) >= wanted for indices in found.values()):
            break
    return [np.array(indices, dtype=np.int64) for indices in found.values()]


def _spread(indices: np.ndarray, wanted: int) -> np.ndarray:
    """Evenly spaced indices first (neighbours may be similar), then the rest."""
    stride = max(1, len(indices) // wanted)
    return np.concatenate([indices[start::stride] for start in range(stride)])
