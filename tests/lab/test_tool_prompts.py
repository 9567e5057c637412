"""The packaged tool calls and records: every answer has the form that its prompt asks for."""

from __future__ import annotations

import json

import pytest

from specdec import LLM, SamplingParams
from specdec.core.engine.assembly import parts_of
from specdec.lab.datasets import load_dataset, of_category
from specdec.lab.prompts import choose, prompts_sha256
from specdec.sdk import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=200)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", max_model_len=1024, speculative_config={"method": "forced", "num_speculative_tokens": 8}) as llm:
        yield llm


def test_there_are_sixty_and_each_has_a_schema_that_its_prompt_shows():
    rows = load_dataset("tools", None)
    assert (len(rows), len({row.prompt for row in rows})) == (60, 60)
    assert {category: len(of_category(rows, category)) for category in ("tool_call", "json")} == {
        "tool_call": 40,
        "json": 20,
    }
    assert all(json.dumps(row.structured_outputs.json_schema) in row.prompt for row in rows)


def test_every_schema_can_be_compiled(llm):
    rows = load_dataset("tools", None)
    grammars = parts_of(llm.engine).grammars
    assert all(grammars.start(row.structured_outputs, row.prompt_id) is not None for row in rows[::5])


def test_answers_are_calls_of_the_tool_and_bench_asks_for_them(llm):
    rows = load_dataset("tools", None)
    chosen = choose([row for row in rows if row.prompt_id == "get_weather-1"], 0, GREEDY, llm.engine, chat=False)
    [prompt] = chosen.prompts
    [output] = llm.generate([{"prompt_token_ids": list(prompt.token_ids)}], prompt.params)
    call = json.loads(output.outputs[0].text)
    assert call["name"] == "get_weather"
    assert call["arguments"].keys() == {"city", "days", "unit"}
    free = chosen.prompts[0].params.replace(structured_outputs=None)
    assert prompts_sha256(chosen.prompts) != prompts_sha256([type(prompt)(**(vars(prompt) | {"params": free}))])


def test_what_was_said_before_a_turn_has_the_form_that_its_row_asks_for(llm, tmp_path):
    path = tmp_path / "rows.jsonl"
    form = {"choice": ["leftwards", "rightwards"]}
    path.write_text(json.dumps({"turns": ["import os", "import re"], "structured_outputs": form}) + "\n")
    _, second = choose(load_dataset("custom", path), 0, GREEDY, llm.engine, chat=False).prompts
    said = llm.get_tokenizer().decode(second.token_ids)
    assert any(choice in said for choice in form["choice"]), said


@pytest.mark.parametrize("asked", [7, {"choice": ["a"], "regex": "a"}, {"jsn": {}}], ids=repr)
def test_a_form_that_cannot_be_is_named_with_its_row(tmp_path, asked):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "x", "structured_outputs": asked}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1.*structured_outputs") as raised:
        load_dataset("custom", path)
    assert raised.value.code == "SD-E162"


def test_it_takes_no_path(tmp_path):
    with pytest.raises(ConfigError) as raised:
        load_dataset("tools", tmp_path)
    assert raised.value.code == "SD-E164"
