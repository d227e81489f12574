# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The metric `prompts`: whether pictures show what their prompts say, read back from the pixels without a network.

Notable:
- half of the prompts are of seen pairs of colour and shape, half have a pair that training never showed;
- a pixel belongs to a colour by its direction from the background, so edges that blend into it count too. A connected
  region of one colour is an object; its shape is the one that `coverage` draws most alike, at its area and centroid;
- whatever else differs from the background, in another colour or faintly, is an object of no colour of the palette;
- the prompts are the same for every run and every seed of the noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from scipy import ndimage

from torchditan.datasets.scenes import AREAS, COLOURS, SHAPES, WIDTH, Group, Object, Scene, coverage
from torchditan.extras.evaluation.metric import MetricOfAllPictures, Pictures, share
from torchditan.randomness import generator

ATTRIBUTES = ("all", "count", "colour", "shape", "size", "relation")
NO_COLOUR = "none"
"""Colour of an object outside the palette, or one less than half as strong."""
NO_SHAPE = "none"
"""Shape of an object that looks like none of `SHAPES`."""
_PALETTE = np.array(list(COLOURS.values()), dtype=np.float64)  # (colours, 3)
_COLOUR_TOLERANCE = 60.0
"""Largest distance of a pixel's colour from the mixtures of a palette colour and the background, of 255."""
_FAINTEST = 28.0
"""Smallest difference of an object from the background, of 255, as the mean over 3 x 3 pixels."""
_SHAPE_TOLERANCE = 0.35
"""Largest difference of an object from the shape as it would be drawn, as a share of its area."""
_SMALLEST = 0.3 * AREAS["small"]
"""Square units: smaller regions are specks."""
_MIDDLE = (AREAS["small"] * AREAS["large"]) ** 0.5


class ScenePrompts(MetricOfAllPictures):
    """Shares of pictures that have the count, colours, shapes, sizes and relation of their prompts, and all of them."""

    needs_dataset = "scenes"
    verdicts: ClassVar[Mapping[str, bool]] = {"prompts seen: all": True, "prompts held-out: all": True}

    @staticmethod
    def draw_prompts(count: int) -> list[str]:
        """Seen and held-out ones in turn, from captions as the dataset draws them."""
        scenes = [Scene.draw(generator(0, "scene prompts", n), is_held_out=n % 2 == 1) for n in range(count)]
        return [scene.caption for scene in scenes]

    @staticmethod
    def check_prompts(prompts: Sequence[str]) -> None:
        """Refuse what the grammar does not produce.

        Raises:
            ConfigError: names the first one.
        """
        for prompt in prompts:
            Scene.parse(prompt)

    def update(self, pictures: Pictures) -> None:
        assert pictures.prompts is not None
        scenes = [Scene.parse(prompt) for prompt in pictures.prompts]
        images = pictures.images.permute(0, 2, 3, 1).numpy()  # (N, H, W, 3)
        scores = [score(scene, read_objects(image)) for scene, image in zip(scenes, images, strict=True)]
        state = {
            "scores": torch.tensor([[one[name] for name in ATTRIBUTES] for one in scores], dtype=torch.float64),
            "is_held_out": torch.tensor([scene.is_held_out for scene in scenes]),
            "numbers": pictures.numbers,
        }
        self.merge(state, pictures.source)

    def compute(self) -> dict[str, Any]:
        """`prompts seen: all` and so on, each a share of the pictures whose prompt names the attribute."""
        scores, is_held_out = self._ordered("scores", "generated"), self._ordered("is_held_out", "generated")
        results: dict[str, Any] = {}
        for kind, rows in (("seen", scores[~is_held_out]), ("held-out", scores[is_held_out])):
            for name, column in zip(ATTRIBUTES, rows.T, strict=True):
                column = column[~column.isnan()]
                if len(column):
                    results[f"prompts {kind}: {name}"] = share(int(column.sum()), len(column))
        return results


