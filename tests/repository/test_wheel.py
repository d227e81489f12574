# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The wheel is whole: built, installed outside the repository, and walked from training to an import elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from torchditan import __version__

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ["--model.flavor=debugmodel", "--training.steps=3", "--training.global_batch_size=8", "--dataset.num_workers=0"]
TINY += ["--sampling.num_steps=2", "--sampling.max_classes=2", "--validation.num_images=4", "--checkpoint.interval=3"]
LOAD = """
import sys, torchditan
samples = torchditan.load(sys.argv[1]).sample(classes=[3, 5], seed=0)
print(tuple(samples.shape), torchditan.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(REPOSITORY)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (folder / f"torchditan-{__version__}.tar.gz").exists()
    return folder / f"torchditan-{__version__}-py3-none-any.whl"


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"torchditan"}
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    folders = {
        "torchditan/": "torchditan/",
        "data/": "torchditan/datasets/",
        "train_configs/": "torchditan/train_configs/",
    }
    expected = {
        inside + file.removeprefix(folder)
        for file in tracked.splitlines()
        for folder, inside in folders.items()
        if file.startswith(folder) and (REPOSITORY / file).is_file()
    }
    assert names == expected


def test_the_wheel_is_small_and_its_page_on_pypi_has_only_absolute_links(wheel: Path) -> None:
    assert wheel.stat().st_size < 10e6
    with zipfile.ZipFile(wheel) as archive:
        page = archive.read(f"torchditan-{__version__}.dist-info/METADATA").decode()
    links = re.findall(r'\]\(([^)\s]+)|(?:src|href)="([^"]+)', page)
    assert f"/raw/v{__version__}/docs/images/" in page
    assert [link for link in map("".join, links) if not link.startswith("https://")] == []


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel. It borrows torch and the other libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    Path(packages, "libraries.pth").write_text("\n".join(libraries) + "\n")
    # With the checkout on PYTHONPATH, pip may take it for an installed version.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(folder / "bin/pip"), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(command, check=True, env=environment)
    return folder / "bin"


def test_every_step_of_the_path_works_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """Train, resume, generate, evaluate, plan, ablate, export, load, import, continue, encode: without the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    assert "quickstart" in run("torchditan", "list")
    run("torchditan", "generate", "earth", "--sampling.num_steps=2", "--out=earth.png")
    run("torchditan", "train", "quickstart", *TINY)
    assert "resumed at step 3" in run("torchditan", "train", "quickstart", *TINY, "--training.steps=4")
    run("torchditan", "generate", "outputs/quickstart")
    quick = ["--metrics", "classifier", "--num_samples=20", "--epochs=1"]
    run("torchditan", "evaluate", "outputs/quickstart", "--sampling.num_steps", "1", "2", *quick)
    run("torchditan", "export", "outputs/quickstart", "exported.safetensors")
    shape, where = run("python", "-c", LOAD, "exported.safetensors").rsplit(") ", 1)
    assert shape == "(2, 1, 8, 8" and where.startswith(str(installed.parent))
    run("torchditan", "import", "exported.safetensors", "outputs/imported")
    start = ["--checkpoint.initial_load_path=outputs/imported", "--metrics.experiment_name=continued"]
    run("torchditan", "train", "quickstart", *TINY, *start)
    run("torchditan", "plan", "dit_7b", "--device", "h100", "--num_devices", "8")
    run(
        "torchditan",
        "ablate",
        "debug",
        "--axes.parallel",
        "1,1",
        "--axes.training.batch_size",
        "8",
        "--steps=4",
        "--window=2",
    )
    run("torchditan", "report", "outputs/debug")
    run("torchditan", "encode", "latents", "--dataset.dataset_name=digits", "--autoencoder.name=haar")
    under_torchrun = ["--dataset.dataset_name=latents", "--dataset.root_dir=latents", "--model.patch_size=1"]
    run("torchrun", "--nproc_per_node=2", "-m", "torchditan", "train", *TINY, *under_torchrun)
    content = json.loads((tmp_path / "outputs/quickstart/config.json").read_text())
    assert content["git_commit"] is None and content["versions"]["torchditan"] == __version__


NOT_INSTALLED = """
import runpy, sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.path[:] = [path for path in sys.path if path != sys.argv[1]]
train = sys.argv[1] + "/train.py"
sys.argv = [train]
runpy.run_path(train, run_name="__main__")
"""


def test_a_checkout_runs_without_being_installed(tmp_path: Path) -> None:
    """`python CHECKOUT/train.py` from any folder, with the libraries but without this package."""
    command = [sys.executable, "-c", NOT_INSTALLED, str(REPOSITORY)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "quickstart" in done.stdout, done.stderr
