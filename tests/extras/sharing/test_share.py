# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torchditan share: what the folder says and hides, who opens it, and which folders are refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny_runs
import torch
from cards import card
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchditan import load
from torchditan.checkpoint.weights import save_weights
from torchditan.config.loader import from_dict, to_dict
from torchditan.config.options import Config, flatten
from torchditan.data_stream.latent_index import read_index
from torchditan.data_stream.latent_shards import LatentShards
from torchditan.errors import ConfigError
from torchditan.extras.evaluation.card import cards_of_run, read_card, write_card
from torchditan.extras.sharing.model_card import Statements
from torchditan.extras.sharing.share import share
from torchditan.extras.sharing.shared_config import SHARED, shared_config
from torchditan.extras.weights import shared
from torchditan.extras.weights.opening import open_weights
from torchditan.extras.weights.shared import is_shared
from torchditan.run.atomic_files import sha256_of
from torchditan.run.reading import read_config
from torchditan.sampling.drawing import sampling_settings

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunAlone, RunScript
    from tests.zoo import Zoo

FEW = ["--sampling.num_steps=2", "--sampling.images_per_class=1", "--sampling.max_classes=3"]
SECRETS = {
    "job.description": "for hidden-customer, ask alice_tester",
    "metrics.save_tb_folder": "hidden-events",
    "cache.folder": "/home/alice_tester/hidden-cache",
    "text_encoder.path": "hidden-folder/encoder",
    "dataset.label_key": "hf_hidden0123456789abcdef",
    "checkpoint.folder": "hidden-checkpoints",
}
HIDDEN = (b"hidden", b"alice_tester", b"secret_place", b"secret_run")


@pytest.fixture(scope="module")
def run(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on digits, with private values in many options. Tests only read it."""
    folder = tmp_path_factory.mktemp("secret_place") / "secret_run"
    secrets = [f"--{name}={value}" for name, value in SECRETS.items()]
    flags = ["--training.steps=2", "--validation.num_images=8", *FEW, *secrets, *tiny_runs.KEEP]
    run_alone("train.py", "--job.config_file=quickstart", *tiny_runs.job(folder, *flags))
    return folder


@pytest.fixture(scope="module")
def digits(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared run. Tests only read it."""
    folder = tmp_path_factory.mktemp("shared") / "digits"
    share(run, folder, statements=Statements(license="cc0-1.0", note="trained *twice*"))
    return folder


@pytest.fixture
def copied(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "copied"))


def refused(outcome: Outcome) -> str:
    assert outcome.code == 2 and "Traceback" not in outcome.err, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    return line


def seal(folder: Path) -> None:
    """Write the hash of changed weights."""
    content = json.loads((folder / "config.json").read_bytes())
    content["sha256"] = sha256_of(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(content))


def test_the_folder_has_weights_configuration_card_and_picture(digits: Path, run: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in digits.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "samples.png",
    ]
    save_weights(tmp_path / "exported.safetensors", open_weights(run), dtype=torch.float32)
    ours, exported = load_file(digits / "model.safetensors"), load_file(tmp_path / "exported.safetensors")
    assert ours.keys() == exported.keys() and all(torch.equal(ours[name], exported[name]) for name in ours)
    content = json.loads((digits / "config.json").read_bytes())
    with safe_open(digits / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["config"]) == content["config"]
    assert (content["step"], content["images_seen"], content["weights"]) == (2, 16, "ema")
    assert content["class_names"] == [str(label) for label in range(10)]
    assert content["hardware"]["device"] == "cpu" and "hostname" not in content["hardware"]
    text = (digits / "README.md").read_text()
    assert text.startswith('---\nlibrary_name: "torchditan"\nlicense: "cc0-1.0"\n')
    assert "trained *twice*" in text
    assert "`torchditan train quickstart`" in text
    assert "not stated" in text and "were not evaluated" in text


