"""`benchmarks.gpu`: no stage loses what another found, and every stage runs without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.gpu import ROOT
from benchmarks.gpu import __main__ as script
from benchmarks.gpu.__main__ import LEFT, OTHER, PER_COMMAND, main
from benchmarks.gpu.figures import GOALS, SAMPLER, STEP_OVERHEAD
from benchmarks.gpu.models import SHAPES, config_of
from benchmarks.gpu.run import Run
from benchmarks.gpu.runner import DONE, FAILED, OVER, Course
from benchmarks.gpu.stages import STAGES, Stage

FOUND = "import json, sys; json.dump({sys.argv[2]: float(sys.argv[3])}, open(sys.argv[1], 'w'));"


@dataclass(frozen=True)
class Script(Stage):
    """A stage that finds one figure, and then does something else."""

    figure: str = "seconds"
    value: float = 1
    then: str = ""

    def command(self, figures, models, *, smoke):
        return [sys.executable, "-c", FOUND + self.then, str(figures), self.figure, str(self.value)]


GOOD = Script("good", "", 20, SAMPLER, 90)
SLOW = Script("slow", "", 1, STEP_OVERHEAD, 130, "import time; time.sleep(60)")
BAD = Script("bad", "", 20, "a figure", 7, "raise ValueError('of no use')")
HUGE = Script("huge", "", 500)
SLEEPY = Script("sleepy", "", 60, then="import time; time.sleep(0.5)")


def status_of(course):
    return {stage.name: record and record["status"] for stage in course.stages for record in [course.record(stage)]}


def test_a_stage_that_fails_or_takes_too_long_keeps_its_figures_and_the_next_one_runs(tmp_path):
    course = Course((SLOW, BAD, GOOD), tmp_path / "out", tmp_path)
    assert course.run(100) == []
    assert status_of(course) == {"slow": OVER, "bad": FAILED, "good": DONE}
    records = [json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("slow", "bad", "good")]
    assert [record["figures"] for record in records] == [{STEP_OVERHEAD: 130}, {"a figure": 7}, {SAMPLER: 90}]
    assert records[0]["seconds"] < 20
    assert records[1]["because"] == "ValueError: of no use"
    assert "of no use" in (tmp_path / "out" / "bad.log").read_text()
    page = (tmp_path / "out" / "page.md").read_text()
    for line in (
        f"| {STEP_OVERHEAD} | at most 100 us | 130.0 | no |",
        f"| {SAMPLER} | at most 110 us | 90.0 | yes |",
        "| bad | failed: ValueError: of no use |",
        "* a figure: 7.0",
    ):
        assert line in page
    assert page.count("not measured") == len(GOALS) - 2


def test_the_next_command_goes_on_where_the_last_one_ended(tmp_path):
    course = Course((GOOD, HUGE, BAD), tmp_path, tmp_path)
    assert course.run(60) == [HUGE]
    assert status_of(course) == {"good": DONE, "huge": None, "bad": FAILED}
    written = (tmp_path / "good.json").stat().st_mtime_ns
    assert course.run(60) == [HUGE]
    assert course.run(600) == []
    assert (tmp_path / "good.json").stat().st_mtime_ns == written
    assert course.run(60, only=["good"]) == []
    assert (tmp_path / "good.json").stat().st_mtime_ns > written


def test_a_stage_that_was_interrupted_with_its_command_runs_again(tmp_path):
    (tmp_path / "good.figures.json").write_text("{")
    (tmp_path / "good.json.new").write_text("{")
    course = Course((GOOD,), tmp_path, tmp_path)
    assert course.run(60) == []
    assert course.record(GOOD)["figures"] == {SAMPLER: 90}


@pytest.mark.parametrize("smoke", [False, True])
def test_a_rehearsal_and_a_measurement_never_share_a_folder(tmp_path, smoke):
    Course((GOOD,), tmp_path, tmp_path, smoke=smoke).run(200)
    assert ("no figure means anything" in (tmp_path / "page.md").read_text()) == smoke
    written = {each: each.read_bytes() for each in tmp_path.iterdir()}
    found, expected = ("a rehearsal", "a measurement") if smoke else ("a measurement", "a rehearsal")
    with pytest.raises(SystemExit, match=f"good.json is of {found}: {expected} needs another --output"):
        Course((BAD, GOOD), tmp_path, tmp_path, smoke=not smoke).run(200, only=["bad"])
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == written


def test_the_stages_fit_into_five_commands_of_ten_minutes_and_45_minutes():
    limits = [stage.limit for stage in STAGES]
    assert sum(limits) <= 45 * 60
    assert PER_COMMAND <= 600 - 20
    commands, left = 1, PER_COMMAND
    for limit in limits:
        if limit > left:
            commands, left = commands + 1, PER_COMMAND
        left -= limit
        assert left >= 0
    assert commands <= 5


def test_an_unknown_stage_is_refused_with_the_known_ones(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path), "--only", "lunch"])
    assert "no stage lunch; there are machine, kernel_tests" in capsys.readouterr().err


def test_without_a_gpu_the_real_run_is_refused_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--smoke runs tiny models on a CPU"):
        Run.make(tmp_path / "figures.json", tmp_path, 60, smoke=False)


def test_the_small_model_drafts_at_every_length_that_the_large_one_is_run_with():
    assert config_of(SHAPES["1B"], torch.bfloat16).max_position_embeddings >= SHAPES["8B"].max_model_len


def test_a_command_that_leaves_stages_says_which_command_runs_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "STAGES", (SLEEPY, replace(SLEEPY, name="second"), HUGE))

    def ended(*arguments):
        return main(["--output", str(tmp_path), *arguments]), capsys.readouterr().out.splitlines()[-1]

    again = "run the same command again"
    assert ended("--seconds", "60.4") == (LEFT, f"left: second, huge; {again} with --seconds 500")
    assert ended("--seconds", "60.4") == (OTHER, f"left: huge; {again} with --seconds 500")
    only = ("--only", "sleepy", "second")
    assert ended("--seconds", "60.4", *only) == (OTHER, f"left: second; {again} with --only second")
    assert ended("--seconds", "59", *only) == (
        OTHER,
        f"left: sleepy, second; {again} with --only sleepy second --seconds 60",
    )


def test_a_command_that_is_terminated_ends_its_stage(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path), "--smoke", "--only", "machine"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        stages = []
        while not any(each.cpu_times().user > 0.1 for each in stages) and process.poll() is None:
            time.sleep(0.01)
            stages = psutil.Process(process.pid).children()
        process.terminate()
    _, running = psutil.wait_procs(stages, timeout=0.5)
    for each in running:
        each.kill()
    assert (len(stages), running, process.returncode) == (1, [], 143)


@pytest.mark.full
def test_the_first_stage_runs_on_a_cpu(tmp_path, capsys):
    smoke = ["--output", str(tmp_path), "--models", str(tmp_path / "models"), "--smoke"]
    assert main([*smoke, "--only", "machine"]) == 0
    figures = json.loads((tmp_path / "machine.json").read_text())["figures"]
    assert figures["torch"] == torch.__version__
    assert all(figures[name] > 0 for name in figures if name.endswith(("us", "GB/s")))
    assert "| machine | done |" in capsys.readouterr().out


@pytest.mark.full
def test_every_stage_runs_on_a_cpu(tmp_path):
    smoke = ["--output", str(tmp_path), "--models", str(tmp_path / "models"), "--smoke"]
    assert main(smoke) == 0
    records = [json.loads((tmp_path / f"{stage.name}.json").read_text()) for stage in STAGES]
    assert [record["status"] for record in records] == [DONE] * len(STAGES)
    found = {name: value for record in records for name, value in record["figures"].items()}
    assert set(GOALS) <= set(found)
    assert found["draft model, greedy, 3 tokens: acceptance length"] > 2, "each token is followed by its successor"
    assert Path(tmp_path / "page.md").read_text().count("not measured") == 0
