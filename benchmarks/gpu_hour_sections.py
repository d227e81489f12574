# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The sections of gpu_hour.py: the commands, what is read from their results, and the figures of docs/gpus.md.

Notable: the expected seconds are those of a first run on an H200, as far as it went, and else estimates. They decide
whether a section still fits into the time.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from torchditan.run.reading import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
Command = tuple[str, ...]

EMULATED: dict[str, Row] = {
    "eager": {"kernels": 2269, "products": 433, "attention": 112, "copies": 13, "waits": 4},
    "compiled": {"kernels": 1121, "products": 433, "attention": 112, "copies": 13, "waits": 4},
}
"""Counts of a step of DiT-XL/2 that logs, on an emulated H100 with torch 2.13 and flash attention."""
ATTENTION = re.compile(r"fmha|flash|sdpa", re.IGNORECASE)
PRODUCTS = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk", re.IGNORECASE)
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Not cudaDeviceSynchronize, which the profiler calls itself."""
TRACED_STEP = 8
LARGEST_LOSS_DIFFERENCE = 0.1
"""Between float8 and bfloat16, relative, as in tests/trainer/test_gpu.py."""


@dataclass(frozen=True)
class Found:
    """What a section measured."""

    rows: list[Row]
    """Of the table."""
    results: Any = None
    """The complete results of its commands."""
    problem: str | None = None
    """Why a check of its figures failed."""


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    expected_s: float
    """It is not run if less time is left, and killed after twice this time."""
    commands: tuple[Command, ...]
    """They run in the repository, one after another; `{folder}` is an empty folder."""
    read: Callable[[Path, Sequence[str]], Found]
    """Of the folder and the outputs. It may raise if a command failed."""
    exit_codes: tuple[int, ...] = (0,)
    """Of commands that did what they should."""
    timed: bool = True
    """It measures time, or takes all of the memory, so no other section may run at the same time."""

    @property
    def limit_s(self) -> float:
        return 2 * self.expected_s


@dataclass(frozen=True)
class Figure:
    """A row in docs/gpus.md: `text`, formatted with the first row of the section that agrees with `where`."""

    what: str
    section: str
    text: str
    target: str = ""
    where: Row = field(default_factory=dict)


def sweep_figure(model: str, batch_size: int, blocks: str, target: str = "") -> Figure:
    text = "{mfu:.1f}%, {step_ms:.1f} ms, {images_per_s:.0f} images/s, {memory_gib:.1f} GiB" + (
        " {flags}" if model == "DiT-7B" else ""
    )
    where = {"preset": "torchditan", "blocks": blocks}
    section = f"step_{model.removeprefix('DiT-').lower()}"
    return Figure(f"MFU of a step of {model}/2, batch {batch_size}, {blocks}", section, text, target, where)


RATIO = "{ratio:.3f}"
FIGURES = (
    Figure("`pytest -m gpu`", "tests", "{passed} passed, {failed} failed, {skipped} skipped", "0 failed"),
    sweep_figure("DiT-L", 128, "compiled"),
    sweep_figure("DiT-L", 128, "eager"),
    sweep_figure("DiT-XL", 128, "compiled", "45% (H100), 48% (H200)"),
    sweep_figure("DiT-XL", 128, "eager"),
    sweep_figure("DiT-1B", 128, "compiled", "55% (H200)"),
    sweep_figure("DiT-1B", 128, "eager"),
    sweep_figure("DiT-7B", 4, "compiled"),
    sweep_figure("DiT-7B", 4, "eager"),
    Figure(
        "float8, time of bfloat16's (DiT-7B/2 with 6 blocks, batch 128, compiled)",
        "float8",
        RATIO,
        "0.85",
        {"model": "DiT-7B, 6 blocks"},
    ),
    Figure(
        "float8, loss of bfloat16's (DiT-7B/2 with 4 blocks on digits, 100 steps)",
        "float8_losses",
        "{of_bfloat16:.4f}, largest difference of a step {largest_difference:.2g}",
        where={"run": "float8", "model": "DiT-7B"},
    ),
    *(
        Figure(
            f"`training.attention_backend` {name}, time of the default's (DiT-XL/2, batch 32, compiled)",
            "attention",
            RATIO,
            where={"flags": f"training.attention_backend={name}"},
        )
        for name in ("cudnn", "efficient")
    ),
    Figure(
        "planned memory, largest difference from the measured (DiT-L/2, eager)",
        "planner",
        "{difference:+.1%}",
        "5%",
        {"model": "largest difference"},
    ),
    *(
        Figure(
            f"a step of DiT-XL/2, batch 32, {blocks} (emulated, torch 2.13: {EMULATED[blocks]['kernels']:,} kernels)",
            "kernels",
            "{kernels:,} kernels, {products} products, {copies} copies, {waits} host waits",
            where={"blocks": blocks, "device": "measured"},
        )
        for blocks in EMULATED
    ),
    *(
        Figure(
            f"drawing 32 images in 50 steps, DiT-XL/2, bfloat16, time of {of}",
            "sampling",
            RATIO,
            where={"implementation": "ours", "ratio_to": other},
        )
        for other, of in (("diffusers", "diffusers'"), ("plain", "the plain model's"))
    ),
    Figure(
        "`imf guidance=true`, time of a step of flow matching (DiT-XL/2, batch 32)",
        "imf",
        "{time:.2f} ({flops:.2f} times the FLOPs)",
        where={"objective": "imf guidance=true"},
    ),
    Figure("one-step sampling of `quickstart_one_step`", "imf", "{time}", where={"objective": "drawing"}),
    Figure(
        "synchronous save, of `torch.save` (DiT-L/2)", "checkpoint", "{of_torch_save:.2f}", where={"what": "disabled"}
    ),
    Figure(
        "stall of an asynchronous save, of a synchronous one",
        "checkpoint",
        "{of_disabled:.2f}",
        "0.1",
        {"what": "async: the stall"},
    ),
    Figure("a resumed run of DiT-B/2 has the losses of the whole run", "resume", "{equal}", "yes"),
    Figure("an evaluation repeated from its card (quickstart, 200 steps)", "path", "{repeated}", "equal to the bit"),
    Figure("a batch that does not fit", "oom", "state {state}", "state oom"),
    Figure(
        "`training.float32_matmul_precision` high, time of float32's (DiT-XL/2, batch 32, eager)",
        "float32_products",
        RATIO,
    ),
)


def build_sections(*, tiny: bool, cuda: bool) -> list[Section]:
    """All sections, the most important first. `tiny` needs `debugmodel` only, and seconds."""
    python, device = sys.executable, "cuda" if cuda else "cpu"

    def script(name: str, *flags: str) -> Command:
        return (python, f"benchmarks/{name}.py", *flags)

    def step_time(file: str, suite: str, *flags: str) -> Command:
        quick = ("--quick",) if tiny else ()
        return script("step_time", suite, *flags, *quick, f"--out={{folder}}/{file}.json")

    def train(name: str, flavor: str, batch_size: int, steps: int, *flags: str) -> Command:
        latents = ("--dataset.dataset_name=dummy", "--dataset.image_size", "32", "32", "--model.input_channels=4")
        data = ("--dataset.dataset_name=digits",) if "digits" in flags else latents
        size = (f"--model.flavor={flavor}", f"--training.batch_size={batch_size}")
        small = ("--model.flavor=debugmodel", "--training.batch_size=4") if tiny else size
        shared = ("--metrics.log_freq=1", "--metrics.enable_sampling=false", "--checkpoint.save_final=false")
        place = ("--job.dump_folder={folder}", f"--metrics.experiment_name={name}", f"--training.steps={steps}")
        own = (flag for flag in flags if flag != "digits")
        return (python, "train.py", *data, *small, "--model.patch_size=2", *shared, *place, *own)

    def sweep(flavor: str, batch_size: int, expected_s: float) -> Section:
        seconds = f"{0.6 * expected_s:g}"  # further cases, such as one of less memory, are then skipped
        flags = () if tiny else (f"--models={flavor}", f"--batch_size={batch_size}", f"--time_limit={seconds}")
        suite = "sweep" if cuda else "trainer"  # the sweep needs a GPU
        name = f"step_{flavor.removeprefix('DiT-').lower()}"
        title = f"Step time and MFU of {flavor}/2"
        return Section(name, title, expected_s, (step_time("step_time", suite, *flags),), read_step_times)

    compiled = () if tiny and not cuda else ("--training.compile",)
    bf16 = ("--variants=bf16_compiled",) if cuda else ()
    emulate = ("--float8.emulate",) if tiny else ()  # no layer of a tiny model gains from float8
    few_blocks = "--model.overrides=depth=4"
    keep = (
        "--checkpoint.enable_checkpoint",
        "--checkpoint.save_final=true",
        "--checkpoint.interval=10",
        "--training.deterministic",
    )
    trace = ("--profiling.enable_profiling", f"--profiling.profile_freq={TRACED_STEP}")
    imf_size = ("--flavor=debugmodel", "--batch_size=4") if tiny else ("--flavor=DiT-XL", "--batch_size=32")
    imf_train = (python, "train.py", "--job.config_file=quickstart_one_step.toml", "--metrics.enable_sampling=false")
    imf_train += (
        "--job.dump_folder={folder}",
        "--metrics.experiment_name=imf",
        f"--training.steps={4 if tiny else 100}",
    )
    checkpoint = ("--rounds=1", "--model.flavor=debugmodel") if tiny else ("--rounds=2", "--model.flavor=DiT-L")
    gpu_tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not slow")
    # those without training; or the files with such tests, because collecting all takes a minute
    gpu_tests += ("tests/run", "tests/trainer/test_float32_products.py") if tiny else files_with_gpu_tests()
    loss_steps = 20 if tiny else 100
    run, steps = "{folder}/quickstart", 20 if tiny else 200
    end = (f"--training.steps={steps}", "--lr_scheduler.warmup_steps=5", f"--metrics.sample_freq={steps // 2}")
    quickstart: Command = ("train", "quickstart", *end)
    again = "{folder}/again"
    command_of_card = 'eval "$0 -m $(grep "^    torchditan evaluate " {folder}/e/card.md) --out={folder}/repeated"'
    path: tuple[Command, ...] = tuple(
        command if command[0] == "bash" else (python, "-m", "torchditan", *command)
        for command in (
            (*quickstart, "--job.dump_folder={folder}"),
            ("generate", run),
            ("evaluate", run, "--metrics=classifier", "--num_samples=500", "--epochs=2", "--out={folder}/e"),
            ("bash", "-c", command_of_card, python),
            ("export", run, "{folder}/weights.safetensors"),
            ("import", "{folder}/weights.safetensors", again),
            ("generate", again),
            (*quickstart, f"--job.dump_folder={again}", "--checkpoint.initial_load_path={folder}/weights.safetensors"),
        )
    )
    oom: Command = ("--model.flavor=DiT-XL", "--training.batch_size=8192")
    if not cuda:
        oom = ("--model.flavor=DiT-L", "--training.mixed_precision_param=float32")
    oom = train("oom", "DiT-XL", 8192, 2, *oom)
    if not cuda:
        oom = ("bash", "-c", 'ulimit -v 6000000 && exec "$@"', "-", *oom)  # KiB

    return [
        Section("tests", "Tests that need a GPU", 150, (gpu_tests,), read_tests, (0, 1), timed=False),
        Section("path", "A run from training to import", 170, path, read_path, timed=False),
        Section(
            "float8_losses",
            "Losses of float8 and bfloat16",
            150,
            (
                train("bfloat16", "DiT-7B", 128, loss_steps, "digits", few_blocks, *compiled),
                train(
                    "float8",
                    "DiT-7B",
                    128,
                    loss_steps,
                    "digits",
                    few_blocks,
                    *compiled,
                    "--float8.enable_float8_linear",
                    *emulate,
                ),
            ),
            read_float8_losses,
            timed=False,
        ),
        Section(
            "kernels",
            "Kernels, copies and host waits of a step of DiT-XL/2, batch 32",
            60,
            (
                train("eager", "DiT-XL", 32, TRACED_STEP, *trace),
                train("compiled", "DiT-XL", 32, TRACED_STEP, *trace, *compiled),
            ),
            read_kernels,
        ),
        Section(
            "planner",
            "Planned and measured memory",
            200,
            (
                script(
                    "planner_truth",
                    f"--device={device}",
                    f"--models={'debugmodel' if tiny else 'DiT-L'}",
                    "--no_compiled",
                    "--out={folder}/planner.json",
                ),
            ),
            read_planner,
            timed=False,
        ),
        Section(
            "resume",
            "A resume",
            90,
            (
                train("whole", "DiT-B", 32, 20, *keep),
                train("cut", "DiT-B", 32, 10, *keep),
                train("cut", "DiT-B", 32, 20, *keep),
            ),
            read_resume,
            timed=False,
        ),
        sweep("DiT-XL", 128, 120),
        Section("float8", "Float8 against bfloat16", 90, (step_time("f8", "float8", "--turns=5"),), read_step_times),
        sweep("DiT-1B", 128, 120),
        sweep("DiT-7B", 4, 120),
        Section("sampling", "Drawing images", 80, (step_time("sampling", "sampling", "--turns=3"),), read_step_times),
        Section(
            "checkpoint",
            "Checkpoints against torch.save",
            60,
            (script("checkpoint_cost", *checkpoint, "--out={folder}/checkpoint.json"),),
            read_checkpoint,
        ),
        Section("oom", "Out of memory", 30, (oom,), read_oom, (3,)),
        Section(
            "attention",
            "Attention backends",
            110,
            tuple(
                step_time(name, "options", f"--flags=--training.attention_backend={name}", *bf16)
                for name in ("cudnn", "efficient")
            ),
            read_step_times,
        ),
        Section(
            "imf",
            "One-step generation (imf)",
            60,
            (
                script(
                    "objective_cost",
                    "--sample_shape",
                    "4",
                    "32",
                    "32",
                    *imf_size,
                    "--rounds=5",
                    "--out={folder}/c.json",
                ),
                imf_train,
                (python, "-m", "torchditan", "generate", "{folder}/imf", "--sampling.images_per_class=64"),
            ),
            read_imf,
        ),
        Section(
            "float32_products",
            "Products of float32 in TF32",
            60,
            (step_time("products", "float32_products", "--variants=fp32_eager", "--turns=3"),),
            read_step_times,
        ),
        sweep("DiT-L", 128, 100),
    ]


def files_with_gpu_tests() -> tuple[str, ...]:
    files = (REPOSITORY / "tests").rglob("test_*.py")
    return tuple(sorted(str(f.relative_to(REPOSITORY)) for f in files if "pytest.mark.gpu" in f.read_text("utf-8")))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_tests(folder: Path, outputs: Sequence[str]) -> Found:
    """Counts of pytest's last line, and the names of failed tests."""
    summary = re.findall(r"(\d+) (passed|failed|skipped|error)", outputs[0].splitlines()[-1])
    assert summary, "pytest printed no summary"
    counts = dict.fromkeys(("passed", "failed", "skipped", "error"), 0) | {what: int(count) for count, what in summary}
    bad = re.findall(r"^(?:FAILED|ERROR) (\S+)", outputs[0], re.MULTILINE)
    problem = f"{len(bad)} failed, such as {bad[0]}" if bad else None
    return Found([counts], {"failed": bad}, problem)


