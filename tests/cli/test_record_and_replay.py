"""The commands record and replay, from a model to figures."""

import json

import pytest
from typer.testing import CliRunner

from specdec.cli._app import build_app

IN_TRANSFORMERS = ("record", "tiny", "-o", "x", "--engine", "transformers")
SMALL = ("--num-prompts", 1, "--output-len", 8, "--no-cost", "-q")


def invoke(*arguments):
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "x"
    result = invoke("record", "tiny", "-o", path, *SMALL)
    assert result.exit_code == 0, result.stderr
    return path


def test_several_proposers_are_replayed_on_one_recording(folder):
    ngram, suffix = ('{"method": "ngram", "num_speculative_tokens": 2}', '{"method": "suffix"}')
    result = invoke("replay", folder, "-sc", ngram, "-sc", suffix, "--json")
    assert result.exit_code == 0, result.stderr
    first, second = json.loads(result.stdout)
    assert first["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 2}
    assert "suffix" in second["proposer"]
    assert first["predicted_speedup"] is None  # --no-cost
    table = invoke("replay", folder, "-sc", ngram, "--format", "human").stdout
    assert "predicted_speedup" in table


def test_recording_again_runs_nothing_and_says_what_there_is(folder):
    before = sorted(path.name for path in folder.iterdir())
    result = invoke("record", "tiny", "-o", folder, *SMALL[:-1])
    assert result.exit_code == 0, result.stderr
    bytes_ = sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert result.stdout == f"{folder}: 1 request, {bytes_ / 1000:.1f} kB\n"
    assert sorted(path.name for path in folder.iterdir()) == before


def test_prompts_that_do_not_fit_are_counted(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["%s", "b"]}\n' % ("x y " * 99))
    length = "-ec", '{"max_model_len": 64}'
    result = invoke("record", "tiny", "-o", tmp_path / "x", "--dataset", f"custom={file}", *SMALL[2:-1], *length)
    assert result.exit_code == 0, result.stderr
    assert ": 1 request, " in result.stdout
    assert result.stdout.endswith("; 2 skipped: longer than max_model_len 64 - 8\n")


def test_no_plugins_does_not_keep_a_target_from_being_recorded(tmp_path):
    assert invoke("--no-plugins", "record", "tiny", "-o", tmp_path / "x", *SMALL).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "named"),
    [
        (("replay", "nowhere", "-sc", '{"method": "ngram"}'), 2, "SD-E244"),
        (("record", "tiny", "-o", "{folder}", "--output-len", 9, "--num-prompts", 1), 2, "SD-E247"),
        (("record", "tiny", "-o", "x", "--hidden-states", "two"), 2, "layers are numbers"),
        (("record", "tiny", "-o", "x", "--hidden-states", "²"), 2, "layers are numbers"),
        (("replay", "{folder}"), 2, "SD-E251"),
        (("record", "tiny", "-o", "x", "--max-disk", "inf"), 2, "--max-disk takes a number"),
        (("record", "tiny", "-o", "x", "--from", "d", "--num-prompts", 1, "--full-logits"), 2, "--num-prompts, --full"),
        (("record", "tiny", "-o", "x", "--vllm", "{}"), 2, "--engine vllm"),
        (("record", "no-such-model", "-o", "{folder}/manifest.json"), 2, "SD-E187"),
        ((*IN_TRANSFORMERS, "--num-threads", 1), 2, "--engine transformers reads none of num_threads"),
        ((*IN_TRANSFORMERS, "-ec", '{"quantization": "int8_dynamic"}'), 2, "reads none of quantization"),
    ],
)
def test_errors_have_their_exit_code_and_name_what_to_do(folder, arguments, exit_code, named):
    result = invoke(*(str(each).replace("{folder}", str(folder)) for each in arguments))
    assert result.exit_code == exit_code
    assert named in " ".join(result.stderr.replace("│", " ").split())
