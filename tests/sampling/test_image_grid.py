# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The grid shows every image and every name completely."""

from __future__ import annotations

import json
import os
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from refusals import refused

from torchditan.data_stream.datasets import CorruptImageError, ImageDataset
from torchditan.extras.report.stored_grids import read_cells
from torchditan.sampling.grid_picture import LAYOUT_KEY, _can_draw, _font, add_to_steps, save_grid
from torchditan.sampling.sample_grids import real_samples


def colors(path):
    """Pixels of the grid, (H, W, 3)."""
    return np.asarray(Image.open(path)).astype(int)


def count(pixels, color):
    return int((pixels == np.array(color)).all(axis=-1).sum())


def solid(color, *, rows=2, k=3, size=(8, 8)):
    return (torch.tensor(color).view(1, 1, 3, 1, 1) / 127.5 - 1).expand(rows, k, 3, *size)


def test_every_image_is_there_enlarged_and_in_its_colour(tmp_path):
    save_grid(
        tmp_path / "grid.png",
        solid([255.0, 0.0, 0.0], k=3),
        solid([0.0, 0.0, 255.0], k=2),
        ["a", "b"],
        title="run",
    )
    pixels = colors(tmp_path / "grid.png")
    assert count(pixels, (255, 0, 0)) == 2 * 3 * 64 * 64
    assert count(pixels, (0, 0, 255)) == 2 * 2 * 64 * 64


def test_a_pixel_stays_a_square(tmp_path):
    image = torch.randint(0, 256, (1, 1, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    save_grid(tmp_path / "grid.png", image / 127.5 - 1, None, ["a"], title="run")
    cell = image[0, 0].permute(1, 2, 0).repeat_interleave(8, 0).repeat_interleave(8, 1).numpy()
    pixels = colors(tmp_path / "grid.png")
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (64, 64), axis=(0, 1))  # (y, x, 3, 64, 64)
    corners = np.argwhere((windows[..., 0, 0] == cell[0, 0]).all(axis=-1))
    assert any((pixels[y : y + 64, x : x + 64] == cell).all() for y, x in corners)


def test_grey_images_are_grey_and_nan_is_black(tmp_path):
    grey = torch.full((1, 2, 1, 8, 8), 0.0)
    grey[0, 1] = float("nan")
    save_grid(tmp_path / "grid.png", grey, None, [""], title="")
    pixels = colors(tmp_path / "grid.png")
    assert 64 * 64 <= count(pixels, (128, 128, 128)) < 1.01 * 64 * 64  # edges of letters are grey
    assert 64 * 64 <= count(pixels, (0, 0, 0)) < 1.1 * 64 * 64  # the heading is black too


@pytest.fixture
def texts(monkeypatch):
    """Boxes (left, top, right, bottom) of all texts drawn."""
    boxes = {}
    draw_text = ImageDraw.ImageDraw.text

    def text(self, xy, text, **options):
        boxes[text] = self.textbbox(xy, text, font=options["font"], anchor=options.get("anchor"))
        return draw_text(self, xy, text, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return boxes


def test_no_text_is_cut_off_or_drawn_over_images(tmp_path, texts):
    name = "black-footed ferret, ferret, Mustela nigripes, an animal with a long name"
    title = "a-run-with-a-long-name  step 100000  guidance 2.0 " * 3
    red = solid([255.0, 0.0, 0.0], k=1)
    save_grid(tmp_path / "grid.png", red, red, [name, "x"], title=title)
    pixels = colors(tmp_path / "grid.png")
    height, width = pixels.shape[:2]
    assert texts.keys() == {name, "x", title, "generated", "real"}
    for left, top, right, bottom in texts.values():
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    images = np.argwhere((pixels == (255, 0, 0)).all(axis=-1))
    assert texts[name][2] < images[:, 1].min()
    assert max(texts[heading][3] for heading in ("generated", "real")) <= images[:, 0].min()
    assert texts["generated"][2] < texts["real"][0]


def test_latents_show_three_channels_on_the_scale_of_the_real_ones(tmp_path, texts):
    real = torch.zeros(1, 2, 16, 8, 8)
    real[0, 0, :3], real[0, 1, :3] = -40.0, 40.0
    generated = torch.full((1, 1, 16, 8, 8), 20.0)
    generated[:, :, 3:] = 1e9
    save_grid(tmp_path / "grid.png", generated, real, ["a"], title="run")
    pixels = colors(tmp_path / "grid.png")
    assert "generated (latent channels 0-2)" in texts and "real (latent channels 0-2)" in texts
    assert 64 * 64 <= count(pixels, (191, 191, 191)) < 1.1 * 64 * 64  # texts have grey edges
    assert 64 * 64 <= count(pixels, (0, 0, 0)) < 1.15 * 64 * 64


def test_columns_over_steps_are_of_the_same_prompts(tmp_path, texts):
    red = solid([255.0, 0.0, 0.0], k=1)[:, 0]
    add_to_steps(tmp_path, red, ["a cat", "a dog"], step=5, title="run")
    add_to_steps(tmp_path, red, ["a cat", "a mug"], step=10, title="run")
    texts.clear()
    add_to_steps(tmp_path, red, ["a cat", "a mug"], step=20, title="run")
    assert {name for name in texts if name.startswith("step")} == {"step 10", "step 20"}
    texts.clear()
    add_to_steps(tmp_path, red, ["a cat", "a dog"], step=20, title="run")
    assert {name for name in texts if name.startswith("step")} == {"step 5", "step 20"}


def test_a_label_that_the_font_lacks_becomes_the_number_of_its_row(tmp_path, texts):
    labels = ["a dog", "собака", "一只狗", "🐶", "Bär"]
    save_grid(tmp_path / "a.png", torch.zeros(5, 1, 3, 8, 8), None, labels, title="прогон, step 3")
    assert list(texts) == ["??????, step 3", "a dog", "row 2", "row 3", "row 4", "Bär", "generated"]
    stored = (tmp_path / "a.labels.txt").read_text(encoding="utf-8")
    assert stored == "row 1: a dog\nrow 2: собака\nrow 3: 一只狗\nrow 4: 🐶\nrow 5: Bär\n"
    save_grid(tmp_path / "b.png", torch.zeros(1, 1, 3, 8, 8), None, ["a dog"], title="step 3")
    assert not (tmp_path / "b.labels.txt").exists()


def test_every_character_of_latin_1_is_drawn_and_each_differently(tmp_path, texts):
    printable = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0x180)) if code != 0xAD]
    drawn = {bytes(_font(14).getmask(character)) for character in printable}
    assert len(drawn) > 0.95 * len(printable), "some share a shape, such as Ð and Đ"
    assert all(map(_can_draw, printable))
    decomposed = unicodedata.normalize("NFD", "Äpfel, Škoda")  # as macOS names files
    save_grid(tmp_path / "a.png", torch.zeros(2, 1, 3, 8, 8), None, [decomposed, "über Straße"], title="größer")
    assert list(texts) == ["größer", "Äpfel, Škoda", "über Straße", "generated"]