def read_step_times(folder: Path, outputs: Sequence[str]) -> Found:
    """One row per case of every file of step_time.py, with the ratio of two cases in the row of the first."""
    documents = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    rows: list[Row] = []
    for document in documents.values():
        for group in document["groups"]:
            for case in group["rows"]:
                seconds = case["step_time_s"]
                rows.append(
                    {
                        "implementation": case["implementation"],
                        "model": case["model"] if case["depth"] is None else f"{case['model']}, {case['depth']} blocks",
                        "preset": case["preset"],
                        "batch": case["batch_size"],
                        "precision": case["precision"],
                        "blocks": "compiled" if case["compiled"] else "eager",
                        "flags": " ".join(flag.removeprefix("--") for flag in case["flags"]),
                        "status": case["status"]
                        if case["reason"] is None
                        else f"{case['status']}: {case['reason'][:60]}",
                        "step_ms": None if seconds is None else 1000 * seconds,
                        "images_per_s": case["images_per_second"],
                        "mfu": case["mfu"],
                        "memory_gib": case["peak_memory_gib"],
                    }
                )
            if found := group["comparison"]:
                rows[-2] |= {"ratio_to": rows[-1]["implementation"], "ratio": found["ratio"], "spread": found["spread"]}
                if found["ratio"] is None:
                    rows[-2]["status"] = f"not reported: spread {found['spread']:.0%}"
    return Found(rows, documents)


