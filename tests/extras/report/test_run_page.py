# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan report RUN`: content of the page, its slider in a browser, hostile names, and runs that went wrong."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cards import card
from headless_browser import CHROMIUM, open_browser
from PIL import Image
from refusals import assert_refused

from torchditan.extras.evaluation.card import ImageSet, write_card
from torchditan.sampling.grid_picture import save_grid

if TYPE_CHECKING:
    from tests.conftest import RunScript
    from tests.zoo import Zoo

SECTIONS = [
    "Summary",
    "Loss",
    "Samples over time",
    "Validation loss by timestep",
    "Gradient norm and learning rate",
    "Throughput and memory",
    "Configuration",
]
NEEDS_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")


@pytest.fixture
def runs(zoo: Zoo, tmp_path: Path) -> Path:
    """A folder with the runs `one` and `two`, which differ in the learning rate. Samples at steps 2, 4 and 6."""
    for name in ("one", "two"):
        shutil.copytree(zoo("digits"), tmp_path / "runs" / name)

    def double(content: dict[str, Any]) -> None:
        content["config"]["optimizer"]["lr"] = content["trajectory"]["optimizer.lr"] = 2e-3

    change_config(tmp_path / "runs" / "two", double)
    return tmp_path / "runs"


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def change_config(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((run / "config.json").read_text())
    change(content)
    (run / "config.json").write_text(json.dumps(content))


def page_of(run_script: RunScript, *arguments: object) -> str:
    code, out, err = run_script("torchditan", "report", *arguments)
    assert (code, err) == (0, ""), err
    return Path(out.removeprefix("report: ").removesuffix("\n")).read_text(encoding="utf-8")


def test_a_run_has_one_page_in_its_folder(runs: Path, run_script: RunScript) -> None:
    before = set((runs / "one").rglob("*"))
    code, out, err = run_script("torchditan", "report", runs / "one")
    assert (code, out, err) == (0, f"report: {runs}/one/report.html\n", "")
    assert set((runs / "one").rglob("*")) - before == {runs / "one" / "report.html"}, "no file is next to it"
    page = (runs / "one" / "report.html").read_text()
    assert headings(page) == SECTIONS
    records = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    assert f">{records[-1]['loss']:.4g}<" in page
    assert f">{records[-1]['validation_loss']:.4g}<" in page
    assert ">48<" in page, "images seen"
    assert page.count("data:image/png;base64,") == 3 + 1, "and the strip"
    assert [word for word in ("completed", "debugmodel", "float32") if word not in page] == []
    changed = page[page.index("Differs from the default") : page.index("<details>", page.index("Differs from"))]
    assert ">optimizer.lr<" in changed and ">optimizer.beta1<" not in changed
    assert ">optimizer.beta1<" in page


@pytest.mark.usefixtures("undrawn")
def test_the_same_samples_of_all_grids_are_a_strip_and_a_gif(runs: Path, run_script: RunScript) -> None:
    """The strip has the first sample of each row. Grids of other rows, here those of the training, are left out."""

    def shade(step: int, row: int, column: int) -> int:
        return 2 * step + 60 * row + 30 * column

    for step in (10, 20, 30):
        shades = torch.tensor([[shade(step, row, column) for column in range(2)] for row in range(2)])
        samples = (shades / 127.5 - 1)[:, :, None, None, None].expand(2, 2, 3, 8, 8)
        save_grid(runs / f"one/samples/step_{step:08d}.png", samples, None, ["zero", "one"], title="run")
    page = page_of(run_script, runs / "one")
    *_, strip, animation = (
        Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"data:image/\w+;base64,([^\"]*)", page)
    )

    def contains(picture: Image.Image, value: int) -> bool:
        near = np.abs(np.asarray(picture.convert("RGB")).astype(int) - value).max(axis=-1) < 4  # a GIF has 256 colours
        return bool(near.sum() >= 64 * 64)

    cells = [(row, column) for row in range(2) for column in range(2)]
    assert [contains(strip, shade(30, *cell)) for cell in cells] == [True, False, True, False]
    assert all(contains(strip, shade(step, 0, 0)) for step in (10, 20, 30))
    assert (strip.format, animation.format, animation.n_frames) == ("PNG", "GIF", 3)
    animation.seek(1)
    assert all(contains(animation, shade(20, *cell)) for cell in cells)


