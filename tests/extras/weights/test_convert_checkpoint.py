# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The commands `export` and `import`, and checkpoint.initial_load_path: weights to one file and back, on any ranks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import pytest
import torch
from refusals import assert_refused, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import KEEP, job

from torchditan.checkpoint.files import save_tensors, write_json, write_manifest
from torchditan.checkpoint.loading import read_state
from torchditan.checkpoint.safetensors_files import TensorToWrite, write_weights
from torchditan.checkpoint.weights import save_weights
from torchditan.config.loader import from_dict, to_dict
from torchditan.config.options import Config
from torchditan.extras.weights.importing import import_weights
from torchditan.extras.weights.initial import load_initial_weights
from torchditan.extras.weights.opening import open_weights
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript
    from tests.zoo import Zoo

REPOSITORY = Path(__file__).resolve().parents[3]
FSDP = ["--training.data_parallel_replicate_degree=1", "--training.data_parallel_shard_degree=2"]
AT_REST = ["--training.steps=1", "--optimizer.lr=0"]  # a step that changes nothing shows what a run began with

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(zoo: Zoo) -> Path:
    """A run of six steps in one process; checkpoints of steps 3 and 6, with averaged and raw weights."""
    return zoo("digits")


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The averaged weights of that run's last step."""
    file = tmp_path_factory.mktemp("exported") / "weights.safetensors"
    save_weights(file, open_weights(trained), dtype=torch.float32)
    return file


Convert = Callable[..., str]


@pytest.fixture
def convert(run_script: RunScript) -> Convert:
    """`convert("export", run, file)`: the command in this process; what it printed."""

    def run(*arguments: object) -> str:
        outcome = run_script("torchditan", *arguments)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome.out

    return run


def weights_in(run: Path, *, step: int, key: str) -> Weights:
    """What a checkpoint has, read by another way than the export's."""
    state = read_state(run / "checkpoint" / f"step-{step:08d}", f"{key}.")
    return {name.removeprefix(f"{key}."): tensor for name, tensor in state.items()}


def assert_bitwise(left: Weights, right: Weights) -> None:
    assert left.keys() == right.keys()
    assert len(left) > 10
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def started(run: Path, source: Path, **options: Any) -> tuple[Weights, str]:
    """The weights of a model like that of `run` that starts from a source, and what the log says."""
    config = from_dict(read_config(run)["config"]).replace(options)
    spec = stored_spec(config)
    model = spec.build().to_empty(device="cpu")
    spec.init_unsaved(model, 0)
    said = load_initial_weights(model, str(source), config=config)
    return model.state_dict(), said


