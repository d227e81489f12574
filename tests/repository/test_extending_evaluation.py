# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/extending.md: the metric and the autoencoder on the page evaluate, encode, train and resume."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import cards
import pytest
import torch
from extending_page import added, examples
from refusals import assert_refused

from torchditan import registry
from torchditan.checkpoint.loading import read_state
from torchditan.config import options
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders import Autoencoder, open_autoencoder
from torchditan.extras.evaluation.classifier import ClassifierAccuracy
from torchditan.extras.evaluation.metric import Evaluation, Pictures, Source
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript

TINY = [
    "--model.flavor=debugmodel",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=16",
    "--metrics.log_freq=1",
    "--validation.freq=0",
    "--sampling.num_steps=2",
    "--sampling.max_classes=2",
    "--sampling.images_per_class=2",
    "--checkpoint.enable_checkpoint",
]


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[None]:
    with added(["metric"], tmp_path / "added"):
        yield


@pytest.fixture
def fold(tmp_path: Path) -> Iterator[None]:
    with added(["autoencoder"], tmp_path / "added"):
        yield


def train(run_script: RunScript, folder: Path, name: str, *flags: str) -> Outcome:
    where = [f"--job.dump_folder={folder}", f"--metrics.experiment_name={name}"]
    outcome = run_script("train.py", *flags, *TINY, *where)
    assert outcome.code == 0, outcome.err
    return outcome


QUICKSTART = ["--job.config_file=quickstart", "--training.steps=1", "--metrics.enable_sampling=false"]


@pytest.mark.usefixtures("copies")
def test_the_metric_of_the_page_evaluates_a_run_and_leaves_the_other_results_alone(
    run_script: RunScript, tmp_path: Path
) -> None:
    train(run_script, tmp_path, "run", *QUICKSTART)
    *command, run = shlex.split(examples()["metric"].command)[:3]
    arguments = shlex.split(examples()["metric"].command)[3:]
    assert command == ["torchditan", "evaluate"]
    few = ["--num_samples=20", "--epochs=1"]
    assert run == "outputs/quickstart"
    outcome = run_script(*command, tmp_path / "run", *arguments, *few)
    assert outcome.code == 0, outcome.err
    both = cards.values(outcome)
    assert both["nearest_generated"] > 0 and 0.1 < both["nearest_held_out"] < 1
    alone = cards.values(run_script(*command, tmp_path / "run", *few))
    assert alone.items() <= both.items() and "accuracy_generated" in alone
    outcome = run_script(*command, tmp_path / "run", "--metrics", "copy")
    assert outcome.code == 2
    assert (
        'error: --metrics = "copy": must be one of classifier, clip, dinov2, effnet, inception, prompts, copies, or module:name; did you mean copies?'  # noqa: E501
        in outcome.err
    )