def read_objects(picture: np.ndarray) -> list[Object]:
    """The objects in a picture (H, H, 3) uint8, by colour. Those of no colour or shape have `NO_COLOUR`, `NO_SHAPE`."""
    background = np.median(picture.reshape(-1, 3), axis=0)  # objects cover less than half
    offsets = picture - background  # (H, H, 3)
    directions = _PALETTE - background  # (colours, 3)
    alphas = (offsets @ directions.T / (directions**2).sum(1)).clip(0, 1)  # (H, H, colours)
    distances = np.linalg.norm(offsets[:, :, None] - alphas[..., None] * directions, axis=-1)  # (H, H, colours)
    nearest = distances.argmin(-1)  # (H, H)
    found = []
    others = np.ones_like(nearest, dtype=bool)  # (H, H): no object of the palette
    for number, colour in enumerate(COLOURS):
        alpha = np.where(distances[..., number] < _COLOUR_TOLERANCE, alphas[..., number], 0.0)
        for region in _regions((nearest == number) & (alpha > 0.5)):
            one = _object(colour, region, alpha)
            if one is not None:
                found.append(one)
                others &= ~_with_edges(region, pixels=2)  # two, for edges with a little blur
    offsets = np.where(others[..., None], offsets, 0.0)
    smooth = ndimage.uniform_filter(offsets, (3, 3, 1))
    for region in _regions(np.linalg.norm(smooth, axis=-1) > _FAINTEST):
        strongest = max(offsets[_with_edges(region)], key=np.linalg.norm)  # (3,)
        one = _object(NO_COLOUR, region, (offsets @ strongest / (strongest @ strongest)).clip(0, 1))
        if one is not None:
            found.append(one)
    return found


def _regions(mask: np.ndarray) -> list[np.ndarray]:
    """The connected regions (H, H) of a mask."""
    labels, count = ndimage.label(mask)
    return [labels == number for number in range(1, count + 1)]


def _with_edges(region: np.ndarray, *, pixels: int = 1) -> np.ndarray:
    return ndimage.binary_dilation(region, np.ones((3, 3)), iterations=pixels)


def _object(colour: str, region: np.ndarray, alpha: np.ndarray) -> Object | None:
    """The object of a region and its edges, from the strength of its colour (H, H); None for a speck."""
    pixels = len(alpha)
    covered = np.where(_with_edges(region), alpha, 0.0)
    area = covered.sum() * (WIDTH / pixels) ** 2
    if area < _SMALLEST:
        return None
    places = (np.arange(pixels) + 0.5) * WIDTH / pixels
    x, y = (float(covered.sum(axis) @ places / covered.sum()) for axis in (0, 1))
    return Object(colour, _shape_of(covered, area=area, x=x, y=y), area, x, y)


def _shape_of(covered: np.ndarray, *, area: float, x: float, y: float) -> str:
    differences = {
        shape: np.abs(covered - coverage(shape, area, x, y, pixels=len(covered))).sum() / covered.sum()
        for shape in SHAPES
    }
    best = min(differences, key=differences.__getitem__)
    return best if differences[best] < _SHAPE_TOLERANCE else NO_SHAPE


def score(scene: Scene, objects: Sequence[Object]) -> dict[str, float]:
    """1 or 0: whether the objects have each attribute of a scene. NaN for one that it leaves open.

    - count: as many objects, of whatever kind;
    - colour, shape: exactly those of the scene occur;
    - size: each group that names one has objects, all of this size;
    - relation: both groups have objects, and the centroids of the first are all above, below ... those of the second;
    - all: each group has exactly its objects, with the size and the relation.

    An object belongs to the group of its colour; the shape decides between groups of one colour.
    """
    members = _members(scene.groups, objects)
    wanted = Counter({(group.colour, group.shape): group.count for group in scene.groups})
    of_size = [
        bool(found) and all(_size_of(one) == group.size for one in found)
        for group, found in zip(scene.groups, members, strict=True)
        if group.size is not None
    ]
    in_relation = [] if scene.relation is None else [_is_in_relation(scene.relation, *members)]
    is_exact = Counter((one.colour, one.shape) for one in objects) == wanted
    return {
        "all": float(is_exact and all(of_size) and all(in_relation)),
        "count": float(len(objects) == wanted.total()),
        "colour": float({one.colour for one in objects} == {group.colour for group in scene.groups}),
        "shape": float({one.shape for one in objects} == {group.shape for group in scene.groups}),
        "size": float(all(of_size)) if of_size else math.nan,
        "relation": float(all(in_relation)) if in_relation else math.nan,
    }


def _members(groups: Sequence[Group], objects: Sequence[Object]) -> list[list[Object]]:
    members: list[list[Object]] = [[] for _ in groups]
    for one in objects:
        matches = [(one.colour == group.colour, one.shape == group.shape) for group in groups]
        if any(max(matches)):
            members[matches.index(max(matches))].append(one)
    return members


def _size_of(one: Object) -> str:
    return "small" if one.area < _MIDDLE else "large"


def _is_in_relation(relation: str, first: Sequence[Object], second: Sequence[Object]) -> bool:
    if not first or not second:
        return False
    if relation in ("below", "right of"):
        first, second = second, first
    axis = "y" if relation in ("above", "below") else "x"
    return max(getattr(one, axis) for one in first) < min(getattr(one, axis) for one in second)