def test_an_export_has_the_weights_to_the_bit(trained: Path, convert: Convert, tmp_path: Path) -> None:
    ema, raw = (weights_in(trained, step=6, key=key) for key in ("ema", "model"))
    assert not torch.equal(ema["blocks.0.attn.qkv.weight"], raw["blocks.0.attn.qkv.weight"])
    line = convert("export", trained, tmp_path / "ema.safetensors")
    assert line.startswith(f"{tmp_path}/ema.safetensors: ema weights of {trained}, step 6, float32, 1.1 MB in ")
    assert_bitwise(load_file(tmp_path / "ema.safetensors"), ema)
    convert("export", trained, tmp_path / "raw.safetensors", "--weights=raw")
    assert_bitwise(load_file(tmp_path / "raw.safetensors"), raw)
    convert("export", trained, tmp_path / "half.safetensors", "--dtype=bfloat16")
    assert_bitwise(load_file(tmp_path / "half.safetensors"), {name: value.bfloat16() for name, value in ema.items()})
    convert("export", trained, tmp_path / "a.safetensors", "--step=3")
    convert("export", trained / "checkpoint" / "step-00000003", tmp_path / "b.safetensors")
    assert_bitwise(load_file(tmp_path / "a.safetensors"), weights_in(trained, step=3, key="ema"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_an_export_of_a_sharded_checkpoint_has_the_weights_to_the_bit(zoo: Zoo, tmp_path: Path) -> None:
    for kind, key in (("ema", "ema"), ("raw", "model")):
        save_weights(tmp_path / "a.safetensors", open_weights(zoo("fsdp"), kind=kind), dtype=torch.float32)
        assert_bitwise(load_file(tmp_path / "a.safetensors"), weights_in(zoo("fsdp"), step=6, key=key))


def test_the_metadata_say_where_the_weights_come_from(trained: Path, exported: Path) -> None:
    stored = open_weights(exported)
    assert (stored.step, stored.images_seen, stored.kind) == (6, 48, "ema")
    assert stored.config == read_config(trained)["config"]
    assert stored.git_commit == read_config(trained)["git_commit"]
    assert stored.shapes["blocks.0.attn.qkv.weight"] == (192, 64)


@pytest.mark.slow
def test_two_ranks_begin_with_the_same_weights(
    trained: Path, exported: Path, zoo: Zoo, tmp_path: Path, run_distributed: RunDistributed
) -> None:
    two = zoo("fsdp")
    sources = [exported, trained, two, two / "checkpoint/step-00000003"]
    runs = [tmp_path / f"begun_{number}" for number in range(len(sources))]
    jobs = [
        job(run, *KEEP, *FSDP, *AT_REST, f"--checkpoint.initial_load_path={source}")
        for run, source in zip(runs, sources, strict=True)
    ]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    of_one, of_two = (weights_in(run, step=6, key="ema") for run in (trained, two))
    expected = [of_one, of_one, of_two, weights_in(two, step=3, key="ema")]
    for run, weights in zip(runs, expected, strict=True):
        assert_bitwise(weights_in(run, step=1, key="model"), weights)
        assert_bitwise(weights_in(run, step=1, key="ema"), weights)


def test_a_run_begins_with_given_weights(trained: Path, exported: Path, tmp_path: Path, run_script: RunScript) -> None:
    outcome = run_script(
        "train.py", *job(tmp_path / "new", *KEEP, *AT_REST, f"--checkpoint.initial_load_path={exported}")
    )
    assert outcome.code == 0, outcome.err
    assert f"started from the weights of {exported}, step 6 (ema)\n" in outcome.out
    expected = weights_in(trained, step=6, key="ema")
    for key in ("model", "ema"):
        assert_bitwise(weights_in(tmp_path / "new", step=1, key=key), expected)

    half, plain = tmp_path / "half.safetensors", tmp_path / "plain.safetensors"
    save_weights(half, open_weights(trained), dtype=torch.bfloat16)
    save_file(expected, plain)
    stated = {"checkpoint.initial_load_path": str(plain), "checkpoint.initial_load_convention": "torchditan"}
    earlier = trained / "checkpoint/step-00000003"
    cases: list[tuple[Path, dict[str, Any], str, Weights]] = [
        (trained, {}, ", step 6 (ema)", expected),
        (earlier, {}, ", step 3 (ema)", weights_in(trained, step=3, key="ema")),
        (half, {}, ", step 6 (ema)", {name: value.bfloat16().float() for name, value in expected.items()}),
        (plain, stated, "", expected),
    ]
    for path, options, step, weights in cases:
        found, said = started(trained, path, **options)
        assert said == f"weights of {path}{step}"
        assert_bitwise({name: found[name] for name in weights}, weights)
    _, said = started(trained, exported, **{"model.timestep_frequencies": "diffusers"})
    assert said.endswith("; model.timestep_frequencies is dit there and diffusers here")


def test_weights_of_unknown_convention_are_refused_unless_it_is_stated(
    trained: Path, exported: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plain.safetensors"
    save_file(load_file(exported), path)
    words = ["--checkpoint.initial_load_convention torchditan", "--model.path", "t = 1 is data", "data - noise", "SiT"]
    with refused(f'checkpoint.initial_load_path = "{path}"', *words):
        started(trained, path)
    with refused(str(path), "torchditan export", "checkpoint.initial_load_path"):
        import_weights(path, tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["plain.safetensors"]


@pytest.mark.parametrize("name", ["weights.pt", "old.pt"])
def test_a_pickle_is_named_with_what_to_do(name: str, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    torch.save({"weight": torch.ones(2)}, path, _use_new_zipfile_serialization=name != "old.pt")
    with refused(f'checkpoint.initial_load_path = "{path}"', "pickle", "torchditan import", "--format", "dit"):
        started(trained, path)


def test_the_average_of_a_run_without_one_is_refused(zoo: Zoo) -> None:
    run = zoo("flux lora")
    assert open_weights(run).kind == "raw"
    with refused('--weights = "ema"', str(run), "raw"):
        open_weights(run, kind="ema")


def test_an_imported_run_is_evaluated_and_exports_the_file_again(
    trained: Path, tmp_path: Path, run_script: RunScript, convert: Convert
) -> None:
    first, run, second = tmp_path / "first.safetensors", tmp_path / "run", tmp_path / "second.safetensors"
    convert("export", trained, first, "--weights=raw")
    said = convert("import", first, run, "--dataset.root_dir=/data/here")
    assert said == f"{run}: raw weights of step 6, for torchditan generate and evaluate\n"
    assert read_config(run)["config"]["dataset"]["root_dir"] == "/data/here"
    convert("import", first, run, "--overwrite")
    convert("export", run, second)
    assert_bitwise(load_file(first), load_file(second))
    there, again = open_weights(first), open_weights(second)
    assert (again.step, again.images_seen, again.kind) == (there.step, there.images_seen, there.kind)
    assert there.config is not None
    assert again.config == {**there.config, "ema": {**there.config["ema"], "enable": False}}
    assert again.git_commit == there.git_commit
    outcome = run_script("torchditan", "evaluate", run, "--num_samples=10", "--epochs=1")
    assert (outcome.code, cards.values(outcome)["step"]) == (0, 6)


def test_an_imported_run_is_not_continued(exported: Path, tmp_path: Path, run_script: RunScript) -> None:
    run = tmp_path / "run"
    import_weights(exported, run)
    before = sorted(path.name for path in run.rglob("*"))
    outcome = run_script("train.py", *job(run, *KEEP, "--training.steps=9"))
    assert outcome.code == 2
    suggestions = ["--checkpoint.initial_load_path", "--metrics.experiment_name"]
    assert_refused(outcome.err, "training.steps = 9", [str(run), *suggestions])
    assert sorted(path.name for path in run.rglob("*")) == before


def test_only_an_imported_run_is_replaced(trained: Path, exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()  # an empty folder is as good as none
    import_weights(exported, run)
    first = read_config(run)["run_id"]
    with refused(str(run), "exists"):
        import_weights(exported, run)
    assert read_config(run)["run_id"] == first
    import_weights(exported, run, overwrite=True)
    assert read_config(run)["run_id"] != first
    with refused(str(trained)):
        import_weights(exported, trained, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_import_that_fills_the_disk_is_one_line_and_leaves_nothing(
    exported: Path, tmp_path: Path, run_script: RunScript
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        outcome = run_script("torchditan", "import", exported, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 2
    assert_refused(outcome.err, "new", ["File too large"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced_unasked(trained: Path, tmp_path: Path, run_script: RunScript) -> None:
    out = tmp_path / "a.safetensors"
    out.write_text("mine")
    outcome = run_script("torchditan", "export", trained, out)
    assert (outcome.code, outcome.out, out.read_text()) == (2, "", "mine")
    assert_refused(outcome.err, str(out), ["--overwrite"])
    assert run_script("torchditan", "export", trained, out, "--overwrite").code == 0
    assert len(load_file(out)) > 10


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.safetensors"
    path.write_text("before")
    whole = TensorToWrite("a", (2, 3), torch.float32, lambda: torch.ones(2, 3))
    with pytest.raises(OSError, match="No space left"):
        write_weights(path, [whole, TensorToWrite("b", (), torch.float32, fail)], {})
    assert (path.read_text(), [file.name for file in tmp_path.iterdir()]) == ("before", ["a.safetensors"])


def test_a_file_takes_tensors_of_any_layout(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "a part": torch.arange(10.0)[2:5],
        'a "name" of ünusual letters': torch.tensor([1e-45, -0.0, float("inf")]),
    }
    entries = [
        TensorToWrite(name, tuple(tensor.shape), dtype, lambda tensor=tensor: tensor)
        for (name, tensor), dtype in zip(tensors.items(), [torch.float32, torch.bfloat16] * 3, strict=False)
    ]
    write_weights(tmp_path / "a.safetensors", reversed(entries), {"key": "válue"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for entry in entries:
        assert found[entry.name].dtype == entry.dtype
        assert torch.equal(found[entry.name], tensors[entry.name].to(entry.dtype)), entry.name


def with_header(header: Any, num_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def place(start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4], "data_offsets": [start, end]}


NO_FILE = ["safetensors", "truncated", "export it again"]


@pytest.mark.parametrize(
    ("data", "mentions"),
    [
        (b"", NO_FILE),
        (b"GGUF" + bytes(60), ["GGUF", "quantized", ".safetensors", "floating-point"]),
        (struct.pack("<Q", 2**63) + b"{}", NO_FILE),
        (with_header(b"[" * 100_000, 0), NO_FILE),
        (with_header({"a": place(0, 16)}, 15), NO_FILE),
        (with_header({"a": place(1 << 40, (1 << 40) + 16)}, 16), NO_FILE),
        (with_header({"a": place(0, 16, "I32")}, 16), ["a", "I32", "floating-point"]),
    ],
    ids=["empty", "GGUF", "endless header", "deep header", "cut short", "outside", "integers"],
)
def test_a_file_that_is_none_is_refused(data: bytes, mentions: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with refused(str(path), *mentions):
        open_weights(path)


def change(metadata: dict[str, str], **config: Any) -> dict[str, str]:
    """Metadata with options of their configuration changed: `change(metadata, checkpoint={"folder": "x"})`."""
    tree = json.loads(metadata["config"])
    return {**metadata, "config": json.dumps({**tree, **{name: {**tree[name], **config[name]} for name in config}})}


SENSELESS = ["invalid metadata", "export it again"]


@pytest.mark.parametrize(
    ("forge", "mentions"),
    [
        (lambda m: {"format": "pt"}, ["configuration", "torchditan export", "checkpoint.initial_load_path"]),
        (lambda m: {**m, "version": "2"}, ["version 2", "newer TorchDiTan", "version 1"]),
        (lambda m: {**m, "step": "one"}, SENSELESS),
        (lambda m: {**m, "config": "[" * 100_000}, SENSELESS),
        (lambda m: {**m, "config": '{"model": 1}'}, SENSELESS),
        (
            lambda m: change(m, checkpoint={"folder": "../../x"}),
            ['checkpoint.folder = "../../x"', "inside the run directory"],
        ),
        (lambda m: change(m, model={"sample_size": None}), ["image size", "classes", "channels"]),
        (
            lambda m: change(m, dataset={"num_classes": 9}),
            ["another model", "y_embedder.embedding_table.weight is (11, 64) there and (10, 64) here"],
        ),
    ],
)
def test_what_a_file_says_of_itself_is_not_believed(
    forge: Callable[[dict[str, str]], dict[str, str]], mentions: list[str], exported: Path, tmp_path: Path
) -> None:
    with safe_open(exported, framework="pt") as file:
        metadata = file.metadata()
    path = tmp_path / "a.safetensors"
    save_file(load_file(exported), path, metadata=forge(metadata))
    with refused(str(path), *mentions):
        import_weights(path, tmp_path / "run")
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_weights_of_another_model_are_refused(trained: Path, exported: Path) -> None:
    differing = [
        "another model",
        "model.patch_size is 2 there and 4 here",
        "x_embedder.proj.weight is (64, 1, 2, 2) there and (64, 1, 4, 4) here",
        "final_layer.linear.bias is (4,) there and (16,) here",
    ]
    with refused(f'checkpoint.initial_load_path = "{exported}"', *differing):
        started(trained, exported, **{"model.patch_size": 4})
    where = f"{trained}/checkpoint/step-00000006"
    with refused(
        f'checkpoint.initial_load_path = "{trained}"', where, "blocks.0.mlp.fc1.weight is absent there", "21 more"
    ):
        started(trained, trained, **{"model.mlp": "gelu"})


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["export", "gone", "a.safetensors"], "gone", ["run directory"]),
        (["export", "{run}", "a.pt"], 'OUT = "a.pt"', [".safetensors"]),
        (["export", "{run}", "a.safetensors", "--step=7"], "--step = 7", ["{run}/checkpoint", "[3, 6]"]),
        (
            ["export", "{run}/checkpoint/step-00000006", "a.safetensors", "--step=3"],
            "--step = 3",
            ["{run}/checkpoint/step-00000006"],
        ),
        (["export", "{run}", "/proc/a.safetensors"], "/proc/a.safetensors", ["No such file or directory"]),
        (["import", "gone.safetensors", "new"], "gone.safetensors", ["run directory", ".safetensors"]),
        (["import", "{file}", "/proc/new"], "/proc/new", ["No such file or directory"]),
        (["import", "{file}", "new", "--dataset.image_size=16"], "dataset.image_size", ["dataset.root_dir"]),
        (["import", "{file}", "new", "--autoencoder.path=mine"], 'autoencoder.path = "mine"', ["pixels"]),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    about: str,
    mentions: list[str],
    trained: Path,
    exported: Path,
    tmp_path: Path,
    run_script: RunScript,
) -> None:
    places = {"run": trained, "file": exported}
    outcome = run_script("torchditan", *(argument.format(**places) for argument in arguments))
    assert (outcome.code, outcome.out) == (2, "")
    assert_refused(outcome.err, about.format(**places), [mention.format(**places) for mention in mentions])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "mentions"),
    [
        ("gone", [".safetensors", "run directory", "checkpoint"]),
        (".", ["config.json", "run directory"]),
        ("emty", [".safetensors", "run directory", "empty?"]),
        ("pipeline", ["diffusers", "--model.path", "--model.name"]),
        ("pipeline/transformer", ["diffusers", "--model.path", "--model.name"]),
        ("empty", ["empty/checkpoint", "checkpoint.save_final = false", "--checkpoint.enable_checkpoint"]),
    ],
)
def test_a_path_without_weights_is_refused(
    path: str, mentions: list[str], zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = zoo("digits")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    content = read_config(run)
    content["config"]["checkpoint"] |= {"enable_checkpoint": False, "save_final": False}
    (tmp_path / "empty/config.json").write_text(json.dumps(content))
    (tmp_path / "pipeline" / "transformer").mkdir(parents=True)
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    (tmp_path / "pipeline" / "transformer" / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}')
    with refused(f'checkpoint.initial_load_path = "{path}"', *mentions):
        started(run, Path(path))


def test_a_damaged_checkpoint_is_not_exported(trained: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(trained, tmp_path / "run") / "checkpoint" / "step-00000006"
    os.truncate(checkpoint / "__0_0.distcp", 1000)
    with refused(str(checkpoint), "__0_0.distcp", "1,000 bytes"):
        save_weights(tmp_path / "a.safetensors", open_weights(checkpoint), dtype=torch.float32)
    with refused(f'checkpoint.initial_load_path = "{checkpoint}"', "__0_0.distcp", "1,000 bytes"):
        started(trained, checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


LARGE = {
    "model.flavor": "DiT-B",
    "model.input_channels": 4,
    "model.conditioning": "in_context",
    "model.sample_size": [32, 32],
    "dataset.image_size": [32, 32],
    "dataset.num_classes": 10,
}
SHARE = 1.3
"""Of the model, that a conversion may take of the host's memory."""
MEASURE = """
import resource, sys
from pathlib import Path
import torch
from torchditan.config.options import Config
from torchditan.extras.weights.importing import import_weights
from torchditan.checkpoint.weights import save_weights
from torchditan.extras.weights.initial import load_initial_weights
from torchditan.extras.weights.opening import open_weights
from torchditan.extras.weights.trained_model import stored_spec
config = Config().replace({large!r})
with torch.device("meta"):
    model = stored_spec(config).build()
before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
{code}
# Not getrusage's peak, which begins with that of the process that started this one.
highest = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(highest) * 1024 - before)
"""


def peak_of(code: str) -> int:
    """Bytes of host memory that some lines take at their peak, over what the process had before."""
    command = [sys.executable, "-c", MEASURE.format(large=LARGE, code=code)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.slow
def test_no_conversion_takes_more_memory_than_the_model(tmp_path: Path) -> None:
    config = Config().replace(LARGE)
    with torch.device("meta"):
        model = stored_spec(config).build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    checkpoint = tmp_path / "run/checkpoint/step-00000007"
    state = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(shapes.items())}
    save_tensors({"model": state}, checkpoint)
    write_json(checkpoint / "config.json", to_dict(config))
    write_json(checkpoint / "progress.json", {"step": 7, "images_seen": 70})
    write_manifest(checkpoint, step=7, trajectory={})
    (tmp_path / "run/config.json").write_text(json.dumps({"config": to_dict(config)}))

    names = ("run", "a.safetensors", "b.safetensors", "imported")
    run, file, half, imported = (str(tmp_path / name) for name in names)
    save = "save_weights(Path({!r}), open_weights({!r}), dtype=torch.{})"
    load = "model.to_empty(device='cpu'); load_initial_weights(model, {!r}, config=config)"
    conversions = {
        "export": save.format(file, run, "float32"),
        "export bfloat16": save.format(half, run, "bfloat16"),
        "load a checkpoint": load.format(run),
        "load a file": load.format(file),
        "import": f"import_weights(Path({file!r}), Path({imported!r}))",
    }
    size = sum(value.nbytes for value in state.values())
    for name, code in conversions.items():
        peak, of_what = peak_of(code), size // 2 if name == "export bfloat16" else size
        print(f"{name}: {peak / of_what:.2f} of {of_what / 1e6:.0f} MB")  # shown by pytest -s
        assert peak < SHARE * of_what, name
    written = load_file(file)
    assert all(torch.equal(written[name], value) for name, value in state.items())
