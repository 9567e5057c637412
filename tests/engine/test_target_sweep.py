"""Of all causal language models of transformers, none is served with text that is not the model's."""

from __future__ import annotations

import json

import pytest
from scripts.small_models import model_types, multimodal_types
from scripts.target_sweep import NEWEST, RECORD, main, verify
from scripts.target_table import PAGE, README, page, sentence
from scripts.target_variants import VARIANTS

pytestmark = pytest.mark.usefixtures("proven_targets")
QUICK = {
    "llama": "equal",
    "gemma2": "equal",  # windows and caps
    "qwen3_moe": "equal",
    "gpt2": "equal",  # tied weights, learned positions
    "granitemoehybrid": "equal",  # all attention; was refused for a key
    "afmoe": "equal",  # was a crash
    "qwen2_moe": "equal",  # was wrong: its window is only in the mask
    "gpt_oss": "equal",  # sinks
    "llama4": "equal",  # chunks, and several modalities
    "qwen2_vl": "equal",  # several modalities, M-RoPE
    "stablelm": "equal",  # its layers do not hand arguments on
    "doge": "refused",  # was wrong: a mask of its own
    "bart": "refused",  # was wrong: no position_ids
    "qwen3_5_text": "equal",  # linear attention
    "mamba": "equal",  # no attention; goes on from a state token by token
    "qwen3_5_text, all linear but the last": "equal",
    "minimax": "refused",  # its state is inside of its attention class
}
KINDS = json.loads(RECORD.read_text())
WITH_NEWEST = json.loads(NEWEST.read_text())
RECORDED = KINDS["types"] | KINDS["multimodal"] | KINDS["variants"]


def test_the_committed_page_is_current():
    assert PAGE.read_text() == page(KINDS, WITH_NEWEST), "python -m scripts.target_table"


def test_the_readme_says_what_the_page_says():
    assert sentence(KINDS) in " ".join(README.read_text().split())


def test_every_registered_type_is_on_the_page_and_none_differs():
    assert sorted(KINDS["types"]) == model_types()
    assert sorted(KINDS["multimodal"]) == multimodal_types()
    assert sorted(KINDS["variants"]) == sorted(VARIANTS)
    assert {each["outcome"] for each in RECORDED.values()} == {"equal", "refused", "not buildable"}
    of_text = KINDS["types"] | KINDS["variants"]
    assert sum(each["outcome"] == "equal" for each in KINDS["types"].values()) >= 115
    assert sum(each["outcome"] == "equal" for each in of_text.values()) >= 140


def test_one_type_takes_the_record_of_no_other(tmp_path):
    record = tmp_path / "targets.json"
    record.write_text(RECORD.read_text().replace(KINDS["transformers"], "5.1.0"))
    before = record.read_text()
    with pytest.raises(SystemExit, match=r"is of transformers 5\.1\.0"):
        main(["llama"], record, again=False)
    assert record.read_text() == before
    record.write_text(RECORD.read_text())
    main(["no_such_type"], record, again=True)
    assert json.loads(record.read_text()) == KINDS


def test_with_the_newest_transformers_none_differs_or_crashes():
    every = WITH_NEWEST["types"] | WITH_NEWEST["multimodal"] | WITH_NEWEST["variants"]
    assert {each["outcome"] for each in every.values()} == {"equal", "refused", "not buildable"}
    assert sorted(WITH_NEWEST["variants"]) == sorted(VARIANTS)
    lost = {name for name, each in RECORDED.items() if each["outcome"] == "equal" != every[name]["outcome"]}
    assert lost == {"llama4"}, "its forward reads an attribute that its outputs do not have"


LONG = [pytest.param(name, marks=pytest.mark.full) for name in RECORDED if name not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_a_type_is_served_as_transformers_computes_it_or_refused(name):
    outcome = verify(name)
    assert outcome.outcome == QUICK.get(name, RECORDED[name]["outcome"])
    assert outcome.code == RECORDED[name]["code"], outcome.reason
