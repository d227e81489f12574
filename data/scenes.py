# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One to three simple shapes on grey, drawn in code, with a caption: "two small red circles above a blue square".

Notable:
- a scene is one group of equal shapes, or two groups and their relation. `Scene` is both the caption and the picture:
  `caption` writes it, `parse` reads it, `place` and `draw_objects` draw it;
- a sample is a function of (split, index), and there are 2^32 of each split: no run sees one twice;
- 3 of the 18 pairs of colour and shape are held out by rule (`is_held_out`). Neither split contains them, so pictures
  of them measure whether a model combines what it saw apart;
- lengths are in units: the picture is 32 wide at any number of pixels.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchditan.config import options
from torchditan.data_stream.datasets import ImageDataset
from torchditan.datasets.images import to_sample
from torchditan.datasets.options import Split, refuse, square_size
from torchditan.errors import option_error
from torchditan.randomness import IndexedGenerator

VERSION = 1
"""Part of the fingerprint: raise it if a sample changes."""
SIZES = (32, 64)
NUM_SAMPLES = 2**32
COLOURS = {
    "red": (225, 35, 35),
    "green": (40, 165, 60),
    "blue": (45, 75, 225),
    "yellow": (240, 220, 50),
    "purple": (150, 45, 185),
    "orange": (240, 120, 20),
}
"""RGB in 0..255. Backgrounds are grey."""
SHAPES = ("circle", "square", "triangle")
AREAS = {"small": 20.0, "large": 60.0}
"""Square units, of any shape."""
BACKGROUNDS = ((30, 70), (190, 230))
"""Ranges of dark and light greys."""
MAX_OBJECTS = 3
INVERSES = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}

WIDTH = 32.0
"""Of a picture, in units."""
_EDGE = 1.0
_GAP = 2.0
"""Smallest distance of two shapes, along x or y: at least one pixel between them is background."""
_COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3}
_ALONE = ("{a}", "a picture of {a}", "there {is} {a}", "{a} and nothing else")
_PAIR = (
    "{a} {relation} {b}",
    "a picture of {a} {relation} {b}",
    "there {is} {a} {relation} {b}",
    "{relation} {b} {is} {a}",
    "{a}, and {inverse} {it} {b}",
)
_PHRASE = rf"\b({'|'.join(_COUNTS)}) (?:({'|'.join(AREAS)}) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_EXAMPLE = '"two small red circles above a blue square"'


@dataclass(frozen=True)
class Group:
    """One to three equal shapes."""

    count: int
    size: str | None
    """None: the caption does not say."""
    colour: str
    shape: str

    @property
    def is_held_out(self) -> bool:
        """Whether no training or validation scene has this pair: purple circle, yellow square, blue triangle."""
        return (list(COLOURS).index(self.colour) + SHAPES.index(self.shape)) % len(COLOURS) == 4

    def words(self, *, says_one: bool) -> str:
        """ "two small red circles"; `says_one` writes "one" for "a"."""
        words = " ".join(word for word in (self.size, self.colour, self.shape) if word is not None)
        if self.count > 1:
            return f"{'two' if self.count == 2 else 'three'} {words}s"
        return f"one {words}" if says_one else f"an {words}" if words[0] == "o" else f"a {words}"


_PAIRS = list(itertools.product(COLOURS, SHAPES))
_HELD_OUT = [pair for pair in _PAIRS if Group(1, None, *pair).is_held_out]
_SEEN = [pair for pair in _PAIRS if pair not in _HELD_OUT]


