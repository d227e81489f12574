# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Metrics of a run, with a clock that the tests control."""

from __future__ import annotations

import io
import re
import resource
import sys
import types
from importlib import import_module

import pytest
import torch
from PIL import Image

from torchditan.config.options import Metrics
from torchditan.errors import ConfigError
from torchditan.run.directory import RunDirectory
from torchditan.run.metrics import ALWAYS_KEYS, MetricsLogger
from torchditan.run.reading import read_config, read_metrics
from torchditan.run.step_timer import StepTimer
from torchditan.run.trackers import check_trackers
from torchditan.run.training_progress import Progress

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run", is_writer=True)
    directory.open({"training": {"seed": 0}}, trajectory={"seed": 0})
    yield directory
    directory.close()


@pytest.fixture
def make(run, clock):
    loggers = []

    def make(config=None, *, directory=run, progress=None, **options):
        options = {"stream": io.StringIO(), "total_steps": 100, "flops_per_image": 2e12, **options}
        logger = MetricsLogger(
            config or Metrics(),
            directory,
            progress or Progress(),
            device=CPU,
            clock=clock,
            **{"world_size": 2, "peak_flops": 100e12, "tokens_per_image": 256, **options},
        )
        loggers.append(logger)
        return logger

    yield make
    for logger in loggers:
        logger.close()


def train(logger, clock, steps, *, images=8, seconds=0.5):
    for _ in range(steps):
        clock.now += seconds
        logger._progress.step += 1
        logger._progress.images_seen += images
        logger.show_step()


def test_a_record_has_the_contracts_keys_with_global_throughput_and_flops_per_device(make, run, clock):
    logger = make(world_size=2, flops_per_image=2e12, peak_flops=100e12)
    before = logger.log(loss=0.5, grad_norm=0.0, lr=0.0, extra={"rollbacks": 1})
    assert (before["step_time_s"], before["images_per_second"], before["mfu"], before["rollbacks"]) == (None,) * 3 + (
        1,
    )
    train(logger, clock, 10, images=8, seconds=0.5)
    record = logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
    assert read_metrics(run.path)[1] == record
    assert tuple(record) == ALWAYS_KEYS == (
        "step", "images_seen", "loss", "grad_norm", "lr", "step_time_s", "images_per_second",
        "tflops_per_device", "mfu", "peak_memory_gib", "peak_reserved_gib", "peak_memory_percent",
        "data_loading_percent", "elapsed_s",
    )  # fmt: skip
    assert (record["step"], record["images_seen"], record["elapsed_s"]) == (10, 80, pytest.approx(5))
    assert record["step_time_s"] == pytest.approx(0.5)
    assert record["images_per_second"] == record["tflops_per_device"] == record["mfu"] == pytest.approx(16)
    assert 0.01 < record["peak_memory_gib"] < 1000, "that of the process, in the host"
    assert 0 < record["peak_memory_percent"] < 100 and record["peak_reserved_gib"] is None
    for images in (8, 8, 3):
        train(logger, clock, 1, images=images, seconds=0.25)
    record = logger.log(loss=0.0, grad_norm=0.0, lr=0.0)
    assert record["images_per_second"] == pytest.approx(19 / 0.75), "images in the batches since the last line"


def test_a_resumed_run_continues_images_and_time_and_has_no_mfu_where_the_peak_is_unknown(make, clock):
    logger = make(progress=Progress(step=10, images_seen=80, elapsed_s=60.0), peak_flops=None)
    train(logger, clock, 10)
    record = logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
    assert record["images_seen"] == 160 and record["elapsed_s"] == pytest.approx(65)
    assert record["images_per_second"] == pytest.approx(16)
    assert record["mfu"] is None and record["tflops_per_device"] > 0


def test_sampling_and_checkpoints_are_not_in_the_throughput_but_on_their_own(make, clock):
    logger = make()
    train(logger, clock, 5)
    for seconds in (7.0, 2.0):
        with logger.timer.excluded("sampling"):
            clock.now += seconds
    with logger.timer.excluded("checkpoint"):
        clock.now += 3.0
    train(logger, clock, 5)
    record = logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
    assert record["sampling_s"] == pytest.approx(9) and record["checkpoint_s"] == pytest.approx(3)
    assert record["step_time_s"] == pytest.approx(0.5) and record["images_per_second"] == pytest.approx(16)
    assert record["elapsed_s"] == pytest.approx(17)
    train(logger, clock, 1)
    assert "sampling_s" not in logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)


