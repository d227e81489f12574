# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan import --format`: from a file of another project to a run; and files that are refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cards import card
from own_reading import (
    DIGITS_AS_LATENTS,
    DIT,
    LIGHTNINGDIT,
    REPA,
    SIT,
    Model,
    Weights,
    dit_samples,
    euler_samples,
    forward,
    random_weights,
    repa_samples,
)
from refusals import assert_refused, refused
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchditan import load
from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.weights import Weights as Converted
from torchditan.extras.evaluation.card import about_run
from torchditan.extras.evaluation.card_tables import markdown
from torchditan.extras.weights.formats.dit import convert_repa
from torchditan.extras.weights.formats.foreign_files import read_foreign_weights
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.randomness import normal
from torchditan.registry import FORMATS
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from tests.conftest import RunScript
    from tests.zoo import Zoo

TINY_SIT = replace(SIT, side=4)  # digits in latents of 4 x 4 x 4
TRAIN = (
    "--dataset.num_workers=0",
    "--training.steps=2",
    "--training.global_batch_size=4",
    "--training.mixed_precision_param=float32",
    "--metrics.enable_sampling=false",
    "--checkpoint.enable_checkpoint",
)


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def training_file(path: Path, *, ema: Weights | None, raw: Weights) -> Path:
    """What the projects' training scripts save."""
    content = {"model": raw, "opt": {"state": {0: {"exp_avg": torch.ones(3)}}}, "args": argparse.Namespace(lr=1e-4)}
    return save(path, content if ema is None else {**content, "ema": ema})


def imported(path: Path, format: str, run_script: RunScript, *flags: object, run: str = "run") -> Path:
    outcome = run_script("torchditan", "import", path, run, f"--format={format}", *flags)
    assert (outcome.code, outcome.err) == (0, ""), outcome.err
    return Path(run).resolve()


def test_a_bare_file_becomes_a_run_that_says_what_to_do_next(tmp_path: Path, run_script: RunScript) -> None:
    path = save(tmp_path / "SiT.pt", random_weights(SIT))
    outcome = run_script("torchditan", "import", path, "run", "--format=sit", "--num_heads=4")
    assert (outcome.code, outcome.err) == (0, "")
    assert "- 10 classes, images of 64 x 64, autoencoder sd-vae" in outcome.out.splitlines()
    assert all(f"{word}: torchditan " in outcome.out for word in ("generate", "evaluate", "continue"))
    content = read_config(tmp_path / "run")
    config, origin = content["config"], content["imported"]
    assert (origin["file"], origin["format"], origin["weights"]) == ("SiT.pt", "sit", "ema")
    assert config["autoencoder"]["name"] == "sd-vae" and config["autoencoder"]["online"]
    assert (config["dataset"]["image_size"], config["dataset"]["num_classes"]) == ([64, 64], 10)
    assert config["diffusion"]["timestep_sampling"] == "uniform" and config["model"]["timestep_scale"] == 1.0
    assert config["ema"]["enable"] and config["sampling"]["guidance_channels"] == 3


LABELS = torch.tensor([3, 7])


def draw(run: Path, **sampling: Any) -> tuple[Tensor, Tensor]:
    """Samples of the imported run with the sampler and guidance that it came with, and the noise that they began as."""
    trained = TrainedModel.open(run, flags={f"sampling.{name}": value for name, value in sampling.items()})
    samples = trained.generate_rows(trained.rows(classes=LABELS), samples_per_row=1, seed=5, batch_size=2)[:, 0]
    noise = normal(5, "sample", [label << 32 for label in LABELS.tolist()], trained.sample_shape)
    return samples, noise


def test_samples_of_sit_are_those_of_an_own_reading(tmp_path: Path, run_script: RunScript) -> None:
    weights = random_weights(TINY_SIT)
    run = imported(save(tmp_path / "SiT.pt", weights), "sit", run_script, *DIGITS_AS_LATENTS)
    samples, noise = draw(run, sampler="euler", num_steps=6)
    options: dict[str, Any] = {"num_steps": 6, "scale": 4.0}
    theirs = euler_samples(weights, TINY_SIT, noise, LABELS, **options, channels=3)
    assert (samples - theirs).abs().max() < 1e-4
    all_channels = euler_samples(weights, TINY_SIT, noise, LABELS, **options, channels=4)
    assert (samples - all_channels).abs().max() > 1e-2