def test_nothing_private_gets_into_the_folder(digits: Path, run: Path) -> None:
    stored = (run / "config.json").read_bytes()
    assert all(secret in stored for secret in HIDDEN)  # the run has them
    names = [socket.gethostname(), str(Path.home()), str(run.parent), os.getcwd()]
    for file in digits.rglob("*"):
        content = file.read_bytes()
        for text in [*HIDDEN, *(name.encode() for name in names if len(name) > 3)]:
            assert text not in content, (file.name, text)


def test_a_shared_configuration_has_no_places_and_no_free_text() -> None:
    values = {
        "dataset.root_dir": "hidden/images",
        "dataset.dataset_name": "my_lab.data:Birds folder=/hidden",
        "dataset.trigger_word": "hidden",
        "sampling.prompts": ["hidden"],
        "sampling.negative_prompt": "hidden",
        "model.path": "hidden/model",
        "autoencoder.path": "hidden",
        "diffusion.ingredients": ["my_lab:Extra file=hidden/x"],
        "job.description": "hidden",
    }
    assert "hidden" not in json.dumps(shared_config(to_dict(Config().replace(values))))


def test_a_shared_configuration_has_what_draws_and_continues() -> None:
    values = {
        "model.path": "stabilityai/stable-diffusion-3-medium-diffusers",
        "model.overrides": ["num_layers=3"],
        "dataset.dataset_name": "my_lab.data:Birds folder=3",
        "dataset.image_size": [64, 32],
        "autoencoder.path": "stabilityai/sd-vae-ft-ema",
        "autoencoder.fingerprint": "diffusers-0123456789abcdef",
        "diffusion.ingredients": ["my_lab.losses:Extra weight=0.1"],
        "sampling.sampler": "heun",
        "sampling.guidance_scale": 3.5,
        "ema.decay": 0.99,
    }
    assert values.keys() <= set(SHARED)
    shared = flatten(from_dict(shared_config(to_dict(Config().replace(values)))))
    assert {name: shared[name] for name in values} == values
    of_the_machine = {"training.compile": True, "checkpoint.enable_checkpoint": True, "metrics.log_freq": 3}
    assert shared_config(to_dict(Config().replace(of_the_machine))) == shared_config(to_dict(Config()))
    started = Config().replace({"job.config_file": "/elsewhere/train_configs/recipes/imagenet256_pixels.toml"})
    assert shared_config(to_dict(started))["metrics"]["experiment_name"] == "imagenet256_pixels"


def test_opening_a_shared_folder_writes_only_pictures(
    digits: Path, run: Path, tmp_path: Path, run_script: RunScript
) -> None:
    expected = load(run).sample(classes=[1, 2], seed=3)
    assert torch.equal(load(digits).sample(classes=[1, 2], seed=3), expected)
    before = {path: path.stat().st_mtime_ns for path in [digits, *digits.rglob("*")]}
    (tmp_path / "outputs/digits").mkdir(parents=True)
    (tmp_path / "outputs/digits/config.json").write_text("{}")  # a run of this name
    for where in ("digits-weights", "digits"):
        assert run_script("torchditan", "generate", digits, "--classes=1", "--seed=3").code == 0
        assert [path.name for path in (tmp_path / "outputs" / where).rglob("*") if path.suffix != ".json"] == [
            "samples",
            "generated_00000002_seed3.png",
        ]
        (tmp_path / "outputs/digits/config.json").unlink(missing_ok=True)
    assert before == {path: path.stat().st_mtime_ns for path in [digits, *digits.rglob("*")]}
    assert run_script("torchditan", "generate", run, "--classes=1", "--seed=3", "--out=run.png").code == 0
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["digits", "digits-weights"]


