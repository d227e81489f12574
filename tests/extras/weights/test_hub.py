# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Models and latents on the Hugging Face hub: a local server speaks the calls of huggingface_hub that are used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hub_server
import pytest
import tiny_runs
from hub_server import TOKEN, FakeHub

from torchditan.data_stream.latent_shards import LABELS_FILE
from torchditan.extras.sharing.model_card import Statements
from torchditan.extras.sharing.share import share

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunDistributed
    from tests.zoo import Zoo

Commands = Callable[..., "list[Outcome]"]
MODEL = "models/me/digits"
PROGRAM = """
import contextlib, io, json, sys
import torchditan, torchditan.__main__
for words in json.loads(sys.argv[1]):
    sys.argv, out, err = ["torchditan", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if words[0] == "load":
            print(torchditan.load(words[1]).sample(classes=[1], num_steps=2).sum())
            code = 0
        else:
            code = torchditan.__main__.main()
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    pytest.importorskip("huggingface_hub")
    with hub_server.running_hub() as running:
        yield running


@pytest.fixture
def commands(
    hub: FakeHub, run_distributed: RunDistributed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Commands:
    """`commands(["generate", "hub:me/digits"], ["load", ...], home="b")`: one after the other in a process.

    The process has its folder and its hub's cache in `home`. It is a fork that has imported torch, but not
    huggingface_hub, which reads the environment when it is imported.
    """

    def run(*words: list[object], home: str = "a", token: str | None = None, **more: str) -> list[Outcome]:
        from tests.conftest import Outcome

        (tmp_path / home).mkdir(exist_ok=True)
        (tmp_path / "program.py").write_text(PROGRAM)
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
        given = json.dumps([[str(word) for word in each] for each in words])
        done = run_distributed([tmp_path / "program.py", given], None, cwd=tmp_path / home, env=environment)
        assert done.returncode == 0, done.stderr
        return [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]

    return run


def errors(*outcomes: Outcome) -> str:
    """The only line of the error of each command, all of which refused."""
    found = []
    for _, _, err in outcomes:
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in err, err
        found += lines
    assert {outcome.code for outcome in outcomes} == {2}
    return "\n".join(found)


def test_a_pushed_model_is_opened_with_an_empty_cache(
    zoo: Zoo, hub: FakeHub, commands: Commands, tmp_path: Path
) -> None:
    push = ["share", zoo("digits"), "digits", "--push", "me/digits", "--license=cc0-1.0"]
    (done,) = commands(push, token=TOKEN)
    assert done.code == 0 and "torchditan generate hub:me/digits" in done.out, done.err
    files = hub.repositories[MODEL]
    assert not hub.private
    assert {"README.md", "config.json", "model.safetensors", "samples.png"} <= set(files)
    assert all(files[name] == (tmp_path / "a/digits" / name).read_bytes() for name in files)
    assert b"hub:me/digits" in files["README.md"] and b'license: "cc0-1.0"' in files["README.md"]

    flags = tiny_runs.job(
        tmp_path / "b/outputs/more", "--training.steps=1", "--checkpoint.initial_load_path=hub:me/digits"
    )
    draw = ["generate", "hub:me/digits", "--classes=1", "--out=grid.png"]
    drawn, loaded, trained = commands(draw, ["load", "hub:me/digits@main"], ["train", *flags], home="b")
    assert drawn.code == 0 and (tmp_path / "b/grid.png").is_file(), drawn.err
    opened = [line for line in hub.requests if line.startswith("GET") and "resolve" in line]
    assert {line.rsplit("/", 1)[1] for line in opened} == {"config.json", "model.safetensors"}  # and no picture
    assert trained.code == 0 and "weights of hub:me/digits, step 6 (ema)" in trained.out, trained.err
    stored = json.loads((tmp_path / "b/outputs/more/config.json").read_text())
    assert stored["config"]["checkpoint"]["initial_load_path"] == "hub:me/digits"
    (offline,) = commands(["load", "hub:me/digits@main"], home="b", HF_HUB_OFFLINE="1")
    assert offline.out == loaded.out != "", offline.err


def test_a_damaged_download_is_refused(zoo: Zoo, hub: FakeHub, commands: Commands, tmp_path: Path) -> None:
    share(zoo("digits"), tmp_path / "digits", statements=Statements(), with_samples=False)
    files = {path.name: path.read_bytes() for path in (tmp_path / "digits").iterdir()}
    flipped = bytearray(files["model.safetensors"])
    flipped[-100] ^= 1
    hub.repositories[MODEL] = files
    hub.sent["model.safetensors"] = bytes(flipped)
    error = errors(*commands(["generate", "hub:me/digits"]))
    assert "SHA-256 of model.safetensors differs" in error and "hub:me/digits" in error


def test_mistakes_with_the_hub_are_one_line(zoo: Zoo, hub: FakeHub, commands: Commands) -> None:
    hub.repositories["models/me/other"] = {"config.json": b'{"_class_name": "DiT"}'}
    hub.repositories["models/me/empty"] = {"README.md": b"# a card"}
    run, before = zoo("digits"), set(hub.repositories)
    refusals = {
        ("generate", "hub:me/nothing"): "was not found on the Hugging Face hub",
        ("generate", "hub:digits"): "must be hub:owner/name",
        ("generate", "hub:me/../x"): "must be hub:owner/name",
        ("generate", "hub:me/other"): "no model of TorchDiTan",
        ("generate", "hub:me/empty"): "has no config.json",
        ("generate", "hub:me/empty@v2"): "no such revision",
        ("share", run, "digits", "--push=me/digits"): "needs a token",
        ("share", run, "digits", "--private"): "give --push",
    }
    found = errors(*commands(*map(list, refusals))).splitlines()
    assert [right for right, line in zip(refusals.values(), found, strict=True) if right not in line] == []
    push = ["share", run, "digits", "--without_samples"]
    name, token = commands([*push, "--push=digits"], [*push, "--push=me/digits"], token="hf_" + "w" * 20)
    assert "must be owner/name" in errors(name)
    assert "was refused (401)" in errors(token) and set(hub.repositories) == before
    unreachable = commands(["generate", "hub:me/digits"], HF_ENDPOINT="http://127.0.0.1:9")
    offline = commands(["generate", "hub:me/digits"], HF_HUB_OFFLINE="1")
    assert errors(*unreachable, *offline).count("cannot be reached") == 2


def test_latents_on_the_hub_train_a_model(zoo: Zoo, hub: FakeHub, commands: Commands, tmp_path: Path) -> None:
    latents = shutil.copytree(zoo("latents").parent / "inputs/latents", tmp_path / "latents")
    (done,) = commands(["share", latents, "digits", "--push=me/latents", "--private"], token=TOKEN)
    assert done.code == 0 and hub.private == {"datasets/me/latents"}, done.err
    files = hub.repositories["datasets/me/latents"]
    assert {"README.md", "train/index.json", f"train/{LABELS_FILE}", "validation/index.json"} <= set(files)

    place = ["--dataset.dataset_name=latents", "--dataset.root_dir=hub:me/latents", "--model.patch_size=1"]
    flags = tiny_runs.job(tmp_path / "b/outputs/latent", *place, "--training.steps=1")
    (trained,) = commands(["train", *flags], home="b")
    assert trained.code == 0, trained.err
    shard = next(name for name in files if name.startswith("train/shard"))
    flipped = bytearray(files[shard])
    flipped[-1] ^= 1
    hub.sent[shard] = bytes(flipped)
    error = errors(*commands(["train", *flags], home="c"))
    assert "SHA-256 of shard-00000.safetensors differs" in error
