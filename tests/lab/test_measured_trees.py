"""`benchmarks.trees`: what is saved where, and how sure it is."""

from __future__ import annotations

import json

import pytest
from benchmarks.trees import error_of, main


def test_drafts_of_one_prompt_count_once_in_a_standard_error():
    assert error_of([[1.0, 1.0], [3.0, 3.0]]) == pytest.approx(error_of([[1.0], [3.0]])) == pytest.approx(1)


@pytest.mark.slow
def test_figures_without_the_first_prompts_stay_beside_those_of_all(tmp_path):
    saved = tmp_path / "trees.json"
    name = "medusa, chain 3, temperature 0"
    saved.write_text(json.dumps({"acceptance": {name: "of all"}}))
    main(["--prompts", "4", "--skip", "1", "--only", "medusa, chain", "--length", "4", "--save", str(saved)])
    found = json.loads(saved.read_text())
    assert found["acceptance"] == {name: "of all"}
    assert found["acceptance without the first 1 prompts"][name]["drafts"] == 3
    assert list(found["texts without the first 1 prompts"]) == [f"{name}, 4 tokens"]
    assert "speed" not in found, "no setting of the speeds has this name"
