"""`specdec generate` on the packaged model, mostly in this process through typer's runner."""

import io
import json
import re
import shutil
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from specdec.cli._app import build_app
from specdec.cli._token_view import HeldPieces, Mark, Painter, Piece, StepPieces
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.outputs import StreamUpdate
from specdec.core.llm import LLM
from specdec.sdk import HostProposer
from specdec.sdk.packaged import packaged

NGRAM = '{"method": "ngram", "num_speculative_tokens": 5}'
PROMPT = textwrap.dedent("""\
    class Stack:
        def __init__(self):
            self.items = []

        def push(self, item):
            self.items.append(item)

        def pop(self):
""")
SIGNED = re.compile(r"\[(?P<sign>[-+*]) (?P<marked>(?:\\.|[^\\\]])*)\]|(?P<plain>\\.|[^\\\[])", re.DOTALL)


def invoke(*arguments, **options):
    return CliRunner().invoke(build_app(), ["generate", "tiny", *map(str, arguments)], **options)


def unescaped(text):
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def signed_pieces(output):
    """(sign, text) of each piece of `--show tokens` without colour; fails on anything that is neither."""
    pieces, position = [], 0
    while position < len(output):
        match = SIGNED.match(output, position)
        assert match, f"not a piece at {position}: {output[position : position + 20]!r}"
        pieces.append((match["sign"] or "", unescaped(match["marked"] if match["sign"] else match["plain"])))
        position = match.end()
    return pieces


def joined(pieces):
    """Pieces without empty ones, neighbours without a sign put together."""
    result = []
    for sign, text in pieces:
        if sign == "" and result and result[-1][0] == "":
            result[-1] = ("", result[-1][1] + text)
        elif sign or text:
            result.append((sign, text))
    return result


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(llm):
    return llm.get_tokenizer()


@pytest.fixture(scope="module")
def expected(llm):
    """What the library gives for the prompt, without a proposer."""
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))
    return output.outputs[0]


def test_text_goes_to_stdout_and_one_line_of_figures_to_stderr(expected):
    result = invoke("-p", PROMPT, "-sc", NGRAM, "--max-tokens", 40)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert re.fullmatch(
        r"40 tokens, [\d.]+ tokens/s, acceptance length [1-6]\.\d\d, tokens per target step [\d.]+, "
        r"proposer specdec-sdk:ngram\n",
        result.stderr,
    )


def test_signs_of_the_token_view_reconstruct_the_text(expected):
    shown = invoke("-p", PROMPT, "-sc", NGRAM, "--max-tokens", 40, "--show", "tokens").stdout
    pieces = signed_pieces(shown)
    assert "".join(text for sign, text in pieces if sign != "-") == expected.text + "\n"
    assert {sign for sign, _ in pieces} >= {"", "+", "*"}


def test_a_stop_text_ends_the_output_and_is_in_neither_view(expected):
    stop = expected.text[40:47]
    flags = ("-p", PROMPT, "-sc", NGRAM, "--max-tokens", 40, "--stop", stop, "--stop", "a text that never comes")
    before = expected.text[: expected.text.index(stop)]
    assert invoke(*flags).stdout == before + "\n"
    pieces = signed_pieces(invoke(*flags, "--show", "tokens").stdout)
    assert "".join(text for sign, text in pieces if sign != "-") == before + "\n"


@given(st.lists(st.builds(Piece, st.sampled_from(Mark), st.text("ab[]\\+-* \n"))))
def test_signs_can_be_read_back_whatever_the_text_is(pieces):
    output = io.StringIO()
    Painter(Console(file=output)).print(pieces)
    plain = [(str(piece.mark), piece.text) for piece in pieces]
    assert joined(signed_pieces(output.getvalue())) == joined(plain)


def test_a_step_shows_accepted_then_rejected_then_recovered(tokenizer):
    accepted, rejected, recovered = (tokenizer(text)["input_ids"] for text in ("import os", " path", " sys"))
    update = StreamUpdate(
        request_id="0",
        index=0,
        text="import os sys",
        token_ids=(*accepted, *recovered[:1]),
        draft_token_ids=(*accepted, *rejected),
        num_accepted=len(accepted),
        finish_reason=None,
    )
    pieces = StepPieces(tokenizer).of(update)
    assert [piece.mark for piece in pieces] == [Mark.ACCEPTED, Mark.REJECTED, Mark.SAMPLED]
    assert [piece.text for piece in pieces[:2]] == ["import os", " path"]


