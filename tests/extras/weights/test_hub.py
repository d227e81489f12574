# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Models and latents on the Hugging Face hub: a local server speaks the calls of huggingface_hub that are used."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hub_server
import pytest
import tiny_runs
from hub_server import FakeHub

from torchditan.data_stream.latent_shards import LABELS_FILE
from torchditan.run.hub import split_place

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunDistributed

REPOSITORY = Path(__file__).resolve().parents[3]
Command = Callable[..., "subprocess.CompletedProcess[str]"]
MODEL = "models/me/digits"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    pytest.importorskip("huggingface_hub")
    with hub_server.running_hub() as running:
        yield running


@pytest.fixture
def command(hub: FakeHub, run_distributed: RunDistributed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """`command("generate", "hub:me/digits", home="b")`: torchditan in a folder and with a hub cache of its own.

    A fork that has imported torch, but not huggingface_hub, which reads the environment when it is imported.
    """

    def run(*words: object, home: str = "a", token: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / home).mkdir(exist_ok=True)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(tmp_path / home / "hf_home"),
            **({"HF_TOKEN": token} if token else {}),
            **more,
        }
        if words[0] == "-c":
            script = tmp_path / "program.py"
            script.write_text(str(words[1]))
            words = (script,)
        else:
            words = (REPOSITORY / "torchditan/__main__.py", *words)
        return run_distributed([str(word) for word in words], None, cwd=tmp_path / home, env=environment)

    return run


