# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The grids of a run: which rows they have, the real images beside them, and how alike the two are."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torchditan.autoencoders.latent_space import SampleSpace
from torchditan.config import Config
from torchditan.evaluation.generate import real_samples
from torchditan.evaluation.image_grid import add_to_steps, save_grid, stills
from torchditan.evaluation.reconstruction import similarity
from torchditan.evaluation.rows import SampleRows
from torchditan.stream import ImageDataset


class Grids:
    """Draws the grids of one run.

    Args:
        config: of the run.
        dataset: names the classes, or has `prompts` (SampleRows) of its own.
        held_out: whose images stand beside the generated ones; None: the dataset's.
        space: makes pixels of samples.
    """

    def __init__(
        self, config: Config, dataset: ImageDataset, held_out: ImageDataset | None, *, space: SampleSpace
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.held_out = held_out
        self.space = space
        prompts: SampleRows | None = getattr(dataset, "prompts", None)
        self.shows_prompts = prompts is not None
        if prompts is None:
            labels = range(min(config.sampling.max_classes, max(1, len(dataset.class_names))))
            prompts = SampleRows.of_classes(labels, class_names=dataset.class_names)
        self.rows = prompts
        self._real: Tensor | None = None

    def write(self, path: Path, generated: Tensor, *, step: int) -> dict[str, float]:
        """Write the grid of a step, and measure it against the real images of the same captions or classes.

        Args:
            path: PNG to write.
            generated: pixels (rows, k, C, [F,] H, W).
            step: of the training.

        Returns:
            `psnr` and `ssim`, where there is something to compare with.

        Raises:
            OSError: it cannot be written.
        """
        config, rows = self.config, self.rows
        if self._real is None:
            self._real = self._real_images()
        generated, real = stills(generated), self._real
        name, sampling = str(config.metrics.experiment_name), config.sampling
        title = f"{name}, step {step}, {sampling.sampler} {sampling.num_steps} steps"
        title += f", guidance {sampling.guidance_scale:g}"
        save_grid(path, generated, real, rows.names, title=title, real_heading=self.space.real_heading)
        if self.shows_prompts:
            add_to_steps(path.parent, generated[:, 0], rows.names, step=step, title=name)
        return {} if real is None else similarity(generated, real)

    def _real_images(self) -> Tensor | None:
        """Pixels (rows, k, C, H, W), or None."""
        if self.rows.references is not None:
            return stills(self.rows.references[:, None])
        if self.shows_prompts:
            return None
        real = real_samples(
            self.held_out or self.dataset,
            labels=self.rows.numbers,
            samples_per_label=self.config.sampling.images_per_class,
            conditional=bool(self.dataset.class_names),
        )
        return None if real is None else self.space.real_to_pixels(real)