def test_a_step_with_a_tree_shows_what_was_met_at_the_end_and_the_branches_beside(tokenizer):
    right, wrong, other, sampled = (tokenizer(text)["input_ids"][0] for text in (" path", " sys", " name", " file"))
    update = StreamUpdate(
        request_id="0",
        index=0,
        text=" path file",
        token_ids=(right, sampled),
        draft_token_ids=(right, wrong, other, other, wrong, right),
        draft_parents=(-1, 0, 0, 1, -1, 4),
        num_accepted=1,
        finish_reason=None,
    )
    pieces = StepPieces(tokenizer)
    texts = [(str(piece.mark), piece.text) for piece in pieces.of(update)]
    assert texts == [("+", " path"), ("-", " sys name"), ("-", " name"), ("*", " file")]
    assert pieces.beside(update) == [(1, Piece(Mark.REJECTED, " sys path"))]


def test_steps_of_trees_have_a_line_for_each_branch_and_are_in_the_json(expected):
    config = '{"method": "suffix", "num_speculative_tokens": 4, "max_nodes": 8}'
    lines = invoke("-p", PROMPT, "-sc", config, "--max-tokens", 40, "--show", "steps").stdout.splitlines()
    assert any(re.match(r'       depth [1-4]  \[- ".*"\]$', line) for line in lines)
    flags = ("--max-tokens", 40, "--show", "steps", "--format", "json")
    row = json.loads(invoke("-p", PROMPT, "-sc", config, *flags).stdout)
    assert row["text"] == expected.text
    assert any(each["draft_parents"] and -1 in each["draft_parents"][1:] for each in row["steps"])


def test_text_that_may_begin_a_stop_text_is_held_back_with_what_follows_it():
    held = HeldPieces()
    first = held.release([Piece(Mark.ACCEPTED, "abc"), Piece(Mark.REJECTED, "x"), Piece(Mark.SAMPLED, "d")], 2)
    assert first == [Piece(Mark.ACCEPTED, "ab")]
    second = held.release([Piece(Mark.PLAIN, "ef")], 3)
    assert second == [
        Piece(Mark.ACCEPTED, "c"),
        Piece(Mark.REJECTED, "x"),
        Piece(Mark.SAMPLED, "d"),
        Piece(Mark.PLAIN, "e"),
    ]


def test_steps_are_one_line_each_and_add_up_to_the_text(expected):
    result = invoke("-p", PROMPT, "-sc", NGRAM, "--max-tokens", 40, "--show", "steps")
    lines = result.stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, len(lines) + 1))
    kept = re.sub(r'\[- "(\\.|[^"\\])*"\]', "", result.stdout)
    assert "".join(json.loads(text) for text in re.findall(r'"(?:\\.|[^"\\])*"', kept)) == expected.text
    accepted = [tuple(map(int, line.split()[1].split("/"))) for line in lines]
    assert all(0 <= a <= d <= 5 for a, d in accepted)
    assert sum(a for a, _ in accepted) + len(lines) == 40


