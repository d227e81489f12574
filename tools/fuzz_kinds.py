# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files of strangers: an example of each kind, written by our own code, and the call that opens it."""

from __future__ import annotations

import atexit
import functools
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cards
import numpy as np
import tiny_runs
import torch
from fuzz_cases import PARQUET_MEMORY, PICTURE_MEMORY, Kind
from ledger_rows import row
from PIL import Image
from safetensors.torch import save, save_file
from tiny_published import tiny_flux

from torchditan import load
from torchditan.checkpoint.files import write_manifest
from torchditan.checkpoint.loading import read_manifest
from torchditan.checkpoint.weights import save_weights
from torchditan.config.loader import load_config, to_dict, to_toml
from torchditan.config.options import Autoencoder, Dataset, LoRA, Model, Quantize
from torchditan.config.prompts import read_prompts
from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets import build_dataset, build_stored_latents
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import load_grid
from torchditan.extras.ablation.ledger import write_ledger
from torchditan.extras.autoencoders import open_autoencoder
from torchditan.extras.evaluation.card import read_card, write_card
from torchditan.extras.evaluation.sample_batches import (
    has_images,
    image_shape,
    read_images,
    read_statistics,
)
from torchditan.extras.published.families import build_published_spec
from torchditan.extras.published.flux import Flux
from torchditan.extras.published.lora import load_assistant
from torchditan.extras.report.report import write_report
from torchditan.extras.sharing.model_card import Statements
from torchditan.extras.sharing.share import share
from torchditan.extras.weights.importing import import_weights
from torchditan.extras.weights.initial import load_initial_weights
from torchditan.extras.weights.opening import open_weights
from torchditan.extras.weights.shared import is_shared
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.run.atomic_files import sha256_of
from torchditan.sampling.grid_picture import save_grid

REPOSITORY = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
_FLAGS = (
    *("--training.steps=2", "--metrics.enable_sampling", "--metrics.sample_freq=1", "--sampling.num_steps=1"),
    *("--sampling.max_classes=2", "--sampling.images_per_class=1", "--validation.freq=2", "--validation.num_images=8"),
    *tiny_runs.KEEP,
)


