"""What holds of the text with every proposer, for test classes of those whose checkpoint is one `directory`."""

from __future__ import annotations

import pytest
from replaying import ROOMS, continued, tiny_prompts, tiny_truth

from specdec import LLM, SamplingParams


class PlainText:
    """The text of plain decoding; the fixture `start` gives an engine: `start(k, **settings)`."""

    @pytest.mark.parametrize("batch_size", [1, 4, 16])
    def test_in_batches(self, batch_size, start):
        assert continued(start(3), tiny_prompts()[:batch_size]) == tiny_truth()[:batch_size]

    @pytest.mark.parametrize("room", ["chunked", "scarce"])
    def test_however_the_work_is_cut_up(self, room, start):
        llm = start(5, **ROOMS[room])
        assert continued(llm, tiny_prompts()[:6]) == tiny_truth()[:6]
        assert (llm.engine.metrics.counts["num_preemptions"] > 0) == (room == "scarce")

    @pytest.mark.full
    @pytest.mark.parametrize("k", [1, 8])
    @pytest.mark.parametrize("room", ROOMS)
    def test_for_the_shortest_and_the_longest_drafts(self, room, k, start):
        assert continued(start(k, **ROOMS[room]), tiny_prompts()) == tiny_truth()

    def test_up_to_max_model_len(self, start):
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        limit = {"max_model_len": 72, "block_size": 8}
        expected = continued(LLM("tiny", **limit), tiny_prompts()[:3], params)
        assert [len(text) for text in expected] == [72] * 3
        assert continued(start(8, **limit), tiny_prompts()[:3], params) == expected
