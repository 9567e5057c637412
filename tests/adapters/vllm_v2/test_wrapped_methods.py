"""Properties of vLLM's configuration as they are wrapped, on configurations of ours and of others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from specdec.adapters.vllm_v2.plugin import DROPS, KEY, _num_lookahead_tokens, _use_eagle_block_drop

OURS = SimpleNamespace(method="custom_class", model="specdec.adapters.vllm.ngram")
OTHERS = SimpleNamespace(method="ngram", model=None)


@pytest.mark.parametrize("of_vllm", [False, True])
def test_a_configuration_that_was_told_nothing_drops_blocks_as_vllm_says(of_vllm):
    assert _use_eagle_block_drop(lambda speculative: of_vllm, SimpleNamespace()) is of_vllm


@pytest.mark.parametrize("drops", [False, True])
def test_a_configuration_of_ours_drops_its_last_block_where_its_rows_depend_on_the_next_token(drops):
    assert _use_eagle_block_drop(lambda speculative: False, SimpleNamespace(**{DROPS: drops})) is drops


def test_the_slots_past_the_newest_token_are_those_that_were_planned():
    property_of = partial(_num_lookahead_tokens, lambda config: 7)
    planned = {KEY: {"lookahead": 3}}
    assert property_of(SimpleNamespace(speculative_config=OURS, additional_config=planned)) == 3
    assert property_of(SimpleNamespace(speculative_config=OURS, additional_config={})) == 7
    assert property_of(SimpleNamespace(speculative_config=OTHERS, additional_config=planned)) == 7
    assert property_of(SimpleNamespace(speculative_config=None, additional_config={})) == 7