def test_a_shared_folder_and_its_file_are_evaluated_and_exported(
    digits: Path, tmp_path: Path, run_script: RunScript
) -> None:
    few = ["--num_samples=8", "--batch_size=8", "--metrics=classifier", "--epochs=1"]
    assert run_script("torchditan", "export", digits, "outputs/digits.safetensors", "--dtype=bfloat16").code == 0
    ours, exported = load_file(digits / "model.safetensors"), load_file(tmp_path / "outputs/digits.safetensors")
    assert ours.keys() == exported.keys()
    assert all(torch.equal(ours[name].bfloat16(), exported[name]) for name in exported)
    assert "--step = 3" in refused(run_script("torchditan", "export", digits, "x.safetensors", "--step=3"))
    for place in (digits, "outputs/digits.safetensors"):
        done = run_script("torchditan", "evaluate", place, *few)
        assert done.code == 0, done.err
    folder = tmp_path / "outputs/digits"
    assert [path.name for path in folder.iterdir()] == ["evaluation"]
    cards = [read_card(path) for path in folder.glob("evaluation/*/card.json")]
    files = [sha256_of(digits / "model.safetensors"), sha256_of(tmp_path / "outputs/digits.safetensors")]
    assert {card.run_id for card in cards} == {f"sha256-{digest[:8]}" for digest in files}
    assert {card.run for card in cards} == {str(digits), "outputs/digits.safetensors"}
    assert cards_of_run(folder) == []  # a run of this name that begins later does not count them