@pytest.fixture(scope="module")
def run(run_alone: RunAlone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on digits."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    flags = ["--training.steps=2", "--sampling.num_steps=2", "--sampling.images_per_class=1", *tiny_runs.KEEP]
    run_alone("train.py", *tiny_runs.job(folder, *flags))
    return folder


def one_error(finished: subprocess.CompletedProcess[str]) -> str:
    """The only line of an error, of a command that refused."""
    assert finished.returncode == 2, finished.stderr
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in finished.stderr, finished.stderr
    return errors[0]


def share(command: Command, run: Path) -> None:
    done = command("share", run, "digits", "--push", "me/digits", "--license=cc0-1.0", token=hub_server.TOKEN)
    assert done.returncode == 0, done.stderr
    assert "torchditan generate hub:me/digits" in done.stdout


def test_a_pushed_model_is_opened_with_an_empty_cache(
    run: Path, hub: FakeHub, command: Command, tmp_path: Path
) -> None:
    share(command, run)
    files = hub.repositories[MODEL]
    assert not hub.private
    assert {"README.md", "config.json", "model.safetensors", "samples.png"} <= set(files)
    assert all(files[name] == (tmp_path / "a/digits" / name).read_bytes() for name in files)
    assert b"hub:me/digits" in files["README.md"] and b'license: "cc0-1.0"' in files["README.md"]

    drawn = command("generate", "hub:me/digits", "--classes=1", "--out=grid.png", home="b")
    assert drawn.returncode == 0 and (tmp_path / "b/grid.png").is_file(), drawn.stderr
    assert not (tmp_path / "b/outputs").exists()
    opened = [line for line in hub.requests if line.startswith("GET") and "resolve" in line]
    assert {line.rsplit("/", 1)[1] for line in opened} == {"config.json", "model.safetensors"}  # and no picture

    program = "import torchditan; m = torchditan.load('hub:me/digits@main'); print(m.step, m.sample(classes=[1]).sum())"
    loaded = command("-c", program, home="b")
    assert loaded.stdout.startswith("2 "), loaded.stderr
    offline = command("-c", program, home="b", HF_HUB_OFFLINE="1")
    assert offline.stdout == loaded.stdout, offline.stderr

    flags = tiny_runs.job(
        tmp_path / "c/outputs/more", "--training.steps=1", "--checkpoint.initial_load_path=hub:me/digits"
    )
    trained = command("train", *flags, home="c")
    assert trained.returncode == 0 and "weights of hub:me/digits, step 2 (ema)" in trained.stdout, trained.stderr
    stored = json.loads((tmp_path / "c/outputs/more/config.json").read_text())
    assert stored["config"]["checkpoint"]["initial_load_path"] == "hub:me/digits"


def test_damaged_downloads_are_refused(run: Path, hub: FakeHub, command: Command) -> None:
    share(command, run)
    weights = hub.repositories[MODEL]["model.safetensors"]
    flipped = bytearray(weights)
    flipped[-100] ^= 1
    hub.sent["model.safetensors"] = bytes(flipped)
    error = one_error(command("generate", "hub:me/digits", home="flipped"))
    assert "SHA-256 of model.safetensors differs" in error and "hub:me/digits" in error
    hub.sent["model.safetensors"] = weights[: len(weights) // 2]
    error = one_error(command("generate", "hub:me/digits", home="truncated", HF_HUB_DOWNLOAD_TIMEOUT="2"))
    assert "hub:me/digits" in error
    hub.sent.clear()
    again = command("generate", "hub:me/digits", "--classes=1", home="truncated")
    assert again.returncode == 0, again.stderr  # an interrupted download is continued or begins again


def test_mistakes_with_the_hub_are_one_line(run: Path, hub: FakeHub, command: Command) -> None:
    assert "was not found on the Hugging Face hub" in one_error(command("generate", "hub:me/nothing"))
    nowhere = "http://127.0.0.1:9"
    assert "cannot be reached" in one_error(command("generate", "hub:me/digits", HF_ENDPOINT=nowhere))
    assert "cannot be reached" in one_error(command("generate", "hub:me/digits", HF_HUB_OFFLINE="1"))
    assert "must be hub:owner/name" in one_error(command("generate", "hub:digits"))
    assert "must be hub:owner/name" in one_error(command("generate", "hub:me/../x"))

    assert "needs a token" in one_error(command("share", run, "digits", "--push=me/digits"))
    assert "give --push" in one_error(command("share", run, "digits", "--private"))
    assert "must be owner/name" in one_error(command("share", run, "digits", "--push=digits", token=hub_server.TOKEN))
    refused = command("share", run, "digits", "--push=me/digits", "--without_samples", token="hf_" + "w" * 20)
    assert "was refused (401)" in one_error(refused) and hub.repositories == {}

    hub.repositories["models/me/other"] = {"config.json": b'{"_class_name": "DiT"}'}
    assert "no model of TorchDiTan" in one_error(command("generate", "hub:me/other"))
    hub.repositories["models/me/empty"] = {"README.md": b"# a card"}
    assert "has no config.json" in one_error(command("generate", "hub:me/empty"))
    assert "no such revision" in one_error(command("generate", "hub:me/empty@v2"))


def test_latents_on_the_hub_train_a_model(hub: FakeHub, command: Command, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    words = ["--dataset.dataset_name=digits", "--autoencoder.name=haar", "--autoencoder.downsampling=2"]
    encoded = command("encode", "latents", *words, "--shard_size=512")
    assert encoded.returncode == 0, encoded.stderr
    done = command("share", "latents", "digits", "--push=me/latents", "--private", token=hub_server.TOKEN)
    assert hub.private == {"datasets/me/latents"}
    assert done.returncode == 0, done.stderr
    files = hub.repositories["datasets/me/latents"]
    assert {"README.md", "train/index.json", f"train/{LABELS_FILE}", "validation/index.json"} <= set(files)

    place = ["--dataset.dataset_name=latents", "--dataset.root_dir=hub:me/latents", "--model.patch_size=1"]
    flags = tiny_runs.job(tmp_path / "b/outputs/latent", *place, "--training.steps=1")
    trained = command("train", *flags, home="b")
    assert trained.returncode == 0, trained.stderr
    shard = next(name for name in files if name.startswith("train/shard"))
    flipped = bytearray(files[shard])
    flipped[-1] ^= 1
    hub.sent[shard] = bytes(flipped)
    damaged = command("train", *tiny_runs.job(tmp_path / "c/outputs/latent", *place), home="c")
    assert "SHA-256 of shard-00000.safetensors differs" in one_error(damaged)


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("hub:a/b", ("a/b", None)),
        ("hub:a-1/b.c@v1.0", ("a-1/b.c", "v1.0")),
        ("hub:a/b@refs/pr/1", ("a/b", "refs/pr/1")),
    ],
)
def test_a_place_on_the_hub_has_a_name_and_a_revision(place: str, parts: tuple[str, str | None]) -> None:
    assert split_place(place) == parts