def test_bytes_that_are_not_utf_8_are_drawn_as_escapes(tmp_path, texts):
    label = os.fsdecode(b"\x8e\xca\x90^")  # Shift-JIS
    save_grid(tmp_path / "a.png", torch.zeros(1, 1, 3, 8, 8), None, [label], title=label)
    assert set(texts) == {r"\x8e\xca\x90^", "generated"}
    assert (tmp_path / "a.labels.txt").read_text() == "row 1: \\x8e\\xca\\x90^\n"
    add_to_steps(tmp_path, torch.zeros(1, 3, 8, 8), [label], step=5, title=label)
    assert read_cells(tmp_path / "a.png")[1] == [label]


def test_a_row_without_real_images_is_empty(tmp_path):
    for channels in (1, 3, 16):
        generated = torch.zeros(2, 1, channels, 8, 8)
        real = torch.linspace(-1, 1, 64).view(8, 8).expand(2, 1, channels, 8, 8).clone()
        save_grid(tmp_path / "both.png", generated, real, ["a", "b"], title="run")
        real[1] = torch.nan
        save_grid(tmp_path / "one.png", generated, real, ["a", "b"], title="run")
        both, one = colors(tmp_path / "both.png"), colors(tmp_path / "one.png")
        where = np.argwhere((both != one).any(axis=-1))
        top, left = where.min(axis=0)
        assert (one[top : top + 64, left : left + 64] == 255).all()
        assert (both[:top] == one[:top]).all(), "the other row is as it was"


def test_a_class_without_a_readable_image_has_no_real_ones():
    class Two(ImageDataset):
        class_labels = np.array([0, 1, 0])
        sample_shape = (3, 2, 2)

        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index == 1:
                raise CorruptImageError("1.png")
            return {"sample": torch.full((3, 2, 2), float(index))}

    found = real_samples(Two(), labels=[0, 1], samples_per_label=3, conditional=True, to_pixels=lambda real: real / 2)
    assert found[0, :, 0, 0, 0].tolist() == [0, 1, 1]
    assert found[1].isnan().all()


def test_a_grid_gives_back_the_cells_that_were_drawn(tmp_path):
    shades = torch.tensor([[40, 100], [160, 220]], dtype=torch.uint8)
    samples = (shades / 127.5 - 1)[:, :, None, None, None].expand(2, 2, 3, 8, 8)
    save_grid(tmp_path / "a.png", samples, torch.zeros(2, 1, 3, 8, 8), ["zero", "one"], title="run")
    cells, labels = read_cells(tmp_path / "a.png")
    assert labels == ["zero", "one"]
    assert torch.equal(cells, shades[:, :, None, None, None].expand(2, 2, 64, 64, 3))


@pytest.mark.parametrize(
    "layout",
    [
        {"num_columns": 2**31 - 1},
        {"left": 10**30},
        {"column_pitch": 0},
        {"labels": [1, 2, 3]},
        {"labels": ["again"] * 1_000_000},
        None,
    ],
    ids=lambda layout: next(iter(layout or ["none"])),
)
def test_a_grid_with_a_layout_of_a_stranger_is_named(tmp_path, layout):
    path = tmp_path / "a.png"
    save_grid(path, torch.zeros(3, 2, 3, 8, 8), None, ["a", "b", "c"], title="run")
    with Image.open(path) as picture:
        about = PngInfo()
        if layout is not None:
            about.add_text(LAYOUT_KEY, json.dumps(json.loads(picture.info[LAYOUT_KEY]) | layout))
        picture.save(path, pnginfo=about)
    with refused(str(path), "grid"):
        read_cells(path)
