# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The grids of a run: their rows, the real images next to them, and the similarity of both.

PSNR and SSIM need a reference image for sample i:
- a held-out image of the same caption gives `psnr` and `ssim`;
- the user's own prompts have no such image. The reference is then the sample that the original model drew for the same
  prompt and noise before the first step: `psnr_to_original`, `ssim_to_original`;
- a class has no reference, and neither is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from torchditan.config.options import Config
from torchditan.data_stream.datasets import ImageDataset
from torchditan.evaluation.generate import real_samples
from torchditan.evaluation.grid_picture import add_to_steps, save_grid, stills
from torchditan.evaluation.sample_rows import SampleRows
from torchditan.latents.sample_space import SampleSpace


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
        prompts: SampleRows | None = dataset.prompts
        self.shows_prompts = prompts is not None
        if prompts is None:
            labels = range(min(config.sampling.max_classes, max(1, len(dataset.class_names))))
            prompts = SampleRows.of_classes(labels, class_names=dataset.class_names)
        self.rows = prompts
        self._real: Tensor | None = None

    @property
    def has_original(self) -> bool:
        """Whether samples are drawn before the first step, from a trained model."""
        config = self.config
        begins_trained = config.model.path is not None or config.checkpoint.initial_load_path is not None
        return begins_trained and config.sampling.at_start

    def write(self, path: Path, generated: Tensor, *, step: int) -> dict[str, float]:
        """Write the grid of a step, and compare it with its reference images.

        Args:
            path: PNG to write.
            generated: pixels (rows, k, C, [F,] H, W).
            step: of the training.

        Returns:
            `psnr` and `ssim`, or `psnr_to_original` and `ssim_to_original`, if there are references.

        Raises:
            OSError: the file cannot be written.
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
        return self._scores(generated, path.parent, step=step)

    def _scores(self, generated: Tensor, folder: Path, *, step: int) -> dict[str, float]:
        if not self.shows_prompts:
            return {}
        from torchditan.evaluation.original_samples import ORIGINAL, read_original, write_original
        from torchditan.evaluation.reconstruction import similarity

        if self.rows.references is not None:
            assert self._real is not None
            return similarity(generated, self._real)
        if not self.has_original:
            return {}
        if step == 0:
            write_original(folder / ORIGINAL, generated, drawn=self.drawn)
            return {}
        pixels = read_original(folder / ORIGINAL, drawn=self.drawn)
        scores = {} if pixels is None else similarity(generated, pixels)
        return {f"{name}_to_original": value for name, value in scores.items()}

    @property
    def drawn(self) -> str:
        """All settings that determine the samples of a model."""
        sampling = vars(self.config.sampling)
        return json.dumps([sampling, self.config.training.seed, self.rows.names], sort_keys=True)

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
