import json

import pytest

from specdec import LLM
from specdec.lab.conversation import Texts
from specdec.lab.dataset_files import PromptRow
from specdec.lab.datasets import load_dataset, of_category, read_prompts, spread
from specdec.sdk import ConfigError


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_packaged_prompts_are_read_without_a_path():
    rows = load_dataset("packaged", None)
    assert {row.category for row in rows} == {"code", "prose", "repetition"}
    assert len({row.prompt_id for row in rows}) == len(rows)


@pytest.mark.parametrize("name", ["spec_bench", "mt_bench", "speed_bench"])
def test_question_files_give_every_turn(tmp_path, name):
    path = write_lines(
        tmp_path / "question.jsonl",
        [
            {"question_id": 81, "category": "writing", "turns": ["First.", "Second."], "reference": ["x"]},
            {"question_id": 161, "category": "qa", "turns": ["Who?"]},
        ],
    )
    rows = load_dataset(name, path)
    assert rows == [PromptRow("81", "writing", "First.", ("Second.",)), PromptRow("161", "qa", "Who?")]
    assert rows[0].turns == ("First.", "Second.")


def test_both_splits_of_speed_bench_are_read_from_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    for split, category in (("qualitative", "coding"), ("throughput_1k", "low_entropy")):
        rows = [{"question_id": f"{split}-1", "category": category, "turns": ["One.", "Two."], "multiturn": True}]
        (tmp_path / split).mkdir()
        path = tmp_path / split / "test-00000-of-00001.parquet"
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        expected = [PromptRow(f"{split}-1", category, "One.", ("Two.",))]
        assert load_dataset("speed_bench", path) == load_dataset("speed_bench", path.parent) == expected


def test_a_parquet_row_without_turns_is_named_with_its_number(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [{"question_id": "a", "category": "c", "turns": turns} for turns in (["fine"], [])]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    with pytest.raises(ConfigError, match=r'test\.parquet, row 2: "turns" is no list') as raised:
        load_dataset("speed_bench", tmp_path / "test.parquet")
    assert raised.value.code == "SD-E162"


def test_humaneval_rows_are_prompts_by_task(tmp_path):
    path = write_lines(tmp_path / "HumanEval.jsonl", [{"task_id": "HumanEval/0", "prompt": "def f():", "test": ""}])
    assert load_dataset("humaneval", path) == [PromptRow("HumanEval/0", "HumanEval", "def f():")]


def test_sharegpt_conversations_give_what_the_user_says(tmp_path):
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "x", "conversations": said}, {"messages": messages}]))
    assert load_dataset("sharegpt", path) == [PromptRow("x", "all", "a", ("c",)), PromptRow("2", "all", "d")]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"id": "x"}, "conversations"),
        ({"conversations": [{"from": "gpt", "value": "b"}]}, "nobody asks"),
        ({"conversations": [{"from": "human", "value": 3}]}, "is no text"),
        ({"conversations": ["text"]}, "neither"),
        ("text", "not a JSON object"),
    ],
)
def test_a_bad_conversation_is_named_with_its_number(tmp_path, row, named):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "a"}]}, row]))
    with pytest.raises(ConfigError, match=rf"row 2: .*{named}") as raised:
        load_dataset("sharegpt", path)
    assert raised.value.code == "SD-E162"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"question_id": 1, "category": "qa"}', "turns"),
        ('{"question_id": 1, "category": "qa", "turns": "text"}', "turns"),
        ('{"question_id": 1, "category": "qa", "turns": []}', "turns"),
        ('{"category": "qa", "turns": ["a"]}', "question_id"),
        ("[1]", "object"),
        ("{", "JSON"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, named):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 0, "category": "qa", "turns": ["a"]}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"line 3: .*{named}") as raised:
        load_dataset("spec_bench", path)
    assert raised.value.code == "SD-E162"


def test_custom_rows_need_only_a_prompt(tmp_path):
    first = {"prompt": "a", "prompt_id": None, "category": None}  # as other libraries write what is not there
    path = write_lines(tmp_path / "mine.jsonl", [first, {"prompt": "b", "prompt_id": "x", "category": "c"}])
    assert load_dataset("custom", path) == [PromptRow("1", "all", "a"), PromptRow("x", "c", "b")]