def test_samples_of_lightningdit_are_those_of_an_own_reading(tmp_path: Path, run_script: RunScript) -> None:
    model = replace(LIGHTNINGDIT, side=4, channels=4, output_channels=4)
    weights = random_weights(model)
    run = imported(save(tmp_path / "weights.pt", weights), "lightningdit", run_script, *DIGITS_AS_LATENTS)
    samples, noise = draw(run, num_steps=9)
    options: dict[str, Any] = {"num_steps": 9, "scale": 6.7, "channels": 3}
    theirs = euler_samples(weights, model, noise, LABELS, **options, shift=0.3, guided_from=0.125)
    assert (samples - theirs).abs().max() < 1e-4
    for wrong in ({"shift": 1 / 0.3, "guided_from": 0.125}, {"shift": 0.3}):
        assert (samples - euler_samples(weights, model, noise, LABELS, **options, **wrong)).abs().max() > 1e-2


def test_samples_of_repa_are_those_of_an_own_reading(tmp_path: Path, run_script: RunScript) -> None:
    model = replace(REPA, side=4)
    weights = random_weights(model)
    run = imported(save(tmp_path / "weights.pt", weights), "repa", run_script, *DIGITS_AS_LATENTS)
    samples, noise = draw(run, sampler="euler", num_steps=8)
    theirs = repa_samples(weights, model, noise, LABELS, num_steps=8, scale=1.8, guided_until=0.7)
    assert (samples - theirs).abs().max() < 1e-4
    wrong = repa_samples(weights, model, noise, LABELS, num_steps=8, scale=1.8, guided_until=1.0)
    assert (samples - wrong).abs().max() > 1e-2


def test_samples_of_dit_are_those_of_an_own_reading(tmp_path: Path, run_script: RunScript) -> None:
    """Ancestral steps with learned variance, guided on three channels, relative to their size."""
    model = replace(DIT, side=4)
    weights = random_weights(model)
    run = imported(save(tmp_path / "weights.pt", weights), "dit", run_script, *DIGITS_AS_LATENTS)
    samples, noise = draw(run, num_steps=5)
    numbers = [label << 32 for label in LABELS.tolist()]
    step_noise = [normal(5, f"sample step {step}", numbers, (4, 4, 4)) for step in range(5)]
    theirs = dit_samples(weights, model, noise, LABELS, step_noise, scale=4.0)
    assert (samples - theirs).abs().max() < 1e-4 * theirs.abs().max()
    for wrong in ({"spacing": "leading"}, {"guidance_channels": 4}, {"sampler": "ddim"}):
        assert (draw(run, num_steps=5, **wrong)[0] - theirs).abs().max() > 1e-2 * theirs.abs().max()


@pytest.mark.parametrize("prefix", ["", "module._orig_mod."])
def test_either_set_of_a_training_file_is_read_under_any_prefix(
    prefix: str, tmp_path: Path, run_script: RunScript
) -> None:
    sets = [{f"{prefix}{name}": value for name, value in random_weights(SIT, seed=i).items()} for i in (1, 2)]
    path = training_file(tmp_path / "0050000.pt", ema=sets[0], raw=sets[1])
    for kind, weights in (("ema", sets[0]), ("raw", sets[1])):
        found = read_foreign_weights(path, kind=kind)  # type: ignore[arg-type]
        assert torch.equal(found.tensor("pos_embed"), weights[f"{prefix}pos_embed"])
        name = "blocks.0.attn.qkv.weight"
        assert torch.equal(found.tensor(name), weights[f"{prefix}{name}"])
    run = imported(path, "sit", run_script, "--weights=raw", *DIGITS_AS_LATENTS)
    assert not read_config(run)["config"]["ema"]["enable"]
    state = load_file(run / "checkpoint/step-00000000.safetensors")
    assert torch.equal(state["blocks.0.attn.qkv.weight"], sets[1][f"{prefix}blocks.0.attn.qkv.weight"])


def test_the_optimizer_of_a_training_file_is_not_read(tmp_path: Path) -> None:
    """Tensors are memory-mapped: 120 MB of moments do not enter the memory of this process."""
    path = tmp_path / "train.pt"
    weights = {"a": torch.ones(4)}
    save(path, {"model": weights, "ema": weights, "opt": {"exp_avg": torch.zeros(30_000_000)}})
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_mib()
    found = read_foreign_weights(path)
    assert peak_mib() - before < 40
    assert torch.equal(found.tensor("a"), weights["a"])


