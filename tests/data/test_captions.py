# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Captioned images and videos: all sources, user errors, buckets, captions and the identity of encoded latents."""

from __future__ import annotations

import functools
import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_files import Files, greys, picture, write, write_tar
from PIL import Image

from torchditan.config.options import Config, Dataset
from torchditan.config.rules import validate
from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets import DATASETS, build_dataset
from torchditan.datasets.buckets import bucket_sizes, nearest_bucket
from torchditan.errors import ConfigError

encode = functools.partial(picture, size=(8, 8))


def open_captions(root: Path | str, split: Any = "train", **options: Any) -> Any:
    config = Dataset(dataset_name="captions", **{"root_dir": str(root), "image_size": [8], **options})
    return build_dataset(config, split=split)


def names(dataset: Any) -> list[str]:
    return [dataset.name_of(index) for index in range(len(dataset))]


PAIRS: Files = {
    "a.png": encode(10),
    "a.txt": "a dog",
    "deep/b.webp": encode(20, suffix=".webp", lossless=True),
    "deep/b.txt": "\ufeff a\n cat ",
}


def test_the_number_before_a_folder_repeats_its_images(tmp_path: Path) -> None:
    files = {"3_dog/a.png": encode(1), "3_dog/a.txt": "a", "2024_trip/b.png": encode(2), "2024_trip/b.txt": "b"}
    dataset = open_captions(write(tmp_path, files))
    assert greys(dataset) == [2, 1, 1, 1]
    assert len(dataset) == 4 and dataset.captions == ["b", "a", "a", "a"]
    assert dataset.sample_shape == dataset.shape_of(0) == tuple(dataset[0]["sample"].shape) == (3, 8, 8)
    assert (dataset.class_names, dataset.horizontal_flip) == ([], False)
    assert len({dataset.content_key(index) for index in range(4)}) == 2
    assert np.concatenate(dataset.groups()).tolist() == [0, 1, 2, 3]
    assert any("3_dog x 3" in line and "2024_trip" not in line for line in dataset.reading)


def test_images_of_a_metadata_file_repeat_as_it_says(tmp_path: Path) -> None:
    """`0_cat/` and `1_dog/` next to a metadata file are more often classes than repeats."""
    rows = [{"file_name": "0_cat/a.png", "text": "a"}, {"file_name": "3_dog/b.png", "text": "b", "repeats": 2}]
    lines = "\n".join(map(json.dumps, rows))
    files: Files = {"0_cat/a.png": encode(1), "3_dog/b.png": encode(2), "metadata.jsonl": lines}
    assert greys(open_captions(write(tmp_path, files))) == [1, 2, 2]


def test_captions_of_several_lines_are_joined_and_named(tmp_path: Path) -> None:
    files: Files = {"a.png": encode(1), "a.txt": "a dog\n\nin snow", "b.png": encode(2), "b.txt": "\na cat\n"}
    write_tar(write(tmp_path / "folder", files).parent / "shards/0.tar", files)
    for root, name in ((tmp_path / "folder", "a.txt"), (tmp_path / "shards", "0.tar/a.txt")):
        dataset = open_captions(root)
        assert dataset.captions == ["a dog in snow", "a cat"]
        assert [line.endswith(f" {name}") for line in dataset.reading if "1 caption of several lines" in line] == [True]


def test_several_captions_of_an_image_have_weights(tmp_path: Path) -> None:
    lines = [
        {
            "file_name": "a.png",
            "text": ["a dog", " [trigger]\n in snow", "a dog"],
            "weights": [3, 4, 1.0],
            "repeats": 2,
        },
        {"file_name": "deep/b.webp", "text": ["one, two, three", "four"]},
    ]
    write(tmp_path, {**PAIRS, "metadata.jsonl": "\n".join(map(json.dumps, lines))})
    dataset = open_captions(tmp_path, trigger_word="sks")
    assert dataset.captions == ["sks, a dog", "sks, a dog", "sks, one, two, three"]
    assert dataset[0]["caption"] == "sks, a dog"
    assert dataset.caption_variants(0) == dataset.caption_variants(1) == ["sks, a dog", "sks in snow"]
    assert dataset.caption_weights(0) == [0.5, 0.5]
    shuffled = open_captions(tmp_path, trigger_word="sks", shuffle_tags=50)
    *variants, last = shuffled.caption_variants(2)
    assert len(variants) == 6 and last == "sks, four"
    assert shuffled.caption_weights(2) == pytest.approx([*[1 / 12] * 6, 1 / 2])  # each caption gets half
    assert open_captions(write(tmp_path / "one", PAIRS)).caption_weights(0) == [1.0]