def test_repeated_ids_are_refused(tmp_path):
    path = write_lines(tmp_path / "mine.jsonl", [{"prompt": "a", "prompt_id": "2"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match="two prompts have the id '2'"):
        load_dataset("custom", path)


@pytest.mark.parametrize(("name", "path"), [("custom", None), ("spec_bench", None), ("packaged", "file")])
def test_a_missing_or_needless_path_is_refused(name, path, tmp_path):
    with pytest.raises(ConfigError) as raised:
        load_dataset(name, tmp_path / path if path else None)
    assert raised.value.code == "SD-E164"


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        load_dataset("custom", path)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl") as raised:
        load_dataset("custom", tmp_path / "gone.jsonl")
    assert raised.value.code == "SD-E161"


def test_a_byte_that_is_not_utf8_is_named_with_its_position(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("fine\ncafé\n".encode("latin1"))
    with pytest.raises(ConfigError, match=r"latin\.txt' is not UTF-8|latin\.txt is not UTF-8") as raised:
        read_prompts(path)
    assert "byte 8 (0xe9), line 2" in str(raised.value)


def test_a_text_file_gives_a_prompt_per_line_and_no_byte_order_mark(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n  second \n")
    assert [row.prompt for row in read_prompts(path)] == ["first", "  second "]


def test_prompts_are_spread_over_categories_and_stay_grouped():
    rows = [PromptRow(f"{category}{number}", category, "") for category in "abc" for number in range(3)]
    assert [row.prompt_id for row in spread(rows, 5)] == ["a0", "a1", "b0", "b1", "c0"]
    assert spread(rows, 0) == rows
    assert spread(rows, 100) == rows


def test_an_unknown_category_is_refused_with_a_hint():
    rows = [PromptRow("1", "code", ""), PromptRow("2", "prose", "")]
    assert of_category(rows, "code") == rows[:1]
    with pytest.raises(ConfigError, match="did you mean  prose"):
        of_category(rows, "pros")


def test_a_row_may_give_token_ids_or_messages(tmp_path):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    path = write_lines(tmp_path / "mine.jsonl", [{"prompt_token_ids": [5, 6, 7]}, {"messages": said, "category": "c"}])
    ids, messages = load_dataset("custom", path)
    assert (ids, messages) == (
        PromptRow("1", "all", "", token_ids=(5, 6, 7)),
        PromptRow("2", "c", "", messages=tuple(said)),
    )
    assert len({ids, messages}) == 2
    with LLM("tiny", max_model_len=64) as llm:
        texts = Texts.of(llm.engine)
        assert texts.turn(ids, (), chat=True) == [5, 6, 7]
        assert texts.turn(messages, (), chat=False) == llm.engine.encode_chat(said)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt_token_ids": []}, "no list of integers"),
        ({"prompt_token_ids": [1, "2"]}, "no list of integers"),
        ({"prompt_token_ids": [True]}, "no list of integers"),
        ({"prompt_token_ids": "12"}, "no list of integers"),
        ({"messages": []}, "no conversation"),
        ({"messages": "hello"}, "no conversation"),
        ({"messages": [{"role": "user"}]}, "no content"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "a row has one of prompt, turns"),
        ({"text": "a"}, "a row has one of prompt, turns"),
    ],
)
def test_a_row_in_no_form_is_named_with_the_forms(tmp_path, row, named):
    path = write_lines(tmp_path / "mine.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ConfigError, match=rf"line 2: .*{named}") as raised:
        load_dataset("custom", path)
    assert raised.value.code == "SD-E162"
    assert '{"prompt_token_ids": [1, 2]}' in raised.value.facts["fix"]


def test_ids_that_later_turns_repeat_are_refused(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"prompt_id": "a", "turns": ["one", "two"]}, {"prompt_id": "a/2", "prompt": "three"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="two prompts have the id 'a/2'") as raised:
        load_dataset("custom", path)
    assert raised.value.code == "SD-E162"


def test_only_a_line_feed_ends_a_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("one\x0cpage\r\ntwo\u2028lines\n\n".encode())
    assert [row.prompt for row in read_prompts(path)] == ["one\x0cpage", "two\u2028lines"]