def test_a_shipped_model_is_opened_by_its_name_unless_a_path_has_it(
    digits: Path, run: Path, tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(digits, tmp_path / "models/earth")
    monkeypatch.setattr(shared, "SHIPPED", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    assert load("earth").step == 2
    assert run_script("torchditan", "generate", "earth", "--classes=1", "--out=a.png").code == 0
    flags = tiny_runs.job(tmp_path / "more", "--training.steps=1", "--checkpoint.initial_load_path=earth")
    assert run_script("train.py", *flags).code == 0
    (tmp_path / "earth").mkdir()
    assert not is_shared("earth")
    with pytest.raises(ConfigError, match=r"earth is not a run directory: it has no config\.json"):
        load("earth")


def test_the_model_that_ships_draws_its_classes_and_has_a_card(
    tmp_path: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "`torchditan generate earth`" in run_script("torchditan", "list").out
    model = load("earth")
    with pytest.raises(ConfigError, match=r'classes = "lake": this run has no class lake; .*desert.* 0 to 6'):
        model.sample(classes="lake")
    samples = model.sample(classes=["forest", "ice", "coast"], samples_per_class=2, num_steps=4, seed=0)
    assert samples.shape == (6, 3, 32, 32)
    forest, ice, coast = samples.float().unflatten(0, (3, 2)).mean(dim=(1, 3, 4))  # mean colours (R, G, B)
    assert forest.max() < 60 and ice.min() > 200 and coast[2] > coast[0]
    outcome = run_script("torchditan", "generate", "earth", "--classes=ice", "--sampling.num_steps=2", "--out=ice.png")
    assert outcome.code == 0 and (tmp_path / "ice.png").exists(), outcome.err
    card = (shared.SHIPPED / "earth/README.md").read_text(encoding="utf-8")
    for line in ('license: "bsd-3-clause"', "torchditan train earth", "| FD-EffNetLite0", "95% interval"):
        assert line in card
    assert sum(file.stat().st_size for file in (shared.SHIPPED / "earth").iterdir()) < 5e6


def test_the_other_model_that_ships_draws_what_a_prompt_says(tmp_path: Path, run_script: RunScript) -> None:
    pytest.importorskip("wordllama")
    red, blue = (
        load("scenes").sample(prompts=f"a large {colour} square", num_steps=8, seed=0) for colour in ("red", "blue")
    )
    change = (red.float() - blue.float()).flatten(2).mean(2).mean(0)  # (R, G, B)
    assert change[0] > 5 and change[2] < -5
    picture = tmp_path / "a.png"
    outcome = run_script(
        "torchditan", "generate", "scenes", "--prompts", "a cat", "a purple circle", f"--out={picture}"
    )
    assert outcome.code == 0 and picture.exists(), outcome.err
    assert 'caption like "a cat"' in outcome.err and "purple" not in outcome.err
    assert sum(file.stat().st_size for file in (shared.SHIPPED / "scenes").iterdir()) < 5.5e6


@pytest.mark.parametrize(
    ("damage", "right"),
    [
        ("flip", "damaged: the SHA-256 of model.safetensors differs"),
        ("delete", "incomplete: model.safetensors is missing"),
        ("link", "refused: model.safetensors is a link to another folder"),
        ("linked config", "refused: config.json is a link to another folder"),
        ("link to itself", "incomplete: model.safetensors is missing"),
        ("newer", "has version 2, possibly of a newer TorchDiTan"),
    ],
)
def test_a_damaged_or_hostile_folder_is_refused(copied: Path, damage: str, right: str) -> None:
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[-9] ^= 1
        weights.write_bytes(content)
    elif damage == "delete":
        weights.unlink()
    elif damage == "link":
        weights.rename(copied.parent / "outside.safetensors")
        weights.symlink_to(copied.parent / "outside.safetensors")
    elif damage == "link to itself":
        weights.unlink()
        weights.symlink_to("model.safetensors")
    elif damage == "linked config":
        (copied / "config.json").rename(copied.parent / "outside.json")
        (copied / "config.json").symlink_to(copied.parent / "outside.json")
    else:
        with safe_open(weights, framework="pt") as file:
            metadata = file.metadata()
        save_file(load_file(weights), weights, {**metadata, "version": "2"})
        seal(copied)
    with pytest.raises(ConfigError, match=right) as caught:
        load(copied)
    assert str(copied) in str(caught.value)


def test_the_card_has_the_figures_of_the_same_step_weights_and_sampling_options(run: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    own = sampling_settings(from_dict(read_config(copied)["config"]).sampling)

    def card_md(name: str, **options: Any) -> str:
        share(copied, tmp_path / name, statements=Statements(), with_samples=False, **options)
        assert not (tmp_path / name / "samples.png").exists()
        return (tmp_path / name / "README.md").read_text()

    others: dict[str, dict[str, Any]] = {"step": {"step": 600}, "raw": {"weights": "raw"}}
    for name, value in (("guidance_interval", [0.0, 0.5]), ("num_steps", 3), ("negative_prompt", "blurry")):
        others[name] = {"sampling": {**own, name: value}}
    for name, changes in others.items():
        write_card(copied / f"evaluation/{name}", card(**{"step": 2, "num_samples": 1234, "sampling": own, **changes}))
    text = card_md("none")
    assert "torchditan evaluate" in text and "1,234" not in text and "95% interval" not in text

    with (copied / "metrics.jsonl").open("a") as file:  # two steps later, after the weights were saved
        file.write(json.dumps({"step": 4, "elapsed_s": 9 * 3600}) + "\n")
    write_card(copied / "evaluation/this", card(step=2, created="2020-01-01T00:00:00+00:00", sampling=own))
    text = card_md("shared")
    assert "95% interval" in text and "samples.png" not in text and "3 x 2,600 samples" in text and "1,234" not in text
    assert "bfloat16" not in text and "bfloat16" in card_md("rounded", dtype=torch.bfloat16)
    assert "- time:" in text and "9.0 hours" not in text and "outputs/quickstart" not in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    stated = {name.strip("`"): value for name, value in rows}
    assert {f"sampling.{name}" for name in own} <= stated.keys() and "guidance_interval" in own
    assert (stated["sampling.num_steps"], stated["weights"]) == ("2", "ema")
    (tags,) = (json.loads(line.removeprefix("tags:")) for line in text.splitlines() if line.startswith("tags:"))
    assert tags == ["diffusion-transformer", "unconditional-image-generation", "digits"]


def test_mistakes_in_sharing_are_one_line(run: Path, tmp_path: Path, run_script: RunScript) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    assert "exists; choose another name" in refused(run_script("torchditan", "share", run, "mine"))
    assert "exists" in refused(run_script("torchditan", "share", run, "mine", "--overwrite"))
    assert (tmp_path / "mine/thesis.tex").exists()
    assert "does not exist" in refused(run_script("torchditan", "share", "nothing", "x"))
    assert not (tmp_path / "x").exists()
    for flags in (["--dtype=bfloat16"], ["--overwrite"]):
        assert run_script("torchditan", "share", run, "x", "--without_samples", *flags).code == 0


def test_every_address_is_loaded_and_shared(digits: Path, run: Path, tmp_path: Path) -> None:
    places = {"run": run, "checkpoint": run / "hidden-checkpoints/step-00000002", "shared folder": digits}
    places["checkpoint alone"] = Path(shutil.copytree(places["checkpoint"], tmp_path / "alone/step-00000002"))
    places["file"] = tmp_path / "weights.safetensors"
    save_weights(places["file"], open_weights(run), dtype=torch.float32)
    expected, pictures = open_weights(run), load(run).sample(classes=[3])
    theirs = load_file(digits / "model.safetensors")
    for kind, place in places.items():
        found = open_weights(place)
        assert (found.step, found.images_seen, found.kind) == (2, 16, "ema")
        assert found.shapes == expected.shapes
        assert torch.equal(load(place).sample(classes=[3]), pictures), kind
        share(place, tmp_path / kind, statements=Statements(), with_samples=False)
        ours = load_file(tmp_path / kind / "model.safetensors")
        assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert not any(word in path.read_bytes() for word in HIDDEN for path in (tmp_path / kind).iterdir())


def test_shared_latents_have_no_paths(zoo: Zoo, tmp_path: Path, run_script: RunScript) -> None:
    encoded = Path(shutil.copytree(zoo("latents").parent / "inputs/latents", tmp_path / "encoded"))
    for file in encoded.glob("*/index.json"):
        content = json.loads(file.read_bytes())
        file.write_text(json.dumps({**content, "autoencoder_path": "secret_place/vae"}))
    done = run_script("torchditan", "share", "encoded", "shared", "--data_license=UCI")
    assert done.code == 0, done.err
    text = (tmp_path / "shared/README.md").read_text()
    assert "train" in text and "UCI" in text and "`haar`" in text
    for file in (tmp_path / "shared").rglob("*.*"):
        assert not any(secret in file.read_bytes() for secret in HIDDEN), file
    index = read_index(tmp_path / "shared/train")
    original = LatentShards.open(tmp_path / "encoded/train")
    assert index.autoencoder_path is None and index.shards == original.index.shards
    assert "has no effect on latents" in refused(run_script("torchditan", "share", "encoded", "y", "--step=3"))
    own = shutil.copytree(encoded, tmp_path / "own")
    (own / "README.md").write_text("my latents")
    assert "exists" in refused(run_script("torchditan", "share", "encoded", "own", "--overwrite"))
    assert (own / "README.md").read_text() == "my latents"
    next((encoded / "train").glob("shard-*.safetensors")).unlink()
    assert ".safetensors is missing" in refused(run_script("torchditan", "share", "encoded", "z"))


def test_a_model_that_diffusers_has_gets_its_folder(run_alone: RunAlone, tmp_path: Path, run_script: RunScript) -> None:
    pytest.importorskip("diffusers")
    official = ["--model.preset=official", "--diffusion.objective=ddpm", "--model.timestep_frequencies=diffusers"]
    run_alone("train.py", *tiny_runs.job(tmp_path / "run", *official, "--training.steps=1", *FEW, *tiny_runs.KEEP))
    done = run_script("torchditan", "share", "run", "shared")
    assert done.code == 0 and "no folder for diffusers" not in done.out, done.out
    assert (tmp_path / "shared/diffusers/config.json").is_file()
    assert "`diffusers/` has the same weights" in (tmp_path / "shared/README.md").read_text()