def parquet(captions: Sequence[Any]) -> bytes:
    pyarrow, buffer = pytest.importorskip("pyarrow"), io.BytesIO()
    images = [{"bytes": encode(10 * (row + 1)), "path": None} for row in range(len(captions))]
    columns = {"image": images, "text": captions, "number": [1] * len(captions)}
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def test_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "hub", {"train.parquet": parquet(["one", "two"])})
    files = {"train/a.png": encode(50), "train/metadata.jsonl": '{"file_name": "a.png", "text": "a dog"}\n'}
    write(tmp_path / "images", files)
    tables, images = (open_captions("", root_dir=None, hub_name=str(tmp_path / name)) for name in ("hub", "images"))
    assert (greys(tables), tables.captions) == ([10, 20], ["one", "two"])
    assert (greys(images), images.captions) == ([50], ["a dog"])
    assert images.name_of(0) == f"{tmp_path}/images, row 0"
    write_tar(tmp_path / "0.tar", {"x.png": encode(10), "x.txt": "x"})  # the same bytes are the same latent
    assert open_captions(tmp_path / "0.tar").content_key(0) == tables.content_key(0) != tables.content_key(1)


def write_video(path: Path, shown: list[int], *, size: tuple[int, int] = (16, 32), codec: str = "mpeg4") -> Path:
    """Frames of (height, width), the upper half grey, the lower black."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for grey in shown:
            pixels = np.zeros((*size, 3), dtype=np.uint8)
            pixels[: size[0] // 2] = grey
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "mpeg4"), ("a.webm", "libvpx"), ("a.gif", "gif")])
def test_the_first_frames_of_a_video(tmp_path: Path, name: str, codec: str) -> None:
    shown = [0, 60, 120, 180, 240]
    if codec == "gif":
        first, *others = (Image.new("L", (32, 16), grey) for grey in shown)
        first.save(tmp_path / name, save_all=True, append_images=others, duration=125)
        pytest.importorskip("av")
    else:
        write_video(tmp_path / name, shown, codec=codec)
    write(tmp_path, {"a.txt": "it brightens", "a.jpg": b"a preview"})
    dataset = open_captions(tmp_path, num_frames=3, image_size=[16, 32])
    sample = dataset[0]["sample"]
    assert dataset.sample_shape == tuple(sample.shape) == (3, 3, 16, 32)
    levels = (sample[:, :, 2, 16] + 1) * 127.5  # (C, F)
    assert (levels - torch.tensor([0.0, 60.0, 120.0])).abs().max() < 12  # lossy
    assert dataset.captions == ["it brightens"]
    write_tar(tmp_path / "tar/0.tar", {f"0{name[1:]}": (tmp_path / name).read_bytes(), "0.txt": "it brightens"})
    in_tar = open_captions(tmp_path / "tar", num_frames=3, image_size=[16, 32])
    assert torch.equal(in_tar[0]["sample"], sample)


def test_a_video_is_turned_as_the_camera_was(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", [200, 200])
    write(tmp_path, {"a.txt": "x"})
    data, one, none = path.read_bytes(), (1 << 16).to_bytes(4, "big"), bytes(4)
    track = data.index(b"tkhd")
    matrix = data.index(one + none * 3 + one, track)
    clockwise = none + one + none + (-(1 << 16)).to_bytes(4, "big", signed=True) + none
    path.write_bytes(data[:matrix] + clockwise + data[matrix + len(clockwise) :])
    sample = open_captions(tmp_path, num_frames=1, image_size=[32, 16])[0]["sample"][0, 0]
    assert sample[:, 12].mean() > 0.4  # what was above is on the right
    assert sample[:, 3].mean() < -0.8


def test_folders_of_numbered_frames_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    files: Files = {f"2_x/clip/frame{number}.png": encode(number) for number in range(12)}
    dataset = open_captions(write(tmp_path, {**files, "2_x/clip.txt": "a clip"}), num_frames=11)
    assert names(dataset) == ["2_x/clip"] * 2
    assert [round((level.item() + 1) * 127.5) for level in dataset[0]["sample"][0, :, 0, 0]] == list(range(11))
    before = dataset.content_key(0)
    write(tmp_path, {"2_x/clip/frame3.png": encode(200)})
    assert open_captions(tmp_path, num_frames=11).content_key(0) != before
    write(tmp_path, {"012_jump/1.png": encode(1), "012_jump.txt": "a jump"})  # a video, no folder of videos
    assert names(open_captions(tmp_path, num_frames=1)) == ["012_jump", *["2_x/clip"] * 2]


def test_the_trigger_word(tmp_path: Path) -> None:
    captions = ["a photo of [trigger], [trigger]!", "a dog", "my sks dog", "masks"]
    files = {f"{row}.png": encode(row) for row in range(5)} | {f"{row}.txt": text for row, text in enumerate(captions)}
    dataset = open_captions(write(tmp_path, files), trigger_word="sks")
    assert dataset.captions == ["a photo of sks, sks!", "sks, a dog", "my sks dog", "sks, masks", "sks"]


def test_shuffled_tags_keep_the_first_and_depend_on_the_caption_alone(tmp_path: Path) -> None:
    files = {"a.png": encode(1), "a.txt": "sks,  b, c,d , e", "b.png": encode(2), "b.txt": "one, two"}
    write(tmp_path, files)
    dataset = open_captions(tmp_path, shuffle_tags=5)
    variants = dataset.caption_variants(0)
    assert len(set(variants)) == 5 and dataset.captions[0] == "sks, b, c,d , e"
    assert all(
        text.startswith("sks, ") and sorted(text.split(", ")) == ["b", "c", "d", "e", "sks"] for text in variants
    )
    assert variants == open_captions(tmp_path, shuffle_tags=5).caption_variants(0)
    assert variants[:2] == open_captions(tmp_path, shuffle_tags=2).caption_variants(0)
    assert dataset.caption_variants(1) == ["one, two"]
    assert open_captions(tmp_path).caption_variants(0) == [dataset.captions[0]]
    write(tmp_path, {"a2.png": encode(9), "a2.txt": files["a.txt"], "a.png": encode(7)})
    again = open_captions(tmp_path, shuffle_tags=5)
    assert again.caption_variants(0) == again.caption_variants(1) == variants


def test_buckets_have_about_the_area_and_the_nearest_shape_wins() -> None:
    buckets = bucket_sizes((512, 512), step=64)
    assert buckets == [(704, 384), (640, 384), (576, 448), (512, 512), (448, 576), (384, 640), (384, 704)]
    for area, step in itertools.product([(1024, 1024), (768, 512), (480, 832)], [16, 32, 64]):
        found = bucket_sizes(area, step=step)
        assert all(height % step == width % step == 0 for height, width in found)
        assert all(0.5 <= width / height <= 2 for height, width in found)
        assert all(abs(height * width / (area[0] * area[1]) - 1) < 0.07 for height, width in found)
        assert sorted(found) == sorted((width, height) for height, width in found)
    sizes = [(100, 100), (600, 400), (400, 600), (1000, 100), (100, 1000), (480, 620)]
    nearest = [(512, 512), (640, 384), (384, 640), (704, 384), (384, 704), (448, 576)]
    assert [buckets[nearest_bucket(size, buckets)] for size in sizes] == nearest


SIZES = [(40, 40), (30, 60), (60, 30), (48, 48), (60, 30), (50, 51), (72, 38)]


def write_sizes(root: Path) -> Path:
    for number, size in enumerate(SIZES):
        write(root, {f"{number}.png": encode(number, size=size), f"{number}.txt": str(number)})
    return root


def test_with_buckets_every_image_is_brought_to_the_size_that_is_nearest_its_shape(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying, shown upright
    turned = encode(7, size=(30, 60), suffix=".jpg", exif=exif)
    write(write_sizes(tmp_path), {"7.jpg": turned, "7.txt": "turned"})
    dataset = open_captions(tmp_path, image_size=[32], aspect_buckets=True, bucket_step=8)
    assert dataset.buckets == [(48, 24), (40, 24), (32, 32), (24, 40), (24, 48)]
    sizes = [(32, 32), (24, 48), (48, 24), (32, 32), (48, 24), (32, 32), (48, 24), (48, 24)]
    assert [dataset.shape_of(index)[1:] for index in range(8)] == sizes
    assert all(tuple(dataset[index]["sample"].shape) == dataset.shape_of(index) for index in range(8))
    assert [group.tolist() for group in dataset.groups()] == [[2, 4, 6, 7], [0, 3, 5], [1]]
    assert dataset.sample_shape == (3, 48, 24)  # the most common
    without = open_captions(tmp_path, image_size=[30])
    assert [group.tolist() for group in without.groups()] == [list(range(8))]


def test_content_keys_change_with_bytes_and_size_and_with_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": encode(10, size=(16, 16)), "a.txt": "a dog"})
    key = open_captions(tmp_path).content_key(0)
    assert len(key) == 64
    assert open_captions(tmp_path, image_size=[16]).content_key(0) != key
    assert open_captions(tmp_path, crop="adm").content_key(0) != key
    write(tmp_path, {"a.txt": "a cat", "b.png": encode(11), "b.txt": "b"})
    (tmp_path / "a.png").rename(tmp_path / "c.png")
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    options = {"trigger_word": "sks", "shuffle_tags": 2, "upscale": True}
    assert open_captions(tmp_path, **options).content_key(1) == key
    write(tmp_path, {"c.png": encode(12, size=(16, 16))})
    assert open_captions(tmp_path).content_key(1) != key


def write_many(root: Path, count: int) -> Path:
    for number in range(count):
        write(root, {f"2_x/{number:03}.png": encode(number), f"2_x/{number:03}.txt": "x"})
    return root


def test_a_share_is_held_out_and_shown_once_each(tmp_path: Path) -> None:
    for count, held_out, expected in ((20, None, 1), (150, None, 3), (5, 2, 2)):
        root = write_many(tmp_path / str(count), count)
        train, validation = (open_captions(root, split, held_out=held_out) for split in ("train", "validation"))
        assert len(validation) == expected
        assert sorted(greys(train) + 2 * greys(validation)) == sorted(2 * list(range(count)))
    root = write_many(tmp_path / "19", 19)
    assert len(open_captions(root)) == 38
    with pytest.raises(ConfigError, match=r"dataset.held_out = none: none .*19 image\(s\) .*held out by default;"):
        open_captions(root, "validation")
    with pytest.raises(ConfigError, match=r"dataset.held_out = 0: none .* is held out; .*--evaluation.freq 0$"):
        open_captions(root, "validation", held_out=0)


def row(**values: Any) -> str:
    return json.dumps({"file_name": "a.png", "text": "one", **values})


def table(*captions: Any) -> Callable[[], Files]:
    return lambda: {"a.parquet": parquet(captions)}


# Message; options; files in addition to PAIRS, or a function that gives all files.
MISTAKES: list[tuple[str, Files | Callable[[], Files], dict[str, Any]]] = [
    ("holds no images with captions", dict, {}),
    ("holds no videos with captions", lambda: {"a.png": encode()}, {"num_frames": 2}),
    (r"image belongs to .*caption x0.txt, x1.txt, x2.txt .*1 more",
     {f"x{i}.txt": "x" for i in range(4)}, {}),
    (r"caption belongs to c.png, d.gif;", {"c.png": encode(), "d.gif": encode(suffix=".gif")}, {}),
    (r"a.jpg .*a.png share .*caption", {"a.jpg": encode(suffix=".jpg")}, {}),
    (r"caption .*a.txt .*empty", {"a.txt": " \n"}, {}),
    (r"a.txt .*UTF-8 text", {"a.txt": b"\xff\xfe\x00"}, {}),
    (r"folder 0_x/ repeats .*images 0 times", {"0_x/a.png": encode(), "0_x/a.txt": "a"}, {}),
    (r"dataset.image_size = \[9\]: a.png .*8 x 8 pixels, fewer .*9 x 9", {}, {"image_size": [9]}),
    (r"c.png .*8 x 20 .*9 x 9", {"c.png": encode(size=(8, 20)), "c.txt": "c", "a.png": encode(size=(9, 9))},
     {"image_size": [9]}),
    (r"a.png .*8 x 8 .*16 x 16", {}, {"image_size": [16], "aspect_buckets": True, "bucket_step": 16}),
    (r"bucket_step = 64: .*size .*8 x 8; .*most 8", {}, {"aspect_buckets": True}),
    (r"c.png: .*readable image", {"c.png": encode()[:20], "c.txt": "c"}, {}),
    (r"trigger_word = none: .*caption .*a.png .*\[trigger\]", {"a.txt": "a [trigger]"}, {}),
    (r"dataset.held_out = 2: .*below 2", {}, {"held_out": 2}),
    (r"dataset.held_out = 1: .*; leave it out",
     lambda: {f"{split}/{name}": data for split in ("train", "val") for name, data in PAIRS.items()},
     {"held_out": 1}),
    (r"dataset.image_size = none: captions", {}, {"image_size": None}),
    (r'dataset.crop = "random": captions', {}, {"crop": "random"}),
    (r"num_classes = 3: captions .*labels", {}, {"num_classes": 3}),
    (r"dataset.root_dir = .*: captions", {}, {"hub_name": "a/b"}),
    (r"metadata.jsonl, line 2 .*JSON", {"metadata.jsonl": row() + "\n{"}, {}),
    (r"metadata.jsonl, line 1: .*\{", {"metadata.jsonl": "[]"}, {}),
    (r"caption_key = .text.: metadata.jsonl, line 1 .*column; .*file_name, caption",
     {"metadata.jsonl": '{"file_name": "a.png", "caption": "x"}'}, {}),
    (r"metadata.jsonl, line 1: text .*list of texts", {"metadata.jsonl": row(text=["a", 1])}, {}),
    (r"line 1: weights .*list of 2 positive", {"metadata.jsonl": row(text=["a", "b"], weights=[1, 0])}, {}),
    (r"metadata.jsonl, line 1: weights .*list of 1 positive", {"metadata.jsonl": row(weights=[float("nan")])}, {}),
    (r"caption .*metadata.jsonl, line 1 .*Unicode", {"metadata.jsonl": row(text="half \ud83d")}, {}),
    (r"caption .*metadata.jsonl, line 1 .*empty", {"metadata.jsonl": row(text=["a", " "])}, {}),
    (r"line 1: repeats .*integer .*least 1", {"metadata.jsonl": row(repeats=0)}, {}),
    (r"line 2: a.png .*listed twice", {"metadata.jsonl": row() + "\n" + row()}, {}),
    (r"line 1: gone.png .*exist", {"metadata.jsonl": row(file_name="gone.png")}, {}),
    (r"line 1: ../x.png is outside .*folder", {"metadata.jsonl": row(file_name="../x.png")}, {}),
    (r"line 1: /x.png is outside .*folder", {"metadata.jsonl": row(file_name="/x.png")}, {}),
    (r"line 1: a.txt .*image; videos .*dataset.num_frames", {"metadata.jsonl": row(file_name="a.txt")}, {}),
    (r"line 1: .*folder deep .*frames",
     lambda: {"deep/x.txt": "", "metadata.jsonl": row(file_name="deep")}, {"num_frames": 2}),
    (r"metadata.csv, line 2 .*more columns .*header", {"metadata.csv": "file_name,text\na.png,a cat, grey"}, {}),
    (r"metadata.csv, line 3: gone.png", {"metadata.csv": "file_name,text\n\ngone.png,a cat"}, {}),
    (r"metadata.csv: .*line 2 .*CSV", {"metadata.csv": 'file_name,text\n\na.png,"Untitled" by Rothko'}, {}),
    (r"metadata.csv: .*line 1 .*CSV", {"metadata.csv": 'file_name,text\na.png,"a dog\ndeep/b.webp,a cat'}, {}),
    (r"metadata.csv: .*line 1 .*CSV", {"metadata.csv": f'file_name,text\na.png,"{"x" * 200_000}'}, {}),
    (r"metadata.csv has several columns text", {"metadata.csv": "file_name,text,text\na.png,a cat,a dog"}, {}),
    (r"a.tar .*readable, uncompressed tar", lambda: {"a.tar": b"no tar" * 200}, {}),
    (r"a.parquet .*readable parquet", lambda: {"a.parquet": b"no"}, {}),
    (r"image_key = .picture.: .*columns .*a.parquet: image, text, number",
     table("x"), {"image_key": "picture"}),
    (r"caption_key = .number.: .*int64 in a.parquet; .*text",
     table("x"), {"caption_key": "number"}),
    (r"image_key = .text.: .*string in a.parquet; .*images",
     table("x"), {"image_key": "text"}),
    (r"caption belongs to a.parquet, row 1;", table("x", None), {}),
    (r"caption .*a.parquet, row 1 .*empty", table("x", " "), {}),
    (r"dataset.num_frames = 2: parquet files .*hub datasets .*images",
     table("x"), {"num_frames": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "files", "options"), MISTAKES, ids=[mistake[0][:40] for mistake in MISTAKES])
def test_mistakes_are_one_line(
    tmp_path: Path, message: str, files: Files | Callable[[], Files], options: dict[str, Any]
) -> None:
    write(tmp_path, files() if callable(files) else {**PAIRS, **files})
    with pytest.raises(ConfigError, match=message) as error:
        open_captions(tmp_path, **options)
    assert "\n" not in str(error.value)


def test_a_video_that_is_broken_or_too_short_is_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", [0, 1, 2])
    write(tmp_path, {"a.txt": "a", "frames/1.png": encode(), "frames.txt": "b"})
    with pytest.raises(CorruptImageError, match=r"a.mp4: .*usable video \(it .*3 .*5 frames"):
        open_captions(tmp_path, num_frames=5)[0]
    with pytest.raises(CorruptImageError, match=r"frames: .*usable video \(it .*1 .*2 frames"):
        open_captions(tmp_path, num_frames=2)[1]
    for data in (b"nonsense", path.read_bytes()[:60], b""):
        path.write_bytes(data)
        with pytest.raises(CorruptImageError, match=r"a.mp4: .*usable video .*; repair .*remove it$") as error:
            open_captions(tmp_path, num_frames=2)
        assert "\n" not in str(error.value)


def test_an_unreadable_image_is_named_or_left_out_before_it_is_encoded(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    inside = bytearray(buffer.getvalue())
    inside[3000:3050] = bytes(50)
    dataset = open_captions(write(tmp_path, PAIRS))
    message = r"a.png: not a readable image \(.*\); repair or remove it, .*--dataset.corrupt_images skip"
    write(tmp_path, {"a.png": encode(size=(50, 50))[:50]})  # its end is missing
    for read in (lambda: dataset[0], lambda: open_captions(tmp_path)):
        with pytest.raises(CorruptImageError, match=message):
            read()
    write(tmp_path, {"a.png": b"no", "b.png": b"no", "b.txt": "b", "inside.png": bytes(inside), "inside.txt": "c"})
    with pytest.raises(CorruptImageError, match=r"a.png: .*remove it.*; b.png: .*remove it"):
        open_captions(tmp_path)
    skipping = open_captions(tmp_path, corrupt_images="skip")
    assert skipping.captions == ["a cat"] and skipping.shape_of(0) == (3, 8, 8)
    assert any(all(name in line for name in ("a.png", "b.png", "inside.png")) for line in skipping.reading)
    (tmp_path / "a.png").unlink()
    with pytest.raises(CorruptImageError, match=r"a.png: .*readable image \(No .*file"):
        dataset.content_key(0)


def test_other_datasets_refuse_options_of_captions_and_dummy_passes_over_them() -> None:
    with pytest.raises(ConfigError, match=r"dataset.aspect_buckets = true: .*captions"):
        validate(Config(dataset=Dataset(aspect_buckets=True)))
    assert "captions" in DATASETS
    validate(Config(dataset=Dataset(dataset_name="dummy", trigger_word="sks", num_frames=3)))


def test_pyav_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'torchditan\[finetune\]'"):
        open_captions(write(tmp_path, {"a.mp4": b"x", "a.txt": "x"}), num_frames=2)
