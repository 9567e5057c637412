"""What a command line may hold and what its output may be: a clear error, never a traceback, and no lost work."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from specdec import LLM, SamplingParams
from specdec.cli._app import build_app
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.lab.report import write_whole
from specdec.sdk import ConfigError
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError, RequestError
from specdec.sdk.json_files import as_mapping

SMALL = ("--num-prompts", "1", "--output-len", "2", "--repeat", "1", "--warmup", "0", "-q")
DEEP = "[" * 100_000


def invoke(*arguments):
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


def in_a_shell(command):
    """The finished process; `specdec` is ours."""
    words = f'specdec() {{ "{sys.executable}" -m specdec "$@"; }}; {command}'
    return subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=600, env=os.environ)


@pytest.mark.parametrize("verb", [("bench", "tiny"), ("generate", "tiny", "-p", "x"), ("check", "ngram")])
def test_two_speculative_configs_are_refused_by_name(verb):
    first, second = '{"method": "ngram"}', '{"method": "suffix"}'
    result = invoke(*verb, "-sc", first, "-sc", second)
    assert result.exit_code == 2
    assert "SD-E186 --speculative-config is given 2 times" in result.stderr
    assert first in result.stderr
    assert second in result.stderr


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


def test_a_data_set_of_a_comparison_may_be_a_pipe():
    engine = "--output-len 4 --num-prompts 1 --repeat 1 --warmup 0 --check-equal off -q"
    prompts = """--dataset custom=<(echo '{"prompt": "a b a b"}')"""
    done = in_a_shell(f"""specdec compare tiny tiny -sc '{NGRAM}' {engine} {prompts}""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 prompt, 1 repeat\n") == 2


def test_a_served_proposer_is_named_once(tmp_path):
    address = f"ipc://{tmp_path}/socket"
    result = invoke("serve-proposer", "ngram", "--target", "tiny", "--listen", address, "-sc", '{"method": "suffix"}')
    assert result.exit_code == 2
    assert "'ngram'" in result.stderr
    assert "method='suffix'" in result.stderr


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


def test_an_earlier_result_stays_where_a_new_one_cannot_be_written_whole(tmp_path):
    (tmp_path / "file").write_text("earlier")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(TypeError):
        write_whole(tmp_path / "link", None)
    assert (tmp_path / "file").read_text() == "earlier"
    write_whole(tmp_path / "link", "later\r\n")
    assert (tmp_path / "file").read_bytes() == b"later\r\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]


def test_a_result_that_names_a_file_whose_name_is_no_text_is_written(tmp_path):
    write_whole(tmp_path / "result.json", json.dumps({"dataset": "a\udcff"}, ensure_ascii=False))
    assert json.loads((tmp_path / "result.json").read_text()) == {"dataset": "a\udcff"}


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


def test_a_closed_standard_input_is_refused_as_a_prompt():
    done = in_a_shell("specdec generate tiny -p - <&-")
    assert done.returncode == 2
    assert "standard input, which is closed" in " ".join(done.stderr.replace("│", " ").split())


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


@pytest.mark.parametrize("seconds", ["inf", "1e30"])
def test_a_timeout_that_no_clock_holds_is_refused(seconds):
    result = invoke("check", "ngram", "--timeout", seconds)
    assert (result.exit_code, "Invalid value for '--timeout'" in result.stderr) == (2, True)


ODD = (1.5, object(), b"x", {"a": 1}, {1, 2}, [[]], [None], float("nan"), 10**400, "\0", "x" * 5000, np.array([1, 2]))


@pytest.mark.parametrize("model", [SamplingParams, SpeculativeConfig])
def test_an_odd_value_of_any_key_is_taken_or_refused_and_never_raises_anything_else(model):
    always = {"method": "ngram"} if model is SpeculativeConfig else {}
    num_refused = 0
    for key in model.model_fields:
        for value in ODD:
            try:
                model(**always | {key: value})
            except ConfigError:
                num_refused += 1
    assert num_refused > 6 * len(model.model_fields)


@pytest.mark.parametrize("model", ["a" * 5000, "\0", "~nobody-of-this-name/x"])
def test_a_draft_checkpoint_that_can_be_no_file_is_refused(model):
    with pytest.raises(CheckpointError, match="SD-E105"):
        Checkpoint.open(model)


@pytest.mark.slow
def test_a_dataset_is_named_the_same_way_everywhere(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6]}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    flags = ["--output-len", "2", "-q"]
    bench = ["bench", "tiny", "--json", "--repeat", "1", "--warmup", "0", "--baseline", "off"]
    record = ["record", "tiny", "--no-cost"]
    for number, flag in enumerate(["--dataset", "--dataset-name"]):
        for named in [(flag, f"custom={file}"), (flag, "custom", "--dataset-path", file)]:
            done = invoke(*bench, *named, *flags)
            assert json.loads(done.stdout)["num_prompts"] == 2, done.stderr
        assert invoke(*record, "-o", tmp_path / f"run{number}", flag, f"custom={file}", *flags).exit_code == 0
        twice = (flag, f"custom={file}", "--dataset-path", file)
        for verb in bench[:2], [*record, "-o", tmp_path / "no"], ["compare", "tiny", "-sc", '{"method": "ngram"}']:
            refused = invoke(*verb, *twice)
            assert (refused.exit_code, "name a file each" in refused.stderr) == (2, True)


def test_generate_takes_token_ids_and_messages_from_a_file(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6]}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    done = invoke("generate", "tiny", "--prompts-file", file, "--max-tokens", "2", "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    with LLM("tiny", max_model_len=64) as llm:
        said = [{"role": "user", "content": "x"}]
        asked = [{"prompt_token_ids": [5, 6]}, {"messages": said}]
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=2))
        [chatted] = llm.chat(said, SamplingParams(temperature=0, max_tokens=2))
    assert [row["token_ids"] for row in rows] == [list(each.outputs[0].token_ids) for each in outputs]
    assert outputs[1].prompt_token_ids == chatted.prompt_token_ids


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--report", "r1.json"), "takes a page such as"),
        (("--report", "r2.csv"), "takes a page such as"),
        (("--report", "r3.html", "--save-result", "r3.html"), "another name"),
        (("--report", "r5.html", "--save-result", "r5.acceptance.csv"), "another name"),
    ],
)
def test_files_that_would_overwrite_each_other_are_refused(tmp_path, monkeypatch, flags, named):
    monkeypatch.chdir(tmp_path)
    result = invoke("bench", "no-such-model", *flags)
    assert result.exit_code == 2
    assert named in " ".join(result.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags",
    [
        ("bench", "--dataset", "sharegpt=x.json", "--report", "x.html"),
        ("bench", "--dataset", "custom", "--dataset-path", "x.json", "--save-result", "../{name}/x.json"),
        ("bench", "--baseline", "x.json", "--report", "x.html"),
        ("compare", "-sc", '{"method": "ngram"}', "--dataset", "custom=x.json", "--save-result", "x.json"),
    ],
)
def test_a_file_that_is_read_is_not_written_to(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("mine")
    verb, *rest = (each.replace("{name}", tmp_path.name) for each in flags)
    result = invoke(verb, "no-such-model", *rest)
    assert result.exit_code == 2
    assert "x.json is read by this run" in " ".join(result.stderr.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
