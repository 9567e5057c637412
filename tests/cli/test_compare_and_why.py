"""`specdec compare`, `specdec why`, `generate --show why` and reports, mostly in this process."""

import json
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from specdec.cli._app import build_app
from specdec.cli._compare_view import _differences, one_line, show_comparison
from specdec.lab.report.content import content_of

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
SUFFIX = '{"method": "suffix", "num_speculative_tokens": 3}'
SMALL = ("--num-prompts", 3, "--output-len", 12)
QUICK = (*SMALL, "--repeat", 1, "--warmup", 0)


def invoke(*arguments):
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings") / "x"
    assert invoke("record", "tiny", *SMALL, "-o", folder, "-q").exit_code == 0
    return folder


def test_bench_of_two_proposers_names_the_command_that_takes_them():
    done = invoke("bench", "tiny", "-sc", NGRAM, "-sc", SUFFIX)
    assert done.exit_code != 0
    assert "SD-E186" in done.output
    assert f"specdec compare tiny -sc '{NGRAM}' -sc '{SUFFIX}'" in done.output


def test_a_comparison_is_printed_in_order_and_saved(tmp_path):
    page = tmp_path / "out.html"
    done = invoke("compare", "tiny", "-sc", NGRAM, "-sc", SUFFIX, *QUICK, "--sort", "draft_acceptance_rate", "-q",
                  "--report", page, "--save-result", tmp_path / "out2.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "rate v" in done.output
    (cell,) = json.loads((tmp_path / "out2.json").read_text())["cells"]
    rates = [row["draft_acceptance_rate"] for row in cell["rows"]]
    assert rates == sorted(rates, reverse=True)
    assert done.output.index(cell["rows"][0]["label"]) < done.output.index(cell["rows"][1]["label"])
    assert "Comparison: tiny" in page.read_text()


def test_only_drafts_that_were_not_drawn_are_shown_as_wrong():
    configuration = {"temperature": 0.8}
    greedy, drawn = ({"draft_sample_method": each} for each in ("greedy", "probabilistic"))
    row = {"label": "x", "num_outputs_equal": 0, "differences": [{"sentence": "at token 3"}]}
    cell = {"configuration": configuration, "num_prompts": 3}
    head, sentence = _differences(row | {"speculative_config": greedy}, cell)
    assert "red" in head.style
    assert sentence.plain == "  at token 3"
    (head,) = _differences(row | {"speculative_config": drawn}, cell)
    assert "red" not in head.style
    assert "equal in distribution, not token by token" in head.plain


def test_several_targets_and_data_sets_make_a_matrix(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "def main():"}\n{"prompt": "a b c a b c a b"}\n')
    done = invoke("compare", "tiny", "-sc", NGRAM, "--dataset", "packaged", "--dataset", f"custom={own}",
                  "--output-len", 8, "--num-prompts", 2, "--repeat", 1, "--warmup", 0, "-q")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "speedup on each" in done.output
    assert "tiny, custom" in done.output


def test_data_sets_of_one_form_are_told_apart_by_their_files(recording, tmp_path):
    result = {"cells": []}
    done = invoke("compare", recording, "-sc", NGRAM, "--repeat", 1, "--json")
    for name in ("one", "two"):
        (cell,) = json.loads(done.stdout)["cells"]
        cell["configuration"] |= {"recording": None, "dataset_name": "custom", "dataset_path": f"{name}.jsonl"}
        result["cells"].append(cell)
    console = Console(record=True, width=200, file=StringIO())
    show_comparison(result, console)
    content, text = content_of(result), console.export_text()
    for place in ("tiny, custom one.jsonl", "tiny, custom two.jsonl"):
        assert text.count(place) == 2  # a heading, and a column of the matrix
        assert place in one_line(result)
        assert place in content.configuration
        assert f"ngram K=3 · {place}" in [run.label for run in content.runs]


@pytest.mark.slow
def test_a_recording_is_compared_without_its_target(recording):
    done = invoke("compare", recording, "-sc", SUFFIX, "--sweep", "num_speculative_tokens=1..3", "--json")
    assert done.exit_code == 0, done.output
    (cell,) = json.loads(done.stdout)["cells"]
    assert {row["label"] for row in cell["rows"]} == {f"suffix K={k}" for k in (1, 2, 3)}
    assert all(row["speedup"] > 0 for row in cell["rows"])


@pytest.fixture(scope="module")
def untimed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings") / "untimed"
    assert invoke("record", "tiny", *SMALL, "-o", folder, "-q", "--no-cost").exit_code == 0
    return folder


def test_recordings_with_and_without_times_are_compared_in_one_table(recording, untimed):
    done = invoke("compare", recording, untimed, "-sc", NGRAM, "--repeat", 1, "-q")
    assert done.exit_code == 0, done.output
    assert "tokens_per_target_step on each" in done.output
    assert "speedup v" in done.output


@pytest.mark.parametrize("sort", ["speedup", "tokens_per_second"])
def test_a_sort_by_times_that_are_unknown_is_refused(untimed, sort):
    done = invoke("compare", untimed, "-sc", NGRAM, "--sort", sort)
    assert done.exit_code == 2
    assert "SD-E252" in done.output
    assert "--sort tokens_per_target_step" in done.output


DRAWN = '{"model": "tiny/draft", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}'


def test_drawn_drafts_of_sampled_text_are_refused_where_they_would_be_ranked(tmp_path):
    """Whether they are the recorded text says little of how often they are accepted."""
    sampled = tmp_path / "sampled"
    options = ("--num-prompts", 1, "--output-len", 8, "--temperature", 0.8, "--no-cost", "-q")
    assert invoke("record", "tiny", *options, "-o", sampled).exit_code == 0
    for verb in (("compare",), ("why",), ("replay", "--save-result", tmp_path / "out.json")):
        done = invoke(verb[0], sampled, "-sc", DRAWN, *verb[1:])
        assert done.exit_code == 2, done.output
        assert "SD-E251" in done.output
        assert "draft_model" in done.output or "draft K=2" in done.output
    assert not (tmp_path / "out.json").exists()
    assert "expected_tokens_per_step" in done.output  # printed all the same
    assert invoke("compare", sampled, "-sc", NGRAM, "-q").exit_code == 0


def test_a_recording_without_a_request_is_refused_by_name(tmp_path):
    empty = tmp_path / "empty"
    full = invoke("record", "tiny", "-o", empty, "--num-prompts", 1, "--output-len", 4, "--max-disk", 0, "-q")
    assert "SD-E248" in full.output
    for verb in (("compare",), ("why",), ("replay",), ("evaluate-head", empty)):
        done = invoke(*verb, empty, "-sc", NGRAM)
        assert done.exit_code == 2
        assert "SD-E244" in done.output
        assert "it holds no request" in done.output


def test_options_that_say_nothing_to_a_recording_are_refused_by_name(recording):
    given = (
        "--num-prompts",
        1,
        "--category",
        "code",
        "--dataset",
        "packaged",
        "--temperature",
        0.5,
        "--dtype",
        "float32",
    )
    done = invoke(
        "compare", recording, "-sc", NGRAM, "--repeat", 1, "--output-len", 128, "--max-concurrency", 2, *given
    )
    assert done.exit_code == 2
    words = " ".join(done.output.replace("│", " ").split())
    for name in (*given[::2], "--output-len", "--max-concurrency"):
        assert name in words
    assert "--repeat" not in words.partition("Leave out")[2]


def test_a_bad_sweep_is_refused_before_anything_runs():
    done = invoke("compare", "no-such-model", "-sc", NGRAM, "--sweep", "num_speculative_tokens")
    assert "SD-E253" in done.output


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    done = invoke("compare", "no-such-model", "-sc", NGRAM, "--report", tmp_path / "none" / "out.html")
    assert done.exit_code == 2
    assert "--report takes a file in a directory that exists" in done.output


def test_what_a_later_cell_lacks_is_refused_before_anything_runs(recording, untimed, tmp_path):
    later = {"SD-E140": ("./no-such-model",), "SD-E161": ("tiny", "--dataset", f"custom={tmp_path / 'none'}")}
    for code, arguments in (later | {"SD-E252": (untimed, "--sort", "speedup")}).items():
        done = invoke("compare", recording, *arguments, "-sc", NGRAM, "--format", "quiet")
        assert (done.exit_code, done.stdout) == (2, "")
        assert code in done.stderr


def test_a_later_cell_that_fails_costs_no_earlier_one(recording):
    done = invoke("compare", recording, "tiny", "-sc", NGRAM, "--repeat", 1, "--max-model-len", 999_999, "--json")
    assert done.exit_code == 2
    assert "max_model_len" in done.stderr
    assert [cell["rows"][0]["label"] for cell in json.loads(done.stdout)["cells"]] == ["ngram K=3"]


def test_why_prints_sums_and_writes_a_report_with_the_heat_map(recording, tmp_path):
    done = invoke("why", recording, "-sc", SUFFIX, "-q", "--report", tmp_path / "out.html")
    assert done.exit_code == 0, done.output
    for head in ("Draft position", "Entropy of the target", "Tokens before it", "Category", "Costliest contexts"):
        assert head in done.output
    assert "What a tree would have caught is unknown" in done.output
    page = (tmp_path / "out.html").read_text()
    assert 'id="plot-heatmap"' in page
    assert "costliest contexts" in page


def test_a_replay_writes_a_report(recording, tmp_path):
    done = invoke("replay", recording, "-sc", SUFFIX, "-q", "--report", tmp_path / "out.html")
    assert done.exit_code == 0, done.output
    assert "Replay: tiny" in (tmp_path / "out.html").read_text()


def test_a_replay_saves_the_figures_that_it_prints(recording, tmp_path):
    done = invoke("replay", recording, "-sc", NGRAM, "-sc", SUFFIX, "--json", "--save-result", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    saved = {row["label"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    for facts, label in zip(json.loads(done.stdout), ("ngram K=3", "suffix K=3"), strict=True):
        assert saved[label]["replay"] == facts
        assert saved[label]["seconds"] == pytest.approx(facts["predicted_seconds"])
        assert saved[label]["speedup"] == pytest.approx(facts["predicted_speedup"])


def test_a_watch_that_saves_is_refused(recording, tmp_path):
    done = invoke("replay", recording, "-sc", NGRAM, "--watch", "--save-result", tmp_path / "out.json")
    assert done.exit_code == 2
    assert "--watch prints only" in done.output


def test_generate_says_why_a_token_was_rejected():
    prompt = "def walk(top, suffix=None):\n    for dirname in"
    done = invoke("generate", "tiny", "-p", prompt, "-sc", NGRAM, "--max-tokens", 40, "--show", "why")
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if "the target said" in line]
    assert lines
    assert all(line.startswith("step ") and "its top: " in line for line in lines)