def test_colour_is_used_where_a_terminal_is_and_no_color_is_not_set():
    flags = ("-p", PROMPT, "-sc", NGRAM, "--max-tokens", 12, "--show", "tokens")
    coloured = invoke(*flags, env={"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm"}).stdout
    assert "\x1b[4;32m" in coloured
    assert "[+ " not in coloured
    plain = invoke(*flags, env={"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}).stdout
    assert "\x1b" not in plain
    assert "[+ " in plain
    assert "\x1b" not in invoke(*flags, env={"FORCE_COLOR": None, "NO_COLOR": None}).stdout


def test_json_is_one_object_per_prompt(expected):
    result = invoke("-p", PROMPT, "-p", "import os", "-sc", NGRAM, "--max-tokens", 40, "--json", "--show", "steps")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["prompt"] == PROMPT
    assert second["prompt"] == "import os"
    assert (first["text"], tuple(first["token_ids"])) == (expected.text, expected.token_ids)
    assert first["finish_reason"] == "length"
    assert first["mean_acceptance_length"] > 1
    assert first["num_accepted_draft_tokens"] == sum(step["num_accepted"] for step in first["steps"])
    assert [token_id for step in first["steps"] for token_id in step["token_ids"]] == first["token_ids"]
    assert "outputs_equal" not in first


class RefusesTheThird(HostProposer):
    """Raises for the third prompt."""

    def draft(self, request, tokens, k):
        if request.request_id == "2":
            raise KeyError(request.request_id)
        return []


def test_json_of_prompts_that_have_ended_is_not_lost_where_a_later_one_fails():
    prompts = [part for name in ("import os", "import re", "import io") for part in ("-p", name)]
    proposer = {"method": f"{__name__}:RefusesTheThird", "num_speculative_tokens": 2}
    one_by_one = ("-ec", '{"max_num_seqs": 1}', "--max-tokens", 4, "--json")
    done = invoke(*prompts, *one_by_one, "-sc", json.dumps(proposer))
    assert done.exit_code != 0
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["import os", "import re", "import io"]
    assert [row["finish_reason"] for row in rows] == ["length", "length", "abort"]


def test_text_of_a_target_without_a_tokenizer_is_refused_and_json_is_not(tmp_path):
    folder = shutil.copytree(packaged("tiny"), tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    flags = ["generate", str(folder), "--prompts-file", str(rows), "--max-tokens", "4"]
    done = CliRunner().invoke(build_app(), flags)
    assert done.exit_code == 2
    assert "the target has no tokenizer" in " ".join(done.stderr.split())
    (line,) = CliRunner().invoke(build_app(), [*flags, "--json"]).stdout.splitlines()
    assert len(json.loads(line)["token_ids"]) == 4


def test_prompts_of_files_and_standard_input_get_headings_in_order(tmp_path):
    lines = tmp_path / "prompts.txt"
    lines.write_text("import os\nimport sys\n", encoding="utf-8")
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "import os"}\n{"prompt": "import sys"}\n', encoding="utf-8")
    flags = ("--max-tokens", 4, "-p", "-")
    from_lines = invoke(*flags, "--prompts-file", lines, input="import re")
    from_objects = invoke(*flags, "--prompts-file", objects, input="import re")
    headings = [line for line in from_lines.stdout.splitlines() if line.startswith("===")]
    assert headings == ["=== 1/3: import re ===", "=== 2/3: import os ===", "=== 3/3: import sys ==="]
    assert from_lines.stdout == from_objects.stdout


def test_a_row_of_a_file_is_answered_in_the_form_that_it_asks_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    form = {"structured_outputs": {"choice": ["left", "right"]}}
    path.write_text("".join(json.dumps({"prompt": "import os"} | each) + "\n" for each in ({}, form)))
    done = invoke("--prompts-file", path, "--max-tokens", 8, "--json")
    free, chosen = (json.loads(line)["text"] for line in done.stdout.splitlines())
    assert chosen in ("left", "right")
    assert free not in ("left", "right")


def test_a_row_with_several_turns_is_refused_by_its_id(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"turns": ["a", "b"], "prompt_id": "talk"}\n')
    done = invoke("--prompts-file", path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "SD-E162" in done.stderr
    assert "'talk' has several turns" in done.stderr


def test_a_file_that_is_not_utf8_is_refused_with_its_name_and_position(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin1"))
    result = invoke("--prompts-file", path)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert "byte 3 (0xe9)" in result.stderr


def test_chat_wraps_the_prompt_in_the_models_template(tokenizer):
    plain = json.loads(invoke("-p", "hello", "--max-tokens", 1, "--json").stdout)
    chat = json.loads(invoke("-p", "hello", "--max-tokens", 1, "--json", "--chat").stdout)
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat["num_prompt_tokens"] == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert chat["num_prompt_tokens"] > plain["num_prompt_tokens"]


def test_a_seed_gives_the_same_text_with_and_without_speculation():
    flags = ("-p", PROMPT, "--temperature", 0.9, "--seed", 3, "--max-tokens", 24, "--format", "quiet")
    plain = invoke(*flags)
    assert invoke(*flags, "-sc", NGRAM).stdout == plain.stdout
    assert plain.stderr == ""


@pytest.mark.parametrize(
    ("flags", "exit_code", "named"),
    [
        (("-p", "x", "-sc", "{bad"), 2, "SD-E130"),
        (("-p", "x", "-sc", '{"method": "nosuch", "num_speculative_tokens": 2}'), 3, 'no proposer "nosuch"'),
        (("-p", "x", "--temperature", "-1"), 2, "temperature"),
        (("-p", "x", "--max-model-len", "999999"), 2, "max_model_len"),
        ((), 2, "--prompts-file"),
    ],
    ids=["bad JSON", "unknown method", "bad value", "too long", "no prompt"],
)
def test_errors_have_their_exit_code_and_name_what_is_wrong(flags, exit_code, named):
    result = invoke(*flags)
    assert result.exit_code == exit_code
    assert named in result.stderr
    assert result.stdout == ""