def peak_mib() -> float:
    """Largest resident memory of this process."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


@pytest.mark.parametrize("kind", ["safetensors", "legacy"])
def test_other_files_have_the_same_weights(kind: str, tmp_path: Path) -> None:
    weights = random_weights(SIT)
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.bin")
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=False)
    found = read_foreign_weights(path)
    assert found.kind == "ema" and found.shapes.keys() == weights.keys()
    assert all(torch.equal(found.tensor(name), value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("format", "model"),
    [
        ("dit", replace(DIT, side=4)),
        ("sit", TINY_SIT),
        ("repa", replace(REPA, side=4)),
        ("lightningdit", replace(LIGHTNINGDIT, side=4, channels=4, output_channels=4)),
    ],
)
def test_training_continues_with_the_written_configuration(
    format: str, model: Model, tmp_path: Path, run_script: RunScript
) -> None:
    weights = random_weights(model)
    run = imported(save(tmp_path / "weights.pt", weights), format, run_script, *DIGITS_AS_LATENTS)
    outcome = run_script("train.py", f"--job.config_file={run}/continue.toml", *TRAIN, "--optimizer.lr=0")
    assert outcome.code == 0, outcome.err
    assert f"started from the weights of {run}, step 0 (ema)\n" in outcome.out  # no option differs
    new = tmp_path / "outputs" / "run-continued"
    after, before = (
        read_state(new / "checkpoint" / "step-00000002", "model."),
        load_file(run / "checkpoint/step-00000000.safetensors"),
    )
    assert after.keys() == {f"model.{name}" for name in before}
    assert all(torch.equal(after[f"model.{name}"], value) for name, value in before.items())
    assert load(new).sample(classes=[1], num_steps=2).shape == (1, 1, 8, 8)


def test_new_classes_start_as_the_null_class(tmp_path: Path, run_script: RunScript) -> None:
    """A table of 12 classes, of which digits has 10; the null row stays the last one."""
    weights = random_weights(TINY_SIT)
    path = save(tmp_path / "weights.pt", weights)
    run = imported(path, "sit", run_script, *DIGITS_AS_LATENTS, "--num_classes=12")
    trained = TrainedModel.open(run)
    table = weights["y_embedder.embedding_table.weight"]
    stored = trained.model.state_dict()["y_embedder.embedding_table.weight"]
    assert torch.equal(stored, table[-1:].expand(13, -1))
    x, t = torch.randn(2, 4, 4, 4), torch.tensor([0.2, 0.7])
    found = trained.model(x, t, {"class_label": torch.tensor([4, 12])})
    expected = forward(weights, TINY_SIT, x, t, torch.tensor([10, 10]))[:, :4]
    assert (found - expected).abs().max() < 1e-5
    outcome = run_script("train.py", f"--job.config_file={run}/continue.toml", *TRAIN)
    assert outcome.code == 0, outcome.err


def test_an_import_does_not_need_the_autoencoder(tmp_path: Path, run_script: RunScript) -> None:
    path = save(tmp_path / "weights.pt", random_weights(LIGHTNINGDIT))
    flags = ("--autoencoder.name=diffusers", "--autoencoder.downsampling=16")
    run = imported(path, "lightningdit", run_script, *flags)
    trained = load(run, options={"sampling.num_steps": 2})
    assert trained.image_size == (128, 128)
    latents = trained.generate_rows(trained.rows(classes=3), samples_per_row=2, seed=0, batch_size=2)
    assert latents.shape == (1, 2, 8, 8, 8), "latents"
    with refused("autoencoder.path = none", "diffusers"):
        trained.sample(classes=[3])


def test_a_registered_format_is_imported(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of docs/extending.md, as `module:name`, and by name with an option of its own."""
    page = Path(__file__).resolve().parents[3] / "docs" / "extending.md"
    section = page.read_text(encoding="utf-8").partition("## A format of weights")[2]
    (tmp_path / "my_sit.py").write_text(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMATS, "mine", "my_sit:convert")
    for prefix, format in (("net.", "my_sit:convert"), ("module.", "mine prefix=module.")):
        weights = {f"{prefix}{name}": value for name, value in random_weights(TINY_SIT).items()}
        file = save(tmp_path / "weights.pt", weights)
        outcome = run_script("torchditan", "import", file, f"run_{prefix}", f"--format={format}", *DIGITS_AS_LATENTS)
        assert outcome.code == 0, outcome.err
    outcome = run_script("torchditan", "import", file, "new", "--format=mine suffix=x")
    assert outcome.code == 2
    assert_refused(outcome.err, '--format = "mine suffix=x"', ["prefix"])


def write_sit(path: Path) -> None:
    torch.save(random_weights(SIT), path)