def test_data_loading_is_a_share_of_training_time(clock):
    timer = StepTimer(CPU, clock)
    with timer.data_loading():
        clock.now += 1.0
    clock.now += 3.0
    with timer.excluded("validation"):
        clock.now += 10.0
        with timer.data_loading():
            clock.now += 10.0
    assert timer.read(steps=1, images=8)["data_loading_percent"] == pytest.approx(25)


@pytest.mark.gpu
def test_gpu_peak_memory_is_of_training_and_of_the_window():
    device = torch.device("cuda")
    timer = StepTimer(device)
    timer.memory.read()
    torch.empty(2**28, dtype=torch.uint8, device=device)
    with timer.excluded("sampling"):
        torch.empty(2**30, dtype=torch.uint8, device=device)
    peaks = timer.memory.read()
    assert peaks["peak_memory_gib"] == pytest.approx(0.25, abs=0.1)
    assert peaks["peak_reserved_gib"] >= peaks["peak_memory_gib"]
    legacy = {f"max_{kind}({unit})" for kind in ("active", "reserved") for unit in ("GiB", "%")}
    assert timer.memory.allocator.keys() == legacy | {"num_alloc_retries", "num_ooms"}
    assert timer.memory.read()["peak_memory_gib"] < 0.1


def test_other_ranks_count_and_are_silent(tmp_path, make, clock, capsys):
    directory = RunDirectory(tmp_path / "other", is_writer=False)
    stream = io.StringIO()
    logger = make(Metrics(enable_tensorboard=True), directory=directory, stream=stream)
    train(logger, clock, 1)
    assert logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)["images_seen"] == 8
    logger.message("hello")
    logger.log_image("samples", tmp_path / "grid.png", 1)
    assert stream.getvalue() == "" and capsys.readouterr() == ("", "")
    assert not directory.path.exists()


def test_a_log_file_gets_plain_lines_and_its_eta_forgets_the_slow_first_step(make, clock):
    stream = io.StringIO()
    logger = make(stream=stream)
    train(logger, clock, 1, seconds=100.0)
    train(logger, clock, 9, seconds=1.0)
    logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
    with logger.timer.excluded("validation"):
        pass
    logger.add_figures(10, "validation", {"validation_loss": 0.25})
    logger.message("wrote a grid")
    logger.close()
    end, line, validation, message = stream.getvalue().splitlines()
    assert end.startswith("about 0:01:30 left: ")
    assert line.startswith("step  10/100  loss 0.5000  grad 1.500  lr 1.0e-04") and line.endswith("ETA 0:01:30")
    assert validation == "step  10/100  val 0.2500  ETA 0:01:30"
    assert message == "wrote a grid"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


