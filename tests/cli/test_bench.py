"""`specdec bench` on the packaged model, mostly in this process through typer's runner."""

import json
import re
import subprocess
import sys

import pytest
from inside import host_of, info_of
from typer.testing import CliRunner

from specdec.cli._app import build_app
from specdec.core.engine.engine import Engine
from specdec.lab import run as run_module
from specdec.lab.earlier import EarlierRun
from specdec.lab.prompts import BenchPrompt
from specdec.sdk import ConfigError

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
SMALL = ("--num-prompts", 3, "--output-len", 12, "--repeat", 1, "--warmup", 0)


def invoke(*arguments, **options):
    return CliRunner().invoke(build_app(), ["bench", "tiny", *map(str, arguments)], **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small run in a process of its own, printed as JSON and saved: the finished process and the file."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    flags = ("--num-prompts", 3, "--output-len", 24, "--repeat", 2, "--profile", "--json", "--save-result", path)
    command = [sys.executable, "-m", "specdec", "bench", "tiny", "-sc", NGRAM, *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300), path


@pytest.fixture(scope="module")
def run(saved):
    return json.loads(saved[0].stdout)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A saved plain run: a baseline for later ones."""
    path = tmp_path_factory.mktemp("bench") / "plain.json"
    assert invoke(*SMALL, "--save-result", path, "--format", "quiet").exit_code == 0
    return path


def test_result_has_every_promised_key(run):
    promised = """schema_version speedup speedup_interval outputs_equal num_prompts mean_acceptance_length
        tokens_per_target_step draft_acceptance_rate acceptance_per_position conditional_acceptance_per_position
        drafted_per_position num_drafts num_draft_tokens num_accepted_tokens proposer_propose_calls tokens_per_second
        baseline_tokens_per_second by_category repeats environment configuration"""
    assert set(promised.split()) <= run.keys()
    environment = "python torch transformers cpu_model cores threads platform specdec"
    assert all(run["environment"][key] for key in environment.split())
    configuration = "model dtype device speculative_config prompts_sha256 output_len max_concurrency seed"
    assert set(configuration.split()) <= run["configuration"].keys()
    assert run["configuration"]["speculative_config"] == json.loads(NGRAM)


@pytest.mark.slow
def test_speedup_is_baseline_time_over_time(run):
    total = {key: sum(repeat[key] for repeat in run["repeats"]) for key in ("seconds", "baseline_seconds")}
    assert run["speedup"] == pytest.approx(total["baseline_seconds"] / total["seconds"])
    assert run["speedup"] == pytest.approx(run["tokens_per_second"] / run["baseline_tokens_per_second"])
    low, high = run["speedup_interval"]
    assert low < run["speedup"] < high
    for name, row in run["by_category"].items():
        seconds = [repeat["by_category"][name] for repeat in run["repeats"]]
        expected = sum(each["baseline_seconds"] for each in seconds) / sum(each["seconds"] for each in seconds)
        assert row["speedup"] == pytest.approx(expected)


def test_acceptance_counts_fit_together(run):
    assert run["num_prompts"] == 3
    assert run["proposer_propose_calls"] > 0
    assert run["num_output_tokens"] == 3 * 24
    assert 0 < run["num_accepted_tokens"] <= run["num_draft_tokens"] <= 3 * run["num_drafts"]
    assert run["mean_acceptance_length"] == pytest.approx(1 + run["num_accepted_tokens"] / run["num_drafts"])
    assert run["draft_acceptance_rate"] == pytest.approx(run["num_accepted_tokens"] / run["num_draft_tokens"])
    assert run["num_target_steps"] + run["num_accepted_tokens"] >= run["num_output_tokens"]
    assert sum(run["drafted_per_position"]) == run["num_draft_tokens"]
    per_position = run["acceptance_per_position"]
    assert per_position == sorted(per_position, reverse=True)
    assert sum(per_position) == pytest.approx(run["num_accepted_tokens"] / run["num_drafts"])
    assert all(a <= c for a, c in zip(per_position, run["conditional_acceptance_per_position"], strict=True))


def test_categories_add_up_to_the_total(run):
    rows = run["by_category"].values()
    assert set(run["by_category"]) == {"code", "prose", "repetition"}
    for key in ("num_prompts", "num_output_tokens", "num_drafts", "num_accepted_tokens", "seconds"):
        assert sum(row[key] for row in rows) == pytest.approx(run[key])


def test_outputs_equal_plain_decoding(run):
    assert run["outputs_equal"] is True
    assert run["num_outputs_equal"] == 3
    assert [len(request["output_token_ids"]) for request in run["requests"]] == [24] * 3


def test_profile_says_where_the_time_goes(run):
    assert {"forward", "verify", "propose", "other"} <= run["time_shares"].keys()
    assert sum(run["time_shares"].values()) == pytest.approx(1)


def test_a_process_of_its_own_prints_and_saves_the_result_without_noise_of_libraries(saved):
    done, path = saved
    assert done.returncode == 0
    assert done.stderr == ""
    assert path.read_text(encoding="utf-8") == done.stdout


@pytest.mark.parametrize("asked", [None, '{"num_speculative_tokens": 7}', '{"model": "tiny/dflash"}'])
def test_a_drafter_given_as_the_model_is_compared_with_plain_decoding_of_its_target(asked, monkeypatch):
    engines = []

    class Recorded(Engine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            engines.append(self)

    monkeypatch.setattr(run_module, "Engine", Recorded)
    named = () if asked is None else ("-sc", asked)
    result = CliRunner().invoke(build_app(), ["bench", "tiny/dflash", *named, *map(str, SMALL), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [host_of(engine) is None for engine in engines] == [False, True]
    assert info_of(engines[0]).model == info_of(engines[1]).model == found["configuration"]["model"]
    assert found["configuration"]["proposer"].startswith("specdec-sdk:dflash")
    assert found["configuration"]["speculative_config"]["num_speculative_tokens"] == 7
    assert (found["outputs_equal"], found["num_outputs_equal"]) == (True, 3)


def test_tables_show_the_result_without_colour_in_a_pipe():
    result = invoke("-sc", NGRAM, *SMALL, "--profile", env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for wanted in (
        r"Acceptance length \(drafted steps\) +\d\.\d\d",
        r"Tokens per target step \(all steps\) +\d\.\d\d +drafted in [\d.]+ % of steps",
        r"Draft acceptance rate +[\d.]+ %",
        r"Speedup vs no speculation +[\d.]+x +one repeat: no interval",
        r"drafted +\d+ +\d+",
        r"accepted, of drafts +\d\.\d\d",
        r"accepted, given the one before +\d\.\d\d",
        r"repetition +1 ",
        r"Time: .*forward \d+ %.*propose \d+ %",
        r"Outputs equal to plain decoding \(greedy\): 3/3",
    ):
        assert re.search(wanted, result.stdout), wanted
    assert "measuring: 6 requests" in result.stderr


def test_colour_is_used_on_a_terminal_only_without_no_color():
    small = ("--num-prompts", 1, "--output-len", 2, "--repeat", 1, "-q")
    assert "\x1b[" in invoke(*small, env={"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm"}).stdout
    assert "\x1b[3" not in invoke(*small, env={"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}).stdout


def test_the_promise_of_the_same_text_stands_beside_the_comparison(run, saved):
    assert run["configuration"]["text_equality"]["level"] == "bits"
    assert "promised here: greedy text" in invoke("-sc", NGRAM, *SMALL).stdout.replace("\n", " ")


def test_without_a_proposer_only_plain_decoding_is_measured(plain):
    result = json.loads(plain.read_text())
    assert result["speedup"] is None
    assert result["outputs_equal"] is None
    assert result["num_drafts"] == 0
    assert result["tokens_per_target_step"] == 1
    assert result["tokens_per_second"] == pytest.approx(36 / result["seconds"])


def test_an_earlier_plain_run_serves_as_baseline(plain):
    result = invoke("-sc", NGRAM, *SMALL, "--baseline", plain, "--json")
    assert result.exit_code == 0, result.stderr
    run, earlier = json.loads(result.stdout), json.loads(plain.read_text())
    assert run["speedup"] == pytest.approx(earlier["seconds"] / run["seconds"])
    assert run["speedup_interval"] is None
    assert run["outputs_equal"] is True


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--output-len", 10), r"output_len +earlier 12, now 10"),
        (("--num-prompts", 2), r"prompts_sha256 +earlier"),
        (("--dtype", "bfloat16"), r"dtype +earlier 'float32', now 'bfloat16'"),
        (("-ec", '{"quantization": "int8_weight_only"}'), r"engine +earlier \{\}, now \{'quantization'"),
        (("--num-threads", 2), r"threads +earlier 1, now 2"),
    ],
    ids=["output_len", "prompts", "dtype", "engine", "threads"],
)
def test_a_baseline_of_an_unlike_run_is_refused(plain, flags, named):
    result = invoke("-sc", NGRAM, *SMALL, *flags, "--baseline", plain)
    assert result.exit_code == 2
    assert "SD-E167" in result.stderr
    assert re.search(named, result.stderr)


def test_a_speculative_run_is_refused_as_baseline(saved):
    flags = ("--num-prompts", 3, "--output-len", 24, "--repeat", 1)
    result = invoke(*flags, "--baseline", saved[1])
    assert result.exit_code == 2
    assert "a baseline is a run without -sc" in result.stderr


DRAWN = '{"model": "tiny/draft", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}'


def test_drawn_drafts_of_sampled_text_are_no_failure(tmp_path):
    """They follow the same distribution with other draws, so another text is what was promised."""
    flags = ("-sc", DRAWN, *SMALL, "--temperature", 1, "--report", tmp_path / "out.html")
    done = invoke(*flags, "--save-result", tmp_path / "out.json", "--format", "quiet")
    assert done.exit_code == 0
    assert json.loads((tmp_path / "out.json").read_text())["outputs_equal"] is False
    assert "outputs drawn anew" in done.stdout
    page = (tmp_path / "out.html").read_text()
    assert "drawn anew" in page
    assert "DIFFERENT" not in page


HOLLOW = {"schema_version": 1, "configuration": {}, "environment": {}, "repeats": [{}], "requests": []}


def changed(result, number):
    if number == "no repeat":
        result["repeats"] = []
    elif number == "no request":
        del result["requests"][0]
    elif number == "no token":
        result["requests"] = [each | {"output_token_ids": []} for each in result["requests"]]
    elif number == "no category":
        result["repeats"][0]["by_category"].popitem()
    else:
        next(iter(result["repeats"][0]["by_category"].values()))["seconds"] = number
    return result


LACKING = ["no repeat", "no request", "no category", "no token"]


@pytest.mark.parametrize("change", ["1.5", 0, -1.0, float("inf"), None, *LACKING])
def test_a_baseline_that_lacks_a_figure_is_refused(plain, change):
    result = json.loads(plain.read_text())
    prompts = [BenchPrompt(each["prompt_id"], each["category"], (), None) for each in result["requests"]]
    path = plain.with_name("changed.json")
    path.write_text(json.dumps(changed(result, change)))
    with pytest.raises(ConfigError, match="SD-E166"):
        EarlierRun(path).refuse_unlike(result["configuration"], result["environment"], prompts)
    EarlierRun(plain).refuse_unlike(result["configuration"], result["environment"], prompts)


@pytest.mark.parametrize("text", ["[]", "{", '{"schema_version": 1}', json.dumps(HOLLOW)])
def test_a_file_that_is_no_result_is_refused_as_baseline(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    result = invoke(*SMALL, "--baseline", path)
    assert result.exit_code == 2
    assert "SD-E166" in result.stderr


def test_different_greedy_outputs_end_with_exit_code_1_and_both_margins(plain, tmp_path):
    earlier = json.loads(plain.read_text())
    tokens = earlier["requests"][1]["output_token_ids"]
    right, tokens[4] = tokens[4], (tokens[4] + 1) % 4000
    path = tmp_path / "tampered.json"
    path.write_text(json.dumps(earlier))
    result = invoke("-sc", NGRAM, *SMALL, "--baseline", path, "--json")
    assert result.exit_code == 1
    run = json.loads(result.stdout)
    assert run["outputs_equal"] is False
    assert run["num_outputs_equal"] == 2
    (difference,) = run["differences"]
    assert (difference["prompt_id"], difference["position"]) == (earlier["requests"][1]["prompt_id"], 4)
    assert (difference["plain_token_id"], difference["found_token_id"]) == (tokens[4], right)
    assert difference["in_one_pass"]["token_ids"][0] == right
    assert difference["in_one_pass"]["margin"] > 0
    off = invoke("-sc", NGRAM, *SMALL, "--baseline", path, "--check-equal", "off", "--format", "quiet")
    assert off.exit_code == 0
    assert "not compared" in off.stdout


def test_sampled_outputs_are_equal_too_and_concurrency_is_named():
    flags = ("--temperature", 0.8, "--seed", 7, "--max-concurrency", 2, "--category", "code")
    result = invoke("-sc", NGRAM, *SMALL, *flags)
    assert result.exit_code == 0
    assert "Outputs equal to plain decoding (sampled, same seeds): 3/3" in result.stdout
    assert "concurrency 2, temperature 0.8, seed 7" in result.stdout


def test_baseline_off_measures_the_proposer_alone():
    run = json.loads(invoke("-sc", NGRAM, *SMALL, "--baseline", "off", "--json").stdout)
    assert run["speedup"] is None
    assert run["num_accepted_tokens"] > 0


def test_spec_bench_file_gives_every_turn_and_counts_what_is_too_long(tmp_path):
    path = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write a class Stack.", "Now a queue."]},
        {"question_id": 161, "category": "qa", "turns": ["import os\nimport os\nimport"], "reference": ["os"]},
        {"question_id": 162, "category": "qa", "turns": ["import os\n" * 60]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--dataset-name", "spec_bench", "--dataset-path", path, "--max-model-len", 64, *SMALL, "-q")
    result = invoke("-sc", NGRAM, *flags)
    assert result.exit_code == 0, result.stderr
    assert "spec_bench (3 prompts; 1 skipped: longer than max_model_len 64 - 12)" in result.stdout
    assert result.stderr == ""
    turns = json.loads(invoke(*flags, "--category", "writing", "--json").stdout)["requests"]
    assert [request["prompt_id"] for request in turns] == ["81", "81/2"]
    assert turns[1]["num_prompt_tokens"] > turns[0]["num_prompt_tokens"] + len(turns[0]["output_token_ids"])
    one = json.loads(invoke(*flags, "--category", "qa", "--json").stdout)
    assert (one["num_prompts"], one["num_prompts_skipped"]) == (1, 1)
    assert [request["prompt_id"] for request in one["requests"]] == ["161"]


@pytest.mark.parametrize(
    ("flags", "exit_code", "named"),
    [
        (("-sc", "{bad"), 2, "SD-E130"),
        (("-sc", '{"method": "nosuch", "num_speculative_tokens": 2}'), 3, 'no proposer "nosuch"'),
        (("--dataset-name", "spec_bench"), 2, "--dataset-path"),
        (("--category", "cod"), 2, "did you mean  code"),
        (("--output-len", 5000), 2, "no prompt of the dataset fits"),
        (("--save-result", "/nowhere/run.json"), 2, "--save-result"),
        (("--repeat", 0), 2, "--repeat"),
    ],
    ids=["bad JSON", "unknown method", "no path", "category", "too long", "unwritable", "no repeat"],
)
def test_errors_have_their_exit_code_and_name_what_is_wrong(flags, exit_code, named):
    result = invoke(*flags)
    assert result.exit_code == exit_code
    assert named in result.stderr
    assert result.stdout == ""


def test_figures_that_a_proposer_publishes_are_shown_and_kept():
    asked = '{"method": "token_recycling", "num_speculative_tokens": 3}'
    result = json.loads(invoke("-sc", asked, *SMALL, "--baseline", "off", "--json").stdout)
    own = result["proposer_figures"]
    assert result["configuration"]["proposer"].startswith("specdec-sdk:token_recycling")
    assert all(name.startswith("proposer_token_recycling_") for name in own)
    table = invoke("-sc", asked, *SMALL, "--baseline", "off").stdout
    assert ("The proposer's own figures: token_recycling_" in table) == any(own.values())