@dataclass(frozen=True)
class Scene:
    """What a caption says, and how it says it."""

    groups: tuple[Group, ...]
    """One or two, which differ in colour or shape; at most three objects."""
    relation: str | None = None
    """Of the first group to the second, such as "above"; None for one group."""
    wording: int = 0
    """Below twice the number of templates. An odd one says "one" for "a"."""

    @property
    def caption(self) -> str:
        template = _templates(len(self.groups))[self.wording // 2]
        phrases = [group.words(says_one=self.wording % 2 == 1) for group in self.groups]
        is_plural = self.groups[0].count > 1
        return template.format(
            a=phrases[0],
            b=phrases[-1],
            relation=self.relation,
            inverse=INVERSES.get(self.relation or ""),
            **{"is": "are" if is_plural else "is", "it": "them" if is_plural else "it"},
        )

    @property
    def is_held_out(self) -> bool:
        return any(group.is_held_out for group in self.groups)

    @classmethod
    def parse(cls, caption: str) -> Scene:
        """The scene of a caption.

        Raises:
            ConfigError: the grammar does not produce it.
        """
        groups = [
            Group(_COUNTS[count], size or None, colour, shape)
            for count, size, colour, shape in re.findall(_PHRASE, caption)
        ]
        if 1 <= len(groups) <= 2:
            relations = [None] if len(groups) == 1 else list(INVERSES)
            wordings = range(2 * len(_templates(len(groups))))
            for order, relation, wording in itertools.product(itertools.permutations(groups), relations, wordings):
                scene = cls(order, relation, wording)
                if scene.caption == caption:
                    return scene._checked()
        raise option_error("prompts", caption, f"is not a caption of the dataset scenes; must be such as {_EXAMPLE}")

    def _checked(self) -> Scene:
        num_objects = sum(group.count for group in self.groups)
        if num_objects > MAX_OBJECTS:
            raise option_error("prompts", self.caption, f"has {num_objects} shapes; must have at most {MAX_OBJECTS}")
        if len({(group.colour, group.shape) for group in self.groups}) < len(self.groups):
            raise option_error("prompts", self.caption, "must have two groups that differ in colour or shape")
        return self

    @classmethod
    def draw(cls, draws: np.random.Generator, *, is_held_out: bool = False) -> Scene:
        """A random scene. With `is_held_out`, one group is of a held-out pair; without, none is."""
        counts = [(1,), (2,), (3,), (1, 1), (1, 2), (2, 1)][draws.integers(6)]
        pairs = [(_HELD_OUT if is_held_out else _SEEN)[draws.integers(len(_HELD_OUT if is_held_out else _SEEN))]]
        if len(counts) == 2:
            others = [pair for pair in _SEEN if pair != pairs[0]]
            pairs.insert(int(draws.integers(2)), others[draws.integers(len(others))])
        sizes = [[None, None, *AREAS][number] for number in draws.integers(4, size=len(counts))]
        return cls(
            groups=tuple(Group(*of, *pair) for of, pair in zip(zip(counts, sizes, strict=True), pairs, strict=True)),
            relation=list(INVERSES)[draws.integers(len(INVERSES))] if len(counts) == 2 else None,
            wording=int(draws.integers(2 * len(_templates(len(counts))))),
        )

    def place(self, draws: np.random.Generator) -> list[Object]:
        """The objects of a picture of this scene, at random places. Sizes that the caption leaves open are random."""
        objects = []
        for number, group in enumerate(self.groups):
            size = group.size or list(AREAS)[draws.integers(len(AREAS))]
            objects += [(number, Object(group.colour, group.shape, AREAS[size], 0.0, 0.0))] * group.count
        extents = np.array([_extents(one.shape, one.area) for _, one in objects])  # (n, 4): left, top, right, bottom
        owners = np.array([number for number, _ in objects])
        while True:  # 4 tries on average, and 1,500 for two large triangles beside a third
            spans = WIDTH - 2 * _EDGE - extents[:, :2] - extents[:, 2:]  # (n, 2) of x and y
            places = _EDGE + extents[:, :2] + draws.random((128, len(objects), 2)) * spans
            fits = self._fits(places - extents[:, :2], places + extents[:, 2:], owners)
            if fits.any():
                chosen = places[fits.argmax()]
                break
        return [
            Object(one.colour, one.shape, one.area, float(x), float(y))
            for (_, one), (x, y) in zip(objects, chosen, strict=True)
        ]

    def _fits(self, starts: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """(tries,) bool: boxes from `starts` to `ends`, (tries, n, 2) each, are apart and in the relation."""
        fits = np.ones(len(starts), dtype=bool)
        for one, other in itertools.combinations(range(len(owners)), 2):
            is_before = ends[:, one] + _GAP <= starts[:, other]  # (tries, 2)
            is_after = ends[:, other] + _GAP <= starts[:, one]
            fits &= (is_before | is_after).any(1)
        if self.relation is not None:
            axis = int(self.relation in ("above", "below"))
            first = 0 if self.relation in ("above", "left of") else 1
            of_first = ends[:, owners == first, axis].max(1)
            fits &= of_first + _GAP <= starts[:, owners != first, axis].min(1)
        return fits


@dataclass(frozen=True)
class Object:
    """One shape of a picture. `x` and `y` are its centroid, from the left and from the top, in units."""

    colour: str
    shape: str
    area: float
    x: float
    y: float


def coverage(shape: str, area: float, x: float, y: float, *, pixels: int) -> np.ndarray:
    """(pixels, pixels) float64 in [0, 1]: the share of each pixel that a shape with this centroid covers."""
    covered = np.zeros((pixels, pixels))
    box, shares = _shares(shape, area, x, y, pixels=pixels)
    covered[box] = shares
    return covered


def _shares(shape: str, area: float, x: float, y: float, *, pixels: int) -> tuple[tuple[slice, slice], np.ndarray]:
    """The rows and columns of the pixels that a shape touches, and `coverage` of these."""
    samples = 256 // pixels  # per pixel, along each axis
    left, top, right, bottom = _extents(shape, area)
    columns = _pixels_between(x - left, x + right, pixels)
    rows = _pixels_between(y - top, y + bottom, pixels)
    unit = WIDTH / pixels / samples
    dx = (np.arange(columns.start * samples, columns.stop * samples) + 0.5) * unit - x
    dy = ((np.arange(rows.start * samples, rows.stop * samples) + 0.5) * unit - y)[:, None]
    if shape == "circle":
        is_inside = dx**2 + dy**2 < right**2
    elif shape == "square":
        is_inside = (np.abs(dx) < right) & (np.abs(dy) < bottom)
    else:  # the apex is above the centroid
        is_inside = (dy < bottom) & (np.abs(dx) * (top + bottom) < (dy + top) * right)
    # At most 64 samples per pixel: uint8 counts them, which is much faster than the mean of booleans.
    counts = is_inside.view(np.uint8).reshape(len(rows), samples, -1).sum(1, dtype=np.uint8)
    counts = counts.reshape(len(rows), len(columns), samples).sum(2, dtype=np.uint8)
    return (slice(rows.start, rows.stop), slice(columns.start, columns.stop)), counts / samples**2


def draw_objects(objects: list[Object], *, grey: float, pixels: int) -> np.ndarray:
    """(pixels, pixels, 3) uint8: the objects on a grey background."""
    picture = np.full((pixels, pixels, 3), grey)
    for one in objects:
        box, shares = _shares(one.shape, one.area, one.x, one.y, pixels=pixels)
        picture[box] += shares[..., None] * (np.array(COLOURS[one.colour]) - picture[box])
    return picture.round().astype(np.uint8)


def random_grey(draws: np.random.Generator) -> float:
    return float(draws.uniform(*BACKGROUNDS[draws.integers(len(BACKGROUNDS))]))


class Scenes(ImageDataset):
    """Scenes of seen pairs. An item has `sample` (3, H, W) in [-1, 1] and `caption`."""

    name = "scenes"
    horizontal_flip = False

    def __init__(self, *, pixels: int, split: Split) -> None:
        self.pixels = pixels
        self.split = split
        self.sample_shape = (3, pixels, pixels)
        self.class_names: list[str] = []
        self.fingerprint = f"scenes-{VERSION}"
        self._draws = IndexedGenerator(0, f"scenes {split}")

    def __len__(self) -> int:
        return NUM_SAMPLES

    def caption_of(self, index: int) -> str:
        return self._draw(index)[0].caption

    def __getitem__(self, index: int) -> dict[str, Any]:
        scene, draws = self._draw(index)
        objects = scene.place(draws)
        picture = draw_objects(objects, grey=random_grey(draws), pixels=self.pixels)
        return {"sample": torch.from_numpy(to_sample(picture)), "caption": scene.caption}

    def _draw(self, index: int) -> tuple[Scene, np.random.Generator]:
        draws = self._draws.at(index)
        return Scene.draw(draws), draws


def _templates(num_groups: int) -> tuple[str, ...]:
    return _ALONE if num_groups == 1 else _PAIR


def _extents(shape: str, area: float) -> tuple[float, float, float, float]:
    """Distances from the centroid to the left, top, right and bottom."""
    if shape == "circle":
        radius = (area / np.pi) ** 0.5
        return radius, radius, radius, radius
    if shape == "square":
        half = area**0.5 / 2
        return half, half, half, half
    side = (4 * area / 3**0.5) ** 0.5  # equilateral
    height = side * 3**0.5 / 2
    return side / 2, 2 * height / 3, side / 2, height / 3


def _pixels_between(start: float, end: float, pixels: int) -> range:
    """The pixels along one axis that an interval in units touches."""
    first = min(max(0, math.floor(start * pixels / WIDTH)), pixels - 1)
    return range(first, min(max(first + 1, math.ceil(end * pixels / WIDTH)), pixels))


def build(config: options.Dataset, *, split: Split, input_channels: int | None = None) -> Scenes:
    refuse(config, "root_dir", "hub_name", "crop")
    return Scenes(pixels=square_size(config, SIZES), split=split)