def read_float8_losses(folder: Path, outputs: Sequence[str]) -> Found:
    """Mean loss of the last 20 steps of both runs."""
    model = read_json(folder / "float8" / "config.json")["config"]["model"]["flavor"]
    losses = {run: [record["loss"] for record in read_metrics(folder / run)] for run in ("bfloat16", "float8")}
    rows: list[Row] = [{"run": run, "model": model, "loss": mean(values[-20:])} for run, values in losses.items()]
    base = rows[0]["loss"]
    pairs = zip(losses["float8"], losses["bfloat16"], strict=True)
    rows[1]["largest_difference"] = max(abs(a - b) for a, b in pairs)
    rows[1]["of_bfloat16"] = rows[1]["loss"] / base if base else None  # 0 on an emulated GPU
    differs = rows[1]["of_bfloat16"] is None or abs(rows[1]["of_bfloat16"] - 1) > LARGEST_LOSS_DIFFERENCE
    return Found(rows, losses, "the losses of float8 and bfloat16 differ" if differs else None)


def read_kernels(folder: Path, outputs: Sequence[str]) -> Found:
    """Counts of one traced step, eager and compiled, next to those of the emulation."""
    rows: list[Row] = []
    names: dict[str, Any] = {}
    callers: dict[str, Any] = {}
    for blocks, emulated in EMULATED.items():
        trace = folder / blocks / "profile_trace" / f"step_{TRACED_STEP:08d}" / "rank0.json"
        events = read_json(trace)["traceEvents"]
        counts, names[blocks] = count_events(events)
        callers[blocks] = callers_of_waits(events)
        rows += [
            {"blocks": blocks, "device": "measured", **counts},
            {"blocks": blocks, "device": "emulated", **emulated},
        ]
    on_gpu = "on cuda" in outputs[0]
    problem = "the traces have no kernels" if on_gpu and not all(row["kernels"] for row in rows) else None
    return Found(rows, {"most frequent kernels": names, "callers of waits": callers}, problem)


