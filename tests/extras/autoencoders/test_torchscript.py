# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""TorchScript can run code, so that only the user's own command line or TOML opens it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchditan import load
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders import runs_code

if TYPE_CHECKING:
    from tests.conftest import RunScript

RAN = "ran"
SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2"]
SMALL += ["--checkpoint.enable_checkpoint", "--metrics.experiment_name=run", "--model.patch_size=2"]
SMALL += ["--sampling.num_steps=1", "--sampling.images_per_class=1", "--sampling.max_classes=1"]

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated")


class Saves(nn.Module):
    """Writes the file `ran` when it is loaded."""

    def forward(self, images: Tensor) -> Tensor:
        return images

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, bool]:
        return torch.zeros(1), self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        torch.save(state[0], "ran")
        self.training = state[1]


@pytest.fixture
def latents(run_script: RunScript) -> Path:
    """Latents of the digits: `latents/train` has one shard."""
    flags = ["--autoencoder.name=haar", "--autoencoder.downsampling=2", "--dataset.num_workers=0", "--no_flip"]
    assert run_script("torchditan", "encode", "latents", *flags, "--split=train").code == 0
    return Path("latents/train")


def test_torchscript_runs_only_if_the_user_names_it(latents: Path, run_script: RunScript) -> None:
    name = "torchditan.extras.autoencoders.cosmos:open_cosmos"
    assert runs_code(name) and runs_code("cosmos") and not runs_code("haar")
    Path("hostile").mkdir()
    for file in ("encoder.jit", "decoder.jit"):
        torch.jit.script(Saves()).save(f"hostile/{file}")
    Path(RAN).unlink(missing_ok=True)
    index = json.loads((latents / "index.json").read_text())
    index["autoencoder"] |= {"name": name, "path": "hostile", "fingerprint": "cosmos-0123456789abcdef"}
    (latents / "index.json").write_text(json.dumps(index))
    data = ["--dataset.dataset_name=latents", "--dataset.root_dir=latents"]
    job = [*SMALL, "--metrics.enable_sampling", *data, "--training.steps=1", "--job.dump_folder=runs"]
    trained = run_script("torchditan", "train", *job)
    assert trained.code == 0, trained.err
    assert (trained.out + trained.err).count("--autoencoder.path") == 1
    assert list(Path("runs/run/samples").glob("*.png")), "of latent channels"
    with pytest.raises(ConfigError, match=r"--autoencoder\.path"):
        load("runs/run").sample(classes=[1])
    trained = load("runs/run")
    latents = trained.generate_rows(trained.rows(classes=[1]), samples_per_row=1, seed=0, batch_size=1)
    assert latents.shape == (1, 1, 4, 4, 4)
    assert "--autoencoder.path" in run_script("torchditan", "evaluate", "runs/run", "--num_samples=4").err
    shared = run_script("torchditan", "share", "runs/run", "shared")
    assert shared.code == 0 and not Path("shared/samples.png").exists(), shared.err
    manifest = json.loads(Path("shared/config.json").read_text())
    with safe_open("shared/model.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    manifest["config"]["autoencoder"] |= {"name": name, "path": "hostile"}
    save_file(tensors, "shared/model.safetensors", {**metadata, "config": json.dumps(manifest["config"])})
    content = Path("shared/model.safetensors").read_bytes()
    manifest["sha256"] = hashlib.sha256(content).hexdigest()
    Path("shared/config.json").write_text(json.dumps(manifest))
    for place in ("runs/run", "shared", "shared/model.safetensors"):
        drawn = run_script("torchditan", "generate", place, "--out=drawn.png")
        assert drawn.code == 0 and drawn.err.count("--autoencoder.path") == 1, drawn.err
    again = run_script("torchditan", "train", *job)  # its config.json names it, not the user
    assert again.code == 0 and not Path(RAN).exists(), again.err
    named = run_script("torchditan", "generate", "runs/run", "--autoencoder.path=hostile")
    assert named.code == 2 and Path(RAN).exists(), named.err