@pytest.mark.parametrize(
    ("columns", "enabled", "no_color"), [(None, True, ""), (60, False, ""), (60, True, "1"), (60, True, "")]
)
def test_a_line_fits_the_terminal_or_100_columns_and_is_coloured_where_wanted(
    make, clock, monkeypatch, columns, enabled, no_color
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal() if columns else io.StringIO()
    logger = make(Metrics(enable_color_printing=enabled), stream=stream)
    train(logger, clock, 10)
    logger.log(loss=0.5, grad_norm=1.5, lr=1e-4, extra={"encoding_percent": 12.5})
    logger.close()
    text = stream.getvalue()
    assert ("\x1b[32mloss" in text) == bool(columns and enabled and not no_color)
    plain = re.sub(r"\x1b\[\d+m", "", text)
    (line,) = (line for line in screen(plain) if line.startswith("step "))
    assert len(line) <= (columns or 100)
    for kept in ("step  10/100", "loss 0.5000", "ETA 0:00:45"):
        assert kept in line
    assert "encoding 12.5%" not in line, "what is least important goes first"


def screen(text: str) -> list[str]:
    """What a terminal shows of `text`: each line after its last erasure."""
    return [line.rsplit("\r\x1b[2K", 1)[-1] for line in text.split("\n")]


def test_the_bar_never_mixes_with_lines(make, clock, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    logger = make(Metrics(enable_color_printing=False), stream=stream)
    train(logger, clock, 10)
    logger.message("wrote a grid")
    train(logger, clock, 10)
    logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
    end, message, line, bar = screen(stream.getvalue())
    assert end.startswith("about 0:00:45 left: ") and message == "wrote a grid"
    assert line.startswith("step  20/100")
    assert bar == " 20% [##........] step 20/100  ETA 0:00:40"
    train(logger, clock, 1)
    bar = screen(stream.getvalue())[-1]
    assert bar == " 21% [##........] step 21/100  loss 0.5000  16 images/s  ETA 0:00:40"
    logger.close()
    assert screen(stream.getvalue())[-1] == ""


def test_the_bar_never_wraps_and_is_drawn_a_few_times_a_second(make, clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    train(make(stream=stream), clock, 50, seconds=0.01)
    drawn = [text.rpartition("\n")[2] for text in stream.getvalue().split("\r\x1b[2K")]
    assert 4 <= len(drawn) <= 6 and max(map(len, drawn)) == 19


def test_a_full_disk_ends_tensorboard_and_not_the_run(make, run, clock, tmp_path):
    pytest.importorskip("tensorboard")
    stream = io.StringIO()
    logger = make(Metrics(enable_tensorboard=True), stream=stream)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        train(logger, clock, 1)
        logger.log(loss=float(step), grad_norm=1.5, lr=1e-4)
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
            try:
                logger.flush()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.close()
    assert stream.getvalue().count("warning: TensorBoard cannot write (File too large); metrics.jsonl continues") == 1
    assert [record["step"] for record in read_metrics(run.path)] == [1, 2, 3]


def test_tensorboard_gets_numbers_and_images_and_a_resume_hides_what_comes_again(
    make, run, clock, tmp_path, monkeypatch
):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = import_module("tensorboard.summary.writer.event_file_writer")
    # Files of one second are read in the order of this counter, as text: "10" would come before "9".
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(1))
    config = Metrics(enable_tensorboard=True, save_tb_folder="NAME")
    picture = tmp_path / "grid.png"
    Image.new("RGB", (4, 4), (255, 0, 0)).save(picture)
    logger = make(config)
    for step in (1, 2, 3):
        train(logger, clock, 1)
        logger.log(loss=float(step), grad_norm=1.5, lr=1e-4)
    logger.log_image("samples", picture, 2)
    logger.close()
    resumed = make(config, progress=Progress(step=2))
    train(resumed, clock, 1)
    resumed.log(loss=30.0, grad_norm=1.5, lr=1e-4)
    resumed.close()
    events = accumulator.EventAccumulator(str(run.path / "NAME"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert {"images_per_second", "mfu", "elapsed_s"} <= set(events.Tags()["scalars"])
    assert set(events.Tags()["images"]) == {"samples"}
    anew = make(config)  # killed before it had a checkpoint
    train(anew, clock, 1)
    anew.log(loss=10.0, grad_norm=1.5, lr=1e-4)
    anew.close()
    events = accumulator.EventAccumulator(str(run.path / "NAME")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 10.0)]


def test_legacy_tags_are_the_course_projects_with_their_values(make, run, clock):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = make(Metrics(enable_tensorboard=True, legacy_tags=True))
    with logger.timer.data_loading():
        clock.now += 0.5
    train(logger, clock, 2, images=8, seconds=0.75)
    (record,) = [logger.log(loss=0.5, grad_norm=1.5, lr=1e-4, max_loss=0.75)]
    logger.close()
    events = accumulator.EventAccumulator(str(run.path / "tensorboard")).Reload()
    values = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    legacy = {
        "loss_metrics/global_avg_loss": 0.5,
        "loss_metrics/global_max_loss": 0.75,
        "wps": 8 * 256 / 2,  # 16 images in 2 s, of 256 patches, on 2 devices
        "im/s": 8.0,
        "mfu(%)": 8.0,  # 8 images/s x 2 TFLOP on 2 devices of 100 TFLOP/s
        "it/s": 1.0,
        "num_flop_per_token": 2e12 / 256,
        "time_metrics/end_to_end(s)": 1.0,
        "time_metrics/data_loading(s)": 0.25,
        "time_metrics/data_loading(%)": 25.0,
        "memory/max_active(GiB)": record["peak_memory_gib"],
        "memory/max_active(%)": record["peak_memory_percent"],
    }
    assert {tag: values[tag] for tag in legacy} == pytest.approx(legacy)
    absent = {f"memory/{name}" for name in ("max_reserved(GiB)", "max_reserved(%)", "num_alloc_retries", "num_ooms")}
    assert not absent & set(values), "a CPU has no allocator to ask"
    assert "im/s" not in read_metrics(run.path)[0], "metrics.jsonl stays as it is"
    assert values["mfu(%)"] == pytest.approx(100 * values["num_flop_per_token"] * values["wps"] / 100e12)


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^metrics\.enable_{package} = true: needs .*: pip install {package}$"):
        check_trackers(Metrics(**{f"enable_{package}": True}))


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A stand-in that keeps what it was told."""
    module = types.ModuleType("wandb")
    calls = types.SimpleNamespace(init=None, log=[], finished=False)
    run = types.SimpleNamespace(
        log=calls.log.append, define_metric=lambda *_, **__: None, finish=lambda: setattr(calls, "finished", True)
    )

    def init(**options):
        calls.init = options
        return run

    module.init = init
    module.Settings = dict
    module.Image = lambda pixels: pixels.shape
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize("mode", ["offline", None])
def test_wandb_is_offline_without_a_login_and_gets_numbers_and_images(make, run, clock, wandb, tmp_path, mode):
    if mode is None:  # left to itself
        (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
        (tmp_path / ".netrc").chmod(0o600)
    logger = make(Metrics(enable_wandb=True), peak_flops=None)
    train(logger, clock, 1)
    logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
    picture = run.path / "grid.png"
    Image.new("RGB", (6, 4)).save(picture)
    logger.log_image("samples", picture, 1)
    logger.close()
    assert wandb.init["mode"] == mode
    assert wandb.init["id"] == read_config(run.path)["run_id"]
    assert wandb.init["config"] == {"training": {"seed": 0}}
    numbers, image = wandb.log
    assert numbers["step"] == 1 and numbers["loss"] == 0.5 and "mfu" not in numbers
    assert image == {"samples": (4, 6, 3), "step": 1}
    assert wandb.finished


def test_trackio_gets_numbers_and_images_and_a_resume_continues_them(make, run, clock, monkeypatch):
    class Run(list):
        def log(self, numbers, *, step):
            self.append((step, numbers))

    opened = []
    module = types.ModuleType("trackio")
    module.Image = lambda pixels: pixels.shape
    module.init = lambda **options: opened.append((options, Run())) or opened[-1][1]
    module.finish = lambda: opened[-1][1].append("finished")
    monkeypatch.setitem(sys.modules, "trackio", module)
    picture = run.path / "grid.png"
    Image.new("RGB", (6, 4)).save(picture)
    for progress in (Progress(), Progress(step=1)):
        logger = make(Metrics(enable_trackio=True), progress=progress, peak_flops=None)
        train(logger, clock, 1)
        logger.log(loss=0.5, grad_norm=1.5, lr=1e-4)
        logger.log_image("samples", picture, progress.step)
        logger.close()
    (first, numbers), (second, further) = opened
    assert first == second and first["resume"] == "allow"
    assert first["name"] == f"{run.path.name}-{read_config(run.path)['run_id']}"
    assert first["config"] == {"training": {"seed": 0}}
    assert [record[0] for record in numbers[:2] + further[:2]] == [1, 1, 2, 2]
    assert numbers[0][1]["loss"] == 0.5 and "mfu" not in numbers[0][1]
    assert numbers[1:] == [(1, {"samples": (4, 6, 3)}), "finished"]