def count_events(events: Sequence[Row]) -> tuple[Row, list[tuple[str, int]]]:
    """Counts and times of a trace of torch.profiler, and the 40 most frequent kernels. `kernels` are neither products
    nor attention; the rest of a step's time, the GPU waits."""

    def kind(name: str) -> str:
        return "attention" if ATTENTION.search(name) else "products" if PRODUCTS.search(name) else "kernels"

    kernels = [event for event in events if event.get("cat") == "kernel"]
    found = Counter(kind(event["name"]) for event in kernels)
    spent: Counter[str] = Counter()
    for event in kernels:
        spent[kind(event["name"])] += event.get("dur", 0)
    step = [event["dur"] for event in events if event["name"] == f"ProfilerStep#{TRACED_STEP - 1}"]
    calls = Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    counts = {
        **{name: found[name] for name in ("kernels", "products", "attention")},
        "copies": sum(event.get("cat") == "gpu_memcpy" for event in events),
        "memory_sets": sum(event.get("cat") == "gpu_memset" for event in events),
        "waits": sum(calls[name] for name in WAITS),
        **{f"{name}_ms": spent[name] / 1000 for name in ("kernels", "products", "attention")},
        "step_ms": step[0] / 1000 if step else None,
    }
    return counts, Counter(event["name"][:120] for event in kernels).most_common(40)