def write_half(path: Path) -> None:
    torch.save(random_weights(SIT), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_without_ema(path: Path) -> None:
    training_file(path, ema=None, raw=random_weights(SIT))


def write_large_table(path: Path) -> None:
    weights = random_weights(SIT)
    weights["pos_embed"] = torch.zeros(1, 4_000_000, 1)
    torch.save(weights, path)


def write_expanded(path: Path) -> None:
    weights = random_weights(SIT)
    weights["blocks.0.mlp.fc1.bias"] = torch.ones(1).expand(1 << 40)
    torch.save(weights, path)


Write = Callable[[Path], object]


@pytest.mark.parametrize(
    ("write", "format", "flags", "mentions"),
    [
        (write_half, "dit", [], ["truncated"]),
        (write_without_ema, "sit", [], ["--weights", "must be raw"]),
        (write_large_table, "sit", [], ["pos_embed", "not the sin-cos table"]),
        (lambda path: path.write_bytes(b"<html>"), "dit", [], ["web page", "download it again"]),
        (lambda path: save(path, {"weight": torch.ones(2, dtype=torch.int8)}), "dit", [], ["weight", "int8"]),
        (write_expanded, "sit", [], ["blocks.0.mlp.fc1.bias", "fewer values"]),
        (
            write_sit,
            "sit",
            ["--dataset.image_size=32"],
            ["dataset.image_size", "64"],
        ),
        (
            write_sit,
            "sit",
            ["--dataset.num_classes=3"],
            ["dataset.num_classes", "10", "--num_classes"],
        ),
        (
            write_sit,
            "sit",
            ["--autoencoder.name=flux"],
            ["autoencoder.name", "16", "4"],
        ),
        (
            write_sit,
            "sit",
            ["--autoencoder.path=vae"],  # of sd-vae
            ["autoencoder.path", "config.json"],
        ),
        (
            write_sit,
            "sit",
            ["--autoencoder.name=haar", "--autoencoder.downsampling=2"],
            ["autoencoder.scale", "shift"],
        ),
        (
            lambda path: save(path, random_weights(replace(SIT, channels=16, output_channels=16))),
            "sit",
            [],
            ["--autoencoder.name", "16 channels"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    write: Write, format: str, flags: list[str], mentions: list[str], tmp_path: Path, run_script: RunScript
) -> None:
    path = tmp_path / "weights.pt"
    write(path)
    outcome = run_script("torchditan", "import", path, "new", f"--format={format}", "--num_heads=4", *flags)
    assert (outcome.code, outcome.out) == (2, ""), outcome.out
    line = outcome.err.removesuffix("\n")
    assert "\n" not in line and line.startswith("error: ")
    assert [word for word in mentions if word not in line] == []
    assert [file.name for file in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["gone.pt", "new", "--format=dit"], "gone.pt", [".pt", ".safetensors"]),
        (["gone.pt", "new", "--format=dot"], "", ["--format", "dit", "lightningdit", "diffusers"]),
        (["a.safetensors", "new", "--num_heads=4"], "--num_heads = 4", ["--format"]),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], about: str, mentions: list[str], tmp_path: Path, run_script: RunScript
) -> None:
    outcome = run_script("torchditan", "import", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert_refused(outcome.err, about, mentions)
    assert list(tmp_path.iterdir()) == []


def test_the_card_of_an_imported_run_says_where_its_weights_come_from(tmp_path: Path, run_script: RunScript) -> None:
    path = save(tmp_path / "weights.pt", random_weights(TINY_SIT))
    run = imported(path, "sit", run_script, *DIGITS_AS_LATENTS)
    found = about_run(run, TrainedModel.open(run).config, read_config(run), weights="ema")
    assert (found["imported"]["file"], found["imported"]["format"]) == ("weights.pt", "sit")
    assert not {"ema_decay", "training_seed", "training_versions"} & found.keys()
    text = markdown(replace(card(), imported=found["imported"]))
    assert re.search(r"imported.file +\| weights.pt", text) and re.search(r"imported.format +\| sit", text)


def test_older_files_of_repa_have_decoder_blocks() -> None:
    weights = random_weights(replace(REPA, side=4))
    older = {re.sub(r"^blocks\.2\.", "decoder_blocks.0.", name): tensor for name, tensor in weights.items()}
    assert older.keys() != weights.keys()
    found, expected = (
        convert_repa(Converted.of(Path("a.pt"), each), num_heads=4).tensors() for each in (older, weights)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_training_continues_on_stored_latents(zoo: Zoo, tmp_path: Path, run_script: RunScript) -> None:
    latents = zoo("latents").parent / "inputs/latents"
    data = ("--dataset.dataset_name=latents", f"--dataset.root_dir={latents}", *DIGITS_AS_LATENTS[1:])
    run = imported(save(tmp_path / "weights.pt", random_weights(TINY_SIT)), "sit", run_script, *data)
    outcome = run_script("train.py", f"--job.config_file={run}/continue.toml", *TRAIN)
    assert outcome.code == 0, outcome.err
    assert "started from the weights" in outcome.out