@functools.cache
def tiny_run() -> Path:
    """A run of two steps on digits, with samples, metrics and a checkpoint."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, str(REPOSITORY / "train.py"), *tiny_runs.job(folder / "run", *_FLAGS)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder / "run"


def _copy_run(folder: Path) -> None:
    shutil.copytree(tiny_run(), folder / "run")


def _use(trained: TrainedModel) -> None:
    trained.sample(classes=[0], seed=0, num_steps=1)


# Weights


def _make_safetensors(folder: Path) -> None:
    save_weights(folder / "model.safetensors", open_weights(tiny_run()), dtype=torch.float32)


def _open_safetensors() -> None:
    path = Path("model.safetensors")
    _use(load(path))
    import_weights(path, Path("imported"))


def _open_initial() -> None:
    trained = load(tiny_run())
    load_initial_weights(trained.model, "run" if Path("run").exists() else "model.safetensors", config=trained.config)


def _dit_weights() -> dict[str, Any]:
    from own_reading import DIT, random_weights

    return dict(random_weights(replace(DIT, side=4)))


def _make_pt(folder: Path) -> None:
    torch.save({"ema": _dit_weights(), "args": {"image_size": 256}}, folder / "weights.pt")


def _open_pt() -> None:
    import_weights(Path("weights.pt"), Path("imported"), format="dit", given={"num_heads": 2})


def _make_shared(folder: Path) -> None:
    share(tiny_run(), folder / "shared", statements=Statements(license="cc0-1.0"), with_samples=False)


def _seal_shared() -> None:
    path = Path("shared/config.json")
    content = json.loads(path.read_bytes())
    content["sha256"] = sha256_of(path.parent / "model.safetensors")
    path.write_text(json.dumps(content))


def _open_shared() -> None:
    if not is_shared("shared"):  # without weights it may be a run, whose links are the user's
        raise ConfigError("no shared model")
    _use(load("shared"))


# Runs and checkpoints


def _seal_checkpoint() -> None:
    (checkpoint,) = Path("run/checkpoint").glob("step-*")
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, step=manifest["step"], trajectory=manifest["trajectory"])
    read_manifest(checkpoint)


def _open_run() -> None:
    _use(load("run"))


def _share_run() -> None:
    share(Path("run"), Path("public"), statements=Statements(), with_samples=False)


def _report_run() -> None:
    write_report([Path("run")])


def _make_two_runs(folder: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(tiny_run(), folder / name, ignore=shutil.ignore_patterns("checkpoint", "tensorboard"))
    config = json.loads((folder / "two/config.json").read_bytes())
    config["run_id"], config["config"]["optimizer"]["lr"] = "0123456789abcdef", 2e-3
    (folder / "two/config.json").write_text(json.dumps(config))
    lines = (folder / "two/metrics.jsonl").read_text().splitlines()
    changed = [{**json.loads(line), "loss": 0.5, "elapsed_s": number} for number, line in enumerate(lines, start=1)]
    (folder / "two/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))


def _compare_runs() -> None:
    write_report([Path("one"), Path("two")], compare=True, out=Path("compared"))


def _make_run_folder(folder: Path) -> None:
    _make_two_runs(folder / "runs")


def _analyse_runs() -> None:
    write_report([Path("runs")], out=Path("analysis"))


def _undrawn(call: Callable[[], object]) -> Callable[[], object]:
    """The same without rendering figures, which takes seconds."""

    def save(self: object, file: Any, *, format: str, **options: Any) -> None:
        file.write(b"<svg></svg>" if format == "svg" else b"")

    def undrawn() -> None:
        with patch("matplotlib.figure.Figure.savefig", save):
            call()

    return undrawn


# Grids and cards


def _make_ledger(folder: Path) -> None:
    grid = folder / "grid"
    grid.mkdir()
    rows = [
        row(batch=batch, compiled=compiled, throughput=100 * batch**0.5 * (1.5 if compiled else 1), memory=2.0 * batch)
        for batch in (4, 8)
        for compiled in (False, True)
    ]
    write_ledger(grid, rows, axes=[])
    content = {"schema_version": 1, "kind": "torchditan ablation grid", "name": "grid", "base": None, "exclude": []}
    (grid / "grid.json").write_text(json.dumps(content | {"axes": {}, "settings": {"training.seed": 0}}))
    for one in rows:
        run = grid / "runs" / one["run_name"]
        run.mkdir(parents=True)
        lines = (json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 51))
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def _open_ledger() -> None:
    write_report([Path("grid")], out=Path("analysis"))


def _make_card(folder: Path) -> None:
    (folder / "one").mkdir()
    write_card(folder / "one", cards.card())


def _open_card() -> None:
    Path("again").mkdir()
    write_card(Path("again"), read_card("one"))


# Configurations and prompts


def _make_config(folder: Path) -> None:
    config = load_config(["--job.config_file=quickstart"])
    (folder / "job.toml").write_text(to_toml(config), encoding="utf-8")


def _open_config() -> None:
    to_dict(load_config(["--job.config_file=job.toml"]))


def _make_grid(folder: Path) -> None:
    shutil.copy(REPOSITORY / "train_configs/ablations/convergence.toml", folder / "grid.toml")


def _open_grid() -> None:
    grid = load_grid("./grid.toml")
    grid.runs()


def _make_prompts(folder: Path) -> None:
    lines = ["# a comment", "a red circle", "a blue square left of a green triangle", "", "\u4e00 \U0001f600"]
    (folder / "prompts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _open_prompts() -> None:
    prompts = read_prompts("--prompts", ["@prompts.txt"])[:16]
    save_grid(Path("grid.png"), torch.zeros(len(prompts), 1, 3, 8, 8), None, prompts, title="prompts")


# Datasets


def _png(grey: int, side: int = 8) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), grey, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(buffer, kind)
    return buffer.getvalue()


def _read_all(name: str, root: str = ".", **options: Any) -> None:
    config = Dataset(**{"dataset_name": name, "root_dir": root, "image_size": [8, 8], **options})
    _read_items(build_dataset(config, split="train", cache_folder=Path("cache")))


def _read_items(dataset: Any) -> None:
    refused: ConfigError | None = None
    for index in range(min(32, len(dataset))):
        try:
            item = dataset[index]
            assert item["sample"].isfinite().all() or dataset.name == "latents"
        except CorruptImageError as error:
            refused = error
    if hasattr(dataset, "check_files"):
        for _ in dataset.check_files(Path("cache")):
            pass
    if refused is not None:
        raise refused


def _write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _make_tar(folder: Path) -> None:
    for shard in range(2):
        members: list[tuple[str, bytes]] = []
        for number in range(3):
            key = f"{shard}{number:03d}"
            members += [(f"{key}.png", _png(number)), (f"{key}.json", json.dumps({"label": number}).encode())]
            members += [(f"{key}.cls", str(number).encode())] if shard else []
        _write_tar(folder / f"{shard}.tar", members)
    (folder / "classes.txt").write_text("zero\none\ntwo\n")


def _open_tar() -> None:
    _read_all("webdataset")


def _make_caption_tar(folder: Path) -> None:
    text = {"text": ["a grey square", "a square"], "weights": [2, 1]}
    members = [
        ("0.png", _png(1)),
        ("0.txt", b"a square"),
        ("1.jpg", _picture("JPEG")),
        ("1.json", json.dumps(text).encode()),
    ]
    _write_tar(folder / "0.tar", members)


def _read_captions(**options: Any) -> None:
    config = Dataset(**{"dataset_name": "captions", "root_dir": ".", "image_size": [8, 8], **options})
    source = build_dataset(config, split="train", cache_folder=Path("cache"))
    refused: ConfigError | None = None
    captions: list[str] = []
    for index in range(min(16, len(source))):
        try:
            source[index]
            captions += source.caption_variants(index)  # type: ignore[attr-defined]
            source.content_key(index)  # type: ignore[attr-defined]
        except CorruptImageError as error:
            refused = error
    if captions := captions[:8]:  # none, if no picture can be read
        save_grid(Path("grid.png"), torch.zeros(len(captions), 1, 3, 8, 8), None, captions, title="captions")
    if refused is not None:
        raise refused


def _make_captions(folder: Path) -> None:
    rows = [
        {"file_name": "a.png", "text": "a grey square"},
        {"file_name": "in/b.jpg", "text": ["a picture", "another"], "weights": [1, 3]},
        {"file_name": "c.webp", "text": "a third one"},
    ]
    (folder / "in").mkdir()
    (folder / "a.png").write_bytes(_png(9))
    (folder / "in/b.jpg").write_bytes(_picture("JPEG"))
    (folder / "c.webp").write_bytes(_picture("WEBP"))
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_images(folder: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir()
        for kind in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"):
            suffix = {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())
            (folder / name / f"{label}.{suffix}").write_bytes(_picture(kind))
    for name in ("cat", "dog"):
        for number in range(4):
            (folder / name / f"more{number}.png").write_bytes(_png(number))


def _make_latents(folder: Path) -> None:
    command = [sys.executable, "-m", "torchditan", "encode", "latents", "--autoencoder.name=haar"]
    command += ["--autoencoder.downsampling=2", "--dataset.num_workers=0", "--no_flip", "--split=train"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)


def _seal_latents() -> None:
    path = Path("latents/train/index.json")
    content = json.loads(path.read_bytes())
    for entry in content["shards"]:
        file = path.parent / entry["file"]
        entry |= {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    path.write_text(json.dumps(content))


def _open_latents() -> None:
    _read_all("latents", "latents", image_size=None)


def _make_stored_latents(folder: Path) -> None:
    members: list[tuple[str, bytes]] = []
    for number in range(3):
        array, buffer = np.full((4, 2, 2), number, dtype=np.float32), io.BytesIO()
        np.save(buffer, array)
        data = save({"latents": torch.from_numpy(array)}) if number == 2 else buffer.getvalue()
        members += [(f"{number}.{'safetensors' if number == 2 else 'npy'}", data), (f"{number}.cls", b"1")]
    _write_tar(folder / "0.tar", members)


def _open_stored_latents() -> None:
    config = Dataset(dataset_name="webdataset", root_dir=".")
    _read_items(build_stored_latents(config, split="train", cache_folder=Path("cache")))


def _make_cifar(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def _make_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = {"image": [{"bytes": _png(number), "path": f"{number}.png"} for number in range(8)], "label": [0, 1] * 4}
    parquet.write_table(pyarrow.table(table), folder / "train.parquet")


def _open_parquet() -> None:
    _read_all("cifar10", "train.parquet", image_size=None)


# Reference statistics and autoencoders


def _make_npz(folder: Path) -> None:
    rng = np.random.default_rng(0)
    images, statistics = rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8), {"mu": np.zeros(16), "sigma": np.eye(16)}
    np.savez(folder / "reference.npz", arr_0=images, extractor="E", **statistics)


def _open_npz() -> None:
    path = Path("reference.npz")
    pool, _ = read_statistics(path, extractor="E")
    if pool is not None and len(pool.mean) != 16:
        raise ConfigError("another number of features")
    if has_images(path):
        image_shape(path)
        for number, images in enumerate(read_images(path, batch_size=64)):
            assert images.dtype == torch.uint8
            if number > 64:
                break


def _open_as(name: str, path: str) -> None:
    autoencoder = open_autoencoder(Autoencoder(name=name, path=path), device=CPU, image_channels=None)
    if autoencoder.shift is not None:
        side = 8 * autoencoder.downsampling
        autoencoder.encode(torch.zeros(1, autoencoder.image_channels, side, side))


def _make_diffusers(folder: Path) -> None:
    import diffusers

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": [8, 8], "norm_num_groups": 2, "latent_channels": 4}
    diffusers.AutoencoderKL(in_channels=3, out_channels=3, **blocks, **sizes).save_pretrained(folder / "vae")


def _make_published(folder: Path) -> None:
    torch.manual_seed(0)
    tiny_flux().save_pretrained(folder / "flux", max_shard_size="50KB")


def _open_published() -> None:
    config = Model(name="flux", flavor="debugmodel", path="flux")
    spec = build_published_spec(
        config, sample_shape=(1, 8, 8), lora=LoRA(), quantize=Quantize(), text_length=8, embedded_guidance=3.5
    )
    model: Any = spec.build()
    model.to_empty(device="cpu")
    model.init_weights(0)


def _make_lora(folder: Path) -> None:
    tensors = {}
    for name in ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"):
        tensors[f"transformer.{name}.lora_A.weight"] = torch.ones(2, 32)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.ones(32, 2)
    tensors["transformer.transformer_blocks.0.attn.to_q.alpha"] = torch.tensor(4.0)
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4})}
    save_file(tensors, folder / "lora.safetensors", metadata)


def _open_lora() -> None:
    load_assistant(tiny_flux(), Path("lora.safetensors"), table=Flux.original_layers)


_RUN_FILES = ("run/*.json", "run/*.jsonl", "run/samples/*")

KINDS = {
    kind.name: kind
    for kind in (
        Kind("safetensors", _make_safetensors, _open_safetensors),
        Kind("initial_safetensors", _make_safetensors, _open_initial),
        Kind("pt", _make_pt, _open_pt),
        Kind("npz", _make_npz, _open_npz),
        Kind("shared_model", _make_shared, _open_shared, seal=_seal_shared, refuses_links=True),
        Kind("tar", _make_tar, _open_tar, memory=PICTURE_MEMORY),
        Kind(
            "caption_tar",
            _make_caption_tar,
            functools.partial(_read_captions, caption_key="text"),
            memory=PICTURE_MEMORY,
        ),
        Kind("captions", _make_captions, functools.partial(_read_captions, caption_key="text"), memory=PICTURE_MEMORY),
        Kind("images", _make_images, functools.partial(_read_all, "folder"), memory=PICTURE_MEMORY),
        Kind("latents", _make_latents, _open_latents, seal=_seal_latents),
        Kind("stored_latents", _make_stored_latents, _open_stored_latents),
        Kind("published", _make_published, _open_published),
        Kind("lora", _make_lora, _open_lora),
        Kind("toml", _make_config, _open_config, may_read_outside=True),
        Kind("grid_toml", _make_grid, _open_grid, may_read_outside=True),
        Kind("prompts", _make_prompts, _open_prompts),
        Kind("card", _make_card, _open_card),
        Kind("run", _copy_run, _open_run, ("run/config.json", "run/checkpoint/**/*"), seal=_seal_checkpoint),
        Kind(
            "initial_run", _copy_run, _open_initial, ("run/config.json", "run/checkpoint/**/*"), seal=_seal_checkpoint
        ),
        Kind("run_to_share", _copy_run, _share_run, _RUN_FILES),
        Kind("run_report", _copy_run, _undrawn(_report_run), _RUN_FILES, memory=PICTURE_MEMORY),
        Kind("run_report_drawn", _copy_run, _report_run, _RUN_FILES, memory=PICTURE_MEMORY),
        Kind("compared_runs", _make_two_runs, _undrawn(_compare_runs), ("one/*.json*", "one/samples/*")),
        Kind("folder_of_runs", _make_run_folder, _undrawn(_analyse_runs), ("runs/*/*.json*",)),
        Kind("ledger", _make_ledger, _undrawn(_open_ledger)),
        Kind("ledger_drawn", _make_ledger, _open_ledger),
        Kind("parquet", _make_parquet, _open_parquet, memory=PARQUET_MEMORY),
        Kind("diffusers_autoencoder", _make_diffusers, functools.partial(_open_as, "diffusers", "vae")),
    )
}
"""What a stranger can send, by name."""
