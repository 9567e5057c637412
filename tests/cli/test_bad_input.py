"""What a command line may hold and what its output may be: a clear error, never a traceback, and no lost work."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from specdec import LLM
from specdec.cli._app import build_app
from specdec.core.config.settings_text import as_mapping
from specdec.sdk import ConfigError, RequestError

SMALL = ("--num-prompts", "1", "--output-len", "2", "--repeat", "1", "--warmup", "0", "-q")
DEEP = "[" * 100_000


def invoke(*arguments):
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


def in_a_shell(command):
    """The finished process; `specdec` is ours."""
    words = f'specdec() {{ "{sys.executable}" -m specdec "$@"; }}; {command}'
    return subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=120, env=os.environ)


@pytest.mark.parametrize("verb", [("bench", "tiny"), ("generate", "tiny", "-p", "x"), ("check", "ngram")])
def test_two_speculative_configs_are_refused_by_name(verb):
    first, second = '{"method": "ngram"}', '{"method": "suffix"}'
    result = invoke(*verb, "-sc", first, "-sc", second)
    assert result.exit_code == 2
    assert "SD-E186 --speculative-config is given 2 times" in result.stderr
    assert first in result.stderr
    assert second in result.stderr


def test_two_engine_configs_are_refused():
    result = invoke("bench", "tiny", "-ec", '{"block_size": 8}', "-ec", "{}")
    assert (result.exit_code, "SD-E186 --engine-config" in result.stderr) == (2, True)


def test_bytes_that_are_no_text_are_refused_as_a_prompt():
    result = invoke("generate", "tiny", "-p", os.fsdecode(b"ab\xff\xfe"))  # as Python reads arguments
    assert (result.exit_code, result.stdout) == (2, "")
    assert "SD-E212 the prompt is no Unicode text" in result.stderr
    assert "character 2: '\\udcff'" in result.stderr


@pytest.mark.parametrize("asked", [["\ud800"], {"prompt": "\ud800"}, "chat"])
def test_lone_surrogates_are_refused_by_the_engine(asked):
    with LLM("tiny", max_model_len=64) as llm, pytest.raises(RequestError, match="SD-E212"):
        llm.chat([{"role": "user", "content": "\ud800"}]) if asked == "chat" else llm.generate(asked)


def test_a_file_that_is_full_costs_no_result():
    result = invoke("bench", "tiny", *SMALL, "--json", "--save-result", "/dev/full")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["num_output_tokens"] == 2
    assert "SD-E187 cannot write to '/dev/full'\n  because  No space left on device" in result.stderr


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    result = invoke("bench", "nosuch/model", "--save-result", tmp_path / "result.json")
    assert (result.exit_code, "may be written" in result.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        "list",
        "explain --json",
        "generate tiny -q -p x --max-tokens 2",
        pytest.param(f"bench tiny {' '.join(SMALL)}", marks=pytest.mark.full),
    ],
)
def test_a_full_standard_output_is_an_error_of_one_sentence(verb):
    done = in_a_shell(f"specdec {verb} > /dev/full")
    assert done.returncode == 2
    assert "SD-E187 cannot write the output\n  because  No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(("closed", "code"), [("| true; exit ${PIPESTATUS[0]}", 1), (">&-", 0)])
def test_a_closed_standard_output_ends_quietly(closed, code):
    done = in_a_shell(f"specdec list --json {closed}")
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (DEEP, "nested too deeply"),
        ('{"a": ' * 5000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "4300 digits"),
        ('{"a": 1,\n', "line 2, column 1"),
    ],
)
def test_json_that_python_does_not_read_is_no_json(text, told):
    with pytest.raises(ConfigError, match="SD-E130") as refusal:
        as_mapping(text, "speculative_config", "{}")
    assert told in str(refusal.value)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--dataset-name", "custom", "--dataset-path"), "SD-E162"), (("--baseline",), "SD-E166")],
)
def test_nested_json_in_a_file_is_refused(tmp_path, flags, code):
    (tmp_path / "deep").write_text(DEEP)
    result = invoke("bench", "tiny", *flags, tmp_path / "deep")
    assert (result.exit_code, code in result.stderr) == (2, True)


@pytest.mark.parametrize("verb", [("bench", "tiny"), ("generate", "tiny", "-p", "x")])
def test_threads_that_no_core_runs_are_refused(verb):
    result = invoke(*verb, "--num-threads", 100_000)
    assert result.exit_code == 2
    assert f"100000 threads on {os.cpu_count()} cores" in result.stderr


@pytest.mark.parametrize(
    "flag", [("--temperature", -1), ("--top-p", 2), ("--top-k", -1), ("--min-p", 1.5), ("--seed", -1)], ids=str
)
def test_numbers_outside_their_range_are_refused(flag):
    result = invoke("generate", "nosuch/model", "-p", "x", *flag)
    assert (result.exit_code, f"Invalid value for '{flag[0]}'" in result.stderr) == (2, True)