@pytest.mark.usefixtures("undrawn")
def test_the_newest_evaluation_is_shown(runs: Path, run_script: RunScript) -> None:
    """By the time in the card, whatever its folder is called."""
    for name, day, steps in (("a", "23", 17), ("b", "25", 31), ("c", "24", 19)):
        one = card(
            created=f"2026-11-{day}T09:00:00+00:00", step=4, num_samples=1000 + steps, sampling={"num_steps": steps}
        )
        write_card(runs / "one/evaluation" / name, one)
    (runs / "one/evaluation/b/card.json").rename(runs / "one/evaluation/card.json")  # wherever it lies
    write_card(runs / "one/evaluation/file", card(created="2999", images=ImageSet("file", "x.npz"), num_samples=1234))
    (runs / "one/evaluation/damaged").mkdir()
    (runs / "one/evaluation/damaged/card.json").write_text("{")
    page = page_of(run_script, runs / "one", runs / "two")
    assert ">3 x 1,031<" in page and ">31<" in page and ">12.3 (11.9 to 12.8)<" in page
    assert not any(absent in page for absent in ("1,017", "1,019", "1,234"))


def test_several_runs_are_side_by_side_with_what_differs(runs: Path, run_script: RunScript) -> None:
    page = page_of(run_script, runs / "one", runs / "two", "--labels", "slow", "fast")
    assert (runs / "report.html").exists()
    assert headings(page) == [SECTIONS[0], "What differs", "Loss and time", *SECTIONS[2:]]
    section = page[page.index('id="what-differs"') : page.index('id="loss-and-time"')]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)]
    assert [row for row in rows if row] == [["optimizer.lr", "training", "0.001", "0.002"]]
    assert page.count("data:image/png;base64,") == 6 + 2
    assert re.findall(r"<figcaption>(slow|fast)<", page) == ["slow", "fast"]


@pytest.mark.usefixtures("undrawn")
def test_out_is_a_file_or_a_folder(runs: Path, run_script: RunScript) -> None:
    for out, written in (("page.html", "page.html"), ("folder", "folder/report.html")):
        assert run_script("torchditan", "report", runs / "one", "--out", runs / out).code == 0
        assert (runs / written).is_file()
    (runs / "file").touch()
    code, out, err = run_script("torchditan", "report", runs / "one", "--out", runs / "file" / "page.html")
    assert (code, out) == (2, "")
    assert_refused(err, f'--out = "{runs}/file/page.html"', ["writable"])


@pytest.mark.usefixtures("undrawn")
def test_names_and_values_are_escaped(runs: Path, run_script: RunScript) -> None:
    attack = "<script>alert('&')</script><img src=x onerror=alert(1)>"
    run = (runs / "one").rename(runs / "<img src=x onerror=alert(2)>")

    def plant(content: dict[str, Any]) -> None:
        content["class_names"] = [attack]
        content["git_commit"] = content["versions"]["torch"] = content["hardware"]["cpu"] = attack
        content["config"]["job"]["description"] = content["config"]["metrics"]["experiment_name"] = attack
        content["config"]["sampling"]["prompts"] = [attack]
        content["config"]["model"][attack] = 1

    change_config(run, plant)
    (run / "status.json").write_text(json.dumps({"state": "error", "reason": attack}))
    for page in (page_of(run_script, run), page_of(run_script, run, runs / "two", "--labels", attack, "$x$")):
        assert page.count("&lt;script&gt;alert") >= 6
        assert page.count("<script>") == 1, "that of the slider"
        assert "<img src=x" not in page


def test_the_page_asks_for_nothing(runs: Path, run_script: RunScript) -> None:
    page = page_of(run_script, runs / "one", runs / "two")
    loaded = re.findall(
        r"""<(?:script|link|img|image|iframe|object|use)\b[^>]*?\s(?:src|(?:xlink:)?href)="([^"]*)""", page
    )
    assert {address.partition(";")[0].partition("#")[0] for address in loaded} <= {
        "data:image/png",
        "data:image/gif",
        "",
    }
    assert not re.search(r"@import|url\((?!#)", page)
    assert "default-src 'none'" in page


@NEEDS_BROWSER
def test_the_slider_changes_the_pictures_of_all_runs(runs: Path, run_script: RunScript) -> None:
    page_of(run_script, runs / "one", runs / "two", "--out", runs / "page.html")
    shown = """[...document.querySelectorAll('.slider figure')].map(figure => {
        const seen = [...figure.querySelectorAll('[data-step]')].filter(item => item.offsetHeight > 0);
        return seen.map(item => [item.dataset.step, item.naturalWidth > 0, item.src.length]).join(';');
    })"""
    with open_browser() as browser:
        browser.open((runs / "page.html").as_uri())
        last = browser.evaluate(shown)
        assert [entry.split(",")[:2] for entry in last] == [["6", "true"]] * 2
        browser.evaluate("document.querySelector('.slider input').focus()")
        browser.press("ArrowLeft", 37)
        before = browser.evaluate(shown)
        assert [entry.split(",")[:2] for entry in before] == [["4", "true"]] * 2
        assert browser.evaluate("document.querySelector('.slider output').textContent") == "4"
        browser.press("ArrowRight", 39)
        assert browser.evaluate(shown) == last
        pictures = "[...document.images].map(picture => picture.src)"
        assert len(set(browser.evaluate(pictures))) == 5, "three steps, a strip and a GIF; both runs drew the same"
        browser.resize(390, 800)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert [url for url in browser.requests if not url.startswith("data:")] == [(runs / "page.html").as_uri()]
        assert browser.complaints == []