def test_metric_and_autoencoder_of_the_page_work_from_outside_the_package(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for title in ("metric", "autoencoder"):
        (tmp_path / f"lab_{title}.py").write_text(examples()[title].code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    (opener,) = re.findall(r'"fold": "[\w.]+:(\w+)"', examples()["autoencoder"].line)
    _, _, *arguments = shlex.split(examples()["autoencoder"].command)
    own = [flag.replace("fold", f"lab_autoencoder:{opener}") if flag == "fold" else flag for flag in arguments]
    outcome = train(run_script, tmp_path, "run", *own, "--training.steps=1")
    assert outcome.code == 0, outcome.err
    few = ["--metrics", "lab_metric:Copies", "--num_samples=2", "--sampling.num_steps=1"]
    outcome = run_script("torchditan", "evaluate", tmp_path / "run", *few)
    assert outcome.code == 0, outcome.err
    assert cards.values(outcome)["nearest_generated"] > 0


@pytest.mark.usefixtures("copies")
def test_a_run_without_labels_is_evaluated_by_metrics_that_need_none(run_script: RunScript, tmp_path: Path) -> None:
    train(run_script, tmp_path, "run", *QUICKSTART, "--dataset.num_classes=0")
    run = tmp_path / "run"
    outcome = run_script("torchditan", "evaluate", run, "--metrics", "copies", "--num_samples=20")
    assert outcome.code == 0, outcome.err
    assert cards.values(outcome)["nearest_generated"] > 0
    outcome = run_script("torchditan", "evaluate", run, "--metrics", "classifier", "--num_samples=2")
    assert outcome.code == 2
    assert_refused(outcome.err, '--metrics = "classifier"', ["without labels"])


@pytest.mark.usefixtures("copies")
def test_the_metric_of_the_page_finds_copies() -> None:
    metric = registry.registered(registry.METRICS, "copies")(Evaluation([], seed=0, epochs=1))
    images = torch.randint(256, (3, 20, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    metric.update(Pictures(images[0], None, torch.arange(20), "train"))
    metric.update(Pictures(images[0, 5:9], None, torch.arange(4), "generated"))
    metric.update(Pictures(images[1], None, torch.arange(20), "held_out"))
    found = metric.compute()
    assert found["nearest_generated"] < 1e-3 and found["nearest_held_out"] > 0.5
    metric.update(Pictures(images[0, :1], None, torch.tensor([20]), "held_out"))
    assert metric.compute()["nearest_held_out"] == pytest.approx(found["nearest_held_out"] * 20 / 21, rel=1e-3)


def test_ranks_that_share_the_pictures_find_what_one_finds() -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 2
    evaluation = Evaluation(["dark", "bright"], seed=0, epochs=2)
    whole, *ranks = (ClassifierAccuracy(evaluation) for _ in range(3))
    sources: tuple[Source, ...] = ("train", "held_out", "generated")
    for source in sources:
        noise = torch.randint(100, (40, 1, 8, 8), generator=draw)
        images = (noise + 120 * labels[:, None, None, None]).byte()
        whole.update(Pictures(images, labels, torch.arange(40), source))
        for rank, rows in zip(ranks, [torch.arange(0, 40, 2), torch.arange(1, 40, 2)], strict=True):
            rank.update(Pictures(images[rows], labels[rows], rows, source))
        ranks[0].merge(ranks[1].state(source), source)
    expected = whole.compute()
    assert ranks[0].compute() == expected
    found = expected["accuracy_generated"]
    assert found.value > 0.6
    assert found.value == pytest.approx(sum(found.halves) / 2) == pytest.approx(sum(expected["per_class"].values()) / 2)


@pytest.mark.usefixtures("fold")
def test_the_autoencoder_of_the_page_trains_samples_and_resumes_to_the_bit(
    run_script: RunScript, tmp_path: Path
) -> None:
    torchditan, name, *arguments = shlex.split(examples()["autoencoder"].command)
    assert (torchditan, name) == ("torchditan", "train")
    for name, steps in (("whole", (2,)), ("resumed", (1, 2))):
        for last in steps:
            outcome = train(run_script, tmp_path, name, *arguments, f"--training.steps={last}")
    assert "resumed at step 1" in outcome.out
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "resumed")]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    states = [read_state(tmp_path / name / "checkpoint/step-00000002") for name in ("whole", "resumed")]
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []
    assert (tmp_path / "whole/samples/step_00000002.png").exists()
    assert run_script("torchditan", "generate", tmp_path / "whole", f"--out={tmp_path / 'grid.png'}").code == 0


@pytest.mark.usefixtures("fold")
def test_the_autoencoder_of_the_page_gives_back_the_pixels_and_refuses_what_it_cannot() -> None:
    def opened(**values: object) -> Autoencoder:
        config = options.Autoencoder(**values)  # type: ignore[arg-type]
        return open_autoencoder(config, device=torch.device("cpu"), image_channels=3)

    images = torch.rand(2, 3, 8, 12) * 2 - 1
    autoencoder = opened(name="fold", downsampling=4)
    assert (autoencoder.name, autoencoder.path, autoencoder.latent_shape(8, 12)) == ("fold", None, (48, 2, 3))
    latents = autoencoder.encode(images)
    assert torch.equal(latents[:, 0, 0, 0], 2 * images[:, 0, 0, 0])
    torch.testing.assert_close(autoencoder.decode(latents), images)
    for values, message in (
        ({"name": "folt"}, "must be one of haar, cosmos, diffusers, sd-vae.*; did you mean fold"),
        ({"name": "fold", "path": "x"}, 'autoencoder.path = "x": fold has no weights; leave it out'),
        ({"name": "fold", "fingerprint": "fold-4"}, "the latents come from fold-4, this decoder is fold-2"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(**values)
    with pytest.raises(ConfigError, match=r"encodes images of 3 channel\(s\), and these have 1"):
        open_autoencoder(options.Autoencoder(name="fold"), device=torch.device("cpu"), image_channels=1)