def callers_of_waits(events: Sequence[Row]) -> list[str]:
    """For each host wait, the operator and the annotation around it, innermost first."""
    around = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    found = []
    for wait in (event for event in events if event["name"] in WAITS and event.get("cat") == "cuda_runtime"):
        holds = [
            event
            for event in around
            if event["tid"] == wait["tid"] and event["ts"] <= wait["ts"] <= event["ts"] + event["dur"]
        ]
        holds.sort(key=lambda event: event["dur"])
        found.append(" < ".join(event["name"][:60] for event in holds) or f"no operator, {wait['dur']} us")
    return found


def read_planner(folder: Path, outputs: Sequence[str]) -> Found:
    document = read_json(folder / "planner.json")
    for row in document["rows"]:
        del row["measured_s"]  # other sections ran at the same time
    rows: list[Row] = [
        {
            "model": row["flavor"],
            "checkpointing": row["checkpointing"],
            "batch": row["batch_size"],
            "planned_gib": row["planned_gib"],
            "measured_gib": row["measured_gib"],
            "difference": row["memory_error"],
            "status": row["status"] if row["reason"] is None else f"{row['status']}: {row['reason'][:60]}",
        }
        for row in document["rows"]
    ]
    differences = [row["difference"] for row in rows if row["difference"] is not None]
    if differences:
        rows.append({"model": "largest difference", "difference": max(differences, key=abs)})
    bad = [row["reason"] for row in document["rows"] if row["status"] not in ("ok", "skipped")]
    return Found(rows, document, f"{len(bad)} cells failed, such as: {bad[0]}" if bad else None)


