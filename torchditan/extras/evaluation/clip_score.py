# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric `clip path=PLACE`: how well samples match their prompts, by a CLIP model that the user has.

Notable:
- CLIP score = 100 max(cos, 0) of the embeddings of a sample and of its prompt, as torchmetrics and most papers print
  it. Hessel et al. 2021 (arXiv:2104.08718), who introduced it for captions, use 2.5 instead of 100;
- the figure is the mean over the prompts of the mean over their samples, with Student's 95% interval over the prompts,
  or over the samples if there is one prompt;
- the shorter side of a picture is resized to the size that the model reads, bicubic, and its centre is cropped;
- a text longer than the model reads, 77 tokens, is cut. The results say how many were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchditan.errors import option_error
from torchditan.extras.captions.tokens import tokenizer_of_transformers
from torchditan.extras.evaluation.card import spread_of
from torchditan.extras.evaluation.extractors import GROUP, full_float32
from torchditan.extras.evaluation.metric import Evaluation, Figure, MetricOfAllPictures, Pictures
from torchditan.extras.evaluation.saved_networks import normalize, open_network, resize

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training images, for pixels in [0, 1]."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


class ClipScore(MetricOfAllPictures):
    """The CLIP score of samples of a model of captions.

    Args:
        path: folder or hub name of a CLIP model of transformers, with its tokenizer.
    """

    needs_dataset = None
    verdicts: ClassVar[Mapping[str, bool]] = {"CLIP score": True}

    def __init__(self, evaluation: Evaluation, *, path: str) -> None:
        super().__init__(evaluation)
        self.device = torch.device(evaluation.device)
        found = open_network("clip", path, classes={"clip": "CLIPModel"}, files=TOKENIZER, device=self.device)
        self.model = found.model
        self.extractors = {"CLIP": found.sha256}
        self.max_length = found.model.config.text_config.max_position_embeddings
        if not any((found.folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            right = "has no tokenizer (tokenizer.json, or vocab.json and merges.txt)"  # transformers takes an empty one
            raise option_error("metrics", f"clip path={path}", right)
        import transformers  # open_network has found it

        self.tokenizer: Any = transformers.CLIPTokenizer.from_pretrained(found.folder, local_files_only=True)

    def draw_prompts(self, count: int) -> list[str]:
        """None of its own."""
        return []

    def check_prompts(self, prompts: Sequence[str]) -> None:
        """Any text will do."""

    def update(self, pictures: Pictures) -> None:
        assert pictures.prompts is not None
        lengths = [found.length for found in self._counter(pictures.prompts)]
        groups = zip(pictures.images.split(GROUP), _groups_of(pictures.prompts), strict=True)
        state = {
            "scores": torch.cat([self.scores(images, prompts) for images, prompts in groups]),
            "prompts": torch.tensor([_number_of(prompt) for prompt in pictures.prompts]),
            "is_cut": torch.tensor([length > self.max_length for length in lengths]),
            "numbers": pictures.numbers,
        }
        self.merge(state, pictures.source)

    def scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        """Scores (N,) on the CPU of images (N, 1 or 3, H, W) uint8, N at most `GROUP`."""
        pixels = preprocess(images.to(self.device).expand(-1, 3, -1, -1), self.model.config.vision_config.image_size)
        length: dict[str, Any] = {"max_length": self.max_length, "padding": "max_length", "truncation": True}
        tokens = self.tokenizer(prompts, return_tensors="pt", **length).to(self.device)
        with full_float32(self.device):
            found = self.model(**tokens, pixel_values=pixels)
            cosines: Tensor = (found.image_embeds * found.text_embeds).sum(1)  # of unit vectors
        return 100 * cosines.clamp(min=0).cpu()

    def compute(self) -> dict[str, Any]:
        """`CLIP score`, and in words the number of prompts and how many were cut."""
        scores, is_cut = self._ordered("scores", "generated").double(), self._ordered("is_cut", "generated")
        prompts, places = self._ordered("prompts", "generated").unique(return_inverse=True)
        totals = torch.zeros(len(prompts), dtype=torch.float64).index_add_(0, places, scores)
        means = totals / places.bincount()
        values = (means if len(means) > 1 else scores).tolist()
        figure = Figure(means.mean().item(), len(scores), extractor="CLIP")
        if len(values) > 1:
            half_width = spread_of(values).half_width
            figure = figure._replace(interval=(figure.value - half_width, figure.value + half_width))
        num_cut = len(places[is_cut].unique())
        words = f"{len(prompts):,} different, {num_cut:,} cut to {self.max_length} tokens"
        return {"CLIP score": figure, "prompts of the CLIP score": words}

    def _counter(self, prompts: list[str]) -> Any:
        return tokenizer_of_transformers(self.tokenizer, max_length=self.max_length).count(prompts)


def preprocess(images: Tensor, size: int) -> Tensor:
    """(B, 3, H, W) uint8 -> (B, 3, size, size) float32."""
    height, width = images.shape[2:]
    shorter = min(height, width)
    pixels = resize(images, (size * height // shorter, size * width // shorter))
    top, left = ((pixels.shape[axis] - size) // 2 for axis in (2, 3))
    return normalize(pixels[:, :, top : top + size, left : left + size], mean=MEAN, std=STD)


def _groups_of(prompts: list[str]) -> list[list[str]]:
    return [prompts[start : start + GROUP] for start in range(0, len(prompts), GROUP)]


def _number_of(prompt: str) -> int:
    """The same for equal prompts on all ranks."""
    return int.from_bytes(hashlib.sha256(prompt.encode(errors="surrogatepass")).digest()[:8], "little", signed=True)
