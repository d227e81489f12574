# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tokens and keys of the environment reach no file and no output; those in options are refused, and not repeated."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_runs
from refusals import refused

from torchditan.config.loader import load_config
from torchditan.errors import ConfigError, has_secret, option_error, printable
from torchditan.registry import METRICS

if TYPE_CHECKING:
    from tests.conftest import RunScript

ENVIRONMENT = {
    "HF_TOKEN": "hf_PlantedTokenOfTheHub0123456789abcdef",
    "HUGGING_FACE_HUB_TOKEN": "hf_PlantedOlderTokenOfTheHub01234567890",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDKEY012345",
    "AWS_SECRET_ACCESS_KEY": "planted/secret+access/key/0123456789abcdef",
    "AWS_SESSION_TOKEN": "planted-session-token",
    "WANDB_API_KEY": "0123456789plantedkeyofwandb0123456789abcd",
    "GITHUB_TOKEN": "ghp_PlantedTokenOfGitHub0123456789abcdefgh",
}
RUN = [
    *("--training.steps=2", "--metrics.enable_sampling", "--metrics.sample_freq=2", "--metrics.enable_tensorboard"),
    *("--sampling.num_steps=1", "--sampling.max_classes=2", "--validation.freq=2", "--validation.num_images=8"),
    *tiny_runs.KEEP,
]


def forms(secret: str) -> list[bytes]:
    """A secret as text, and encoded as some libraries store it."""
    return [secret.encode(), base64.b64encode(secret.encode()).rstrip(b"="), secret.encode("utf-16-le")]


def test_the_environment_reaches_no_file_and_no_output(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "pixels", "pixel_quality:PixelQuality")
    for name, secret in ENVIRONMENT.items():
        monkeypatch.setenv(name, secret)
    run = tmp_path / "outputs" / "run"
    commands = [
        ("train.py", *tiny_runs.job(run, *RUN)),
        ("torchditan", "generate", run),
        ("torchditan", "evaluate", run, "--metrics=pixels", "--num_samples=40"),
        ("torchditan", "report", run),
        ("torchditan", "export", run, tmp_path / "exported.safetensors"),
        ("torchditan", "share", run, tmp_path / "shared"),
        ("torchditan", "evaluate", run, "--reference", "https://user:planted-password@host/reference.npz"),
        ("torchditan", "generate", run, "--hf_token", ENVIRONMENT["HF_TOKEN"]),
        (
            "train.py",
            *tiny_runs.job(run),
            f"--dataset.root_dir=s3://{ENVIRONMENT['AWS_ACCESS_KEY_ID']}:planted-password@bucket",
        ),
    ]
    printed = []
    for number, command in enumerate(commands):
        code, out, err = run_script(*map(str, command))
        assert code == (0 if number < 6 else 2), err
        printed += [out, err]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.json", "metrics.jsonl", "card.json", "report.html", "README.md"} <= {path.name for path in files}
    places = {**files, Path("output"): "".join(printed).encode()}
    names = "".join(map(str, files)).encode()
    for secret in (*ENVIRONMENT.values(), "planted-password"):
        for form in forms(secret):
            assert form not in names
            assert [str(path) for path, content in places.items() if form in content] == []


@pytest.mark.parametrize(
    "flag",
    [
        "--dataset.root_dir=s3://key:planted@bucket/shards",
        "--dataset.root_dir=https://user:planted@host/a-{000..099}.tar",
        "--dataset.root_dir=https://host/a.tar?X-Amz-Signature=planted&X-Amz-Date=1",
        "--dataset.root_dir=https://host/a.tar?sv=1&sig=planted",
        "--checkpoint.initial_load_path=https://planted@host/model.safetensors",
        f"--dataset.hub_name={ENVIRONMENT['HF_TOKEN']}",
        f"--dataset.trigger_word={ENVIRONMENT['GITHUB_TOKEN']}",
        f'--sampling.prompts=["a", "{ENVIRONMENT["AWS_ACCESS_KEY_ID"]}"]',
        f"--job.description=key {'x' * 200} s3://a:planted{'y' * 200}@b",
    ],
)
def test_a_secret_in_an_option_is_refused_and_not_repeated(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"\*\*\*|xxx\.\.\.") as caught:
        load_config([flag])
    assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)
    assert "planted" not in str(caught.value).lower()
    assert str(caught.value).startswith(f"{flag[2:].split('=')[0]} = ")


def test_a_secret_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[dataset]\nroot_dir = "s3://key:planted@bucket"\n')
    with refused("dataset.root_dir = ", "HF_TOKEN"):
        load_config([f"--job.config_file={tmp_path / 'job.toml'}"])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "s3://bucket/a-{000..099}.tar",
            "hub:owner/name@v1",
            "git@host:a/b",
            "https://host/a@b?v=1",
            "hf_experiment_v2",
        ),
        *("a cat @ home", "gs://bucket/a?b=token", "me@host", "AKIA", os.devnull),
    ],
)
def test_other_texts_are_no_secrets(text: str) -> None:
    assert not has_secret(text) and printable(text) == text


def test_half_of_a_secret_is_not_shown_where_a_value_is_cut() -> None:
    assert "planted" not in str(option_error("a", f"{'x' * 90} s3://a:planted{'y' * 99}@b", "must be b"))


def test_an_error_has_no_control_characters() -> None:
    error = ConfigError("a\x1b[2J \x9b \x07 \u202e \ud800 \U0001f600\u754c")
    assert str(error) == "a\\x1b[2J \\x9b \\x07 \\u202e \\ud800 \U0001f600\u754c"
    assert len(str(ConfigError("a" * 10_000))) == 4_000