def read_imf(folder: Path, outputs: Sequence[str]) -> Found:
    document = read_json(folder / "c.json")
    rows: list[Row] = [
        {"objective": name, "flops": row["flops"], "time": row["time"]} for name, row in document["rows"].items()
    ]
    drawn = re.search(r"^\d+ images in .*$", outputs[-1], re.MULTILINE)
    assert drawn is not None, "torchditan generate printed no time"
    rows.append({"objective": "drawing", "time": drawn[0]})
    return Found(rows, document)


def read_checkpoint(folder: Path, outputs: Sequence[str]) -> Found:
    document = read_json(folder / "checkpoint.json")
    medians = document["medians_s"]
    rows: list[Row] = [
        {
            "what": name,
            "seconds": seconds,
            "of_torch_save": seconds / medians["torch.save"],
            "of_disabled": seconds / medians["disabled"],
        }
        for name, seconds in medians.items()
    ]
    return Found(rows, document)


def read_resume(folder: Path, outputs: Sequence[str]) -> Found:
    """Whether the losses of a run that was cut and resumed are those of the whole run, to the bit."""
    losses = {run: [record["loss"] for record in read_metrics(folder / run)] for run in ("whole", "cut")}
    assert losses["whole"], "no run was logged"
    equal = losses["whole"] == losses["cut"]
    rows = [{"steps": len(losses["whole"]), "equal": "yes" if equal else "no"}]
    return Found(rows, losses, None if equal else "the losses of the resumed run differ")


def read_path(folder: Path, outputs: Sequence[str]) -> Found:
    """Whether the repeated evaluation has the same figures."""
    card, repeated = (read_json(folder / name / "card.json") for name in ("e", "repeated"))
    num_equal = sum(repeated["figures"].get(name) == figure for name, figure in card["figures"].items())
    text = f"{num_equal} of {len(card['figures'])} figures are equal to the bit"
    problem = None if repeated["figures"] == card["figures"] else "the repeated evaluation has other figures"
    return Found([{"repeated": text}], card, problem)


def read_oom(folder: Path, outputs: Sequence[str]) -> Found:
    status = read_json(folder / "oom" / "status.json")
    rows = [{"state": status["state"], "reason": status["reason"]}]
    return Found(rows, status, None if status["state"] == "oom" else f"the run ended as {status['state']}")