def write_metrics(run: Path, lines: list[Any]) -> None:
    (run / "metrics.jsonl").write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )


@pytest.mark.usefixtures("undrawn")
def test_damaged_files_are_named_and_left_out(runs: Path, run_script: RunScript) -> None:
    run = runs / "one"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["loss"] = None
    lines[2]["loss"] = "text"
    odd = {"step": 5, "loss": 10**400, "grad_norm": 1e308, "lr": [], "images_per_second": -1e308, "mfu": True}
    write_metrics(run, [*lines[:4], "{", "[]", '{"step": "6"}', "[" * 100_000, odd, lines[5] | {"loss": 7.0}, lines[5]])
    (run / "status.json").write_text("{")
    nowhere, damaged = (run / "samples" / f"step_0000000{step}.png" for step in (2, 4))
    nowhere.unlink()
    nowhere.symlink_to("nowhere.png")
    damaged.write_bytes(b"no picture")
    (run / "samples" / "step_x.png").write_bytes(b"no step")
    change_config(run, lambda content: content["config"]["job"].update(description="half \ud800 of a pair"))
    page = page_of(run_script, run)
    assert headings(page) == SECTIONS
    assert "one: the status is unknown." in page
    assert "one: the loss is not finite at 3 of 6 logged steps, first at step 2." in page
    assert page.count("The picture of this step cannot be read.") == 2
    assert "half ? of a pair" in page
    assert f">{lines[5]['loss']:.4g}<" in page, "of two lines of one step, the later one"
    assert not re.search(r">(nan|None|inf)<", page)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("lines", [None, [{"step": 3, "loss": None, "lr": 0.0}]])
def test_a_run_without_data_has_a_page(runs: Path, run_script: RunScript, lines: list[Any] | None) -> None:
    run = runs / "one"
    (run / "status.json").write_text(json.dumps({"state": "interrupted", "reason": "SIGTERM"}))
    if lines is None:  # a run that starts
        (run / "metrics.jsonl").unlink()
        (run / "status.json").unlink()
    else:
        write_metrics(run, lines)
    shutil.rmtree(run / "samples")
    page = page_of(run_script, run)
    assert {"Summary", "Configuration"} <= set(headings(page))
    assert not {"Loss", "Samples over time", "Validation loss by timestep"} & set(headings(page))
    assert ("one: the status is interrupted: SIGTERM." in page) == (lines is not None)
    assert ("metrics.jsonl has no logged step" in page) == (lines is None)


@pytest.mark.usefixtures("undrawn")
def test_a_page_of_many_large_pictures_stays_below_ten_megabytes(runs: Path, run_script: RunScript) -> None:
    noise = Image.effect_noise((700, 700), 90).convert("RGB")
    noise.save(runs / "noise.png")
    for step in range(100, 160):
        (runs / "one" / "samples" / f"step_{step:08d}.png").hardlink_to(runs / "noise.png")
    page = page_of(run_script, runs / "one")
    assert len(page) < 10_000_000
    assert "The page has 40 of 63 steps" in page
    steps = re.findall(r'<img [^>]*data-step="(\d+)"', page)
    assert (len(steps), steps[0], steps[-1]) == (40, "2", "159")


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        (["one", "{runs}"], "{runs}", ["run directory", "{runs}/one"]),
        (["one", "onee"], "{runs}/onee", ["exist", "{runs}/one?"]),
        (["onee"], "{runs}/onee", ["run directory", "grid folder", "{runs}/one?"]),
        (["one", "--metrics", "FID"], '--metrics = "FID"', ["grids"]),
    ],
)
def test_wrong_arguments_are_one_line(
    runs: Path, run_script: RunScript, arguments: list[str], about: str, mentions: list[str]
) -> None:
    given = [
        argument.format(runs=runs) if argument.startswith(("-", "{", "F")) else runs / argument
        for argument in arguments
    ]
    code, out, err = run_script("torchditan", "report", *given)
    assert (code, out) == (2, "")
    assert_refused(err, about.format(runs=runs), [mention.format(runs=runs) for mention in mentions])
    assert not list(runs.rglob("report.html"))


def test_a_folder_that_is_no_run_is_one_line(runs: Path, run_script: RunScript) -> None:
    for content, mentions in (("{", ["parse"]), ('{"model_type": "dit"}', ["run"])):
        (runs / "one" / "config.json").write_text(content)
        code, out, err = run_script("torchditan", "report", runs / "one")
        assert (code, out) == (2, "")
        assert_refused(err, f"{runs}/one/config.json", mentions)
