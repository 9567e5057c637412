"""`on_verified` shows drafts, accepted tokens and logits of every step, to whoever listens."""

import pytest

from specdec import LLM, SamplingParams
from specdec.sdk import hookimpl
from specdec.sdk.errors import PluginLoadError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


class Listener:
    """Keeps facts; the step itself is borrowed."""

    def __init__(self):
        self.requests = []
        self.choices = []

    @hookimpl
    def on_verified(self, step):
        for each in step.requests:
            rows = step.logits[each.first_row : each.first_row + len(each.token_ids)]
            self.requests.append(each)
            self.choices.append((each.request_id, rows.argmax(-1).tolist()))


def test_logits_of_the_shown_rows_choose_the_committed_tokens():
    listener = Listener()
    llm = LLM("tiny", device="cpu", speculative_config=NGRAM)
    llm.add_hooks(listener)
    outputs = llm.generate(["import os\nimport os\nimport", "def f("], GREEDY)
    assert any(each.draft_token_ids for each in listener.requests)
    for output in outputs:
        shown = [each for each in listener.requests if each.request_id == output.request_id]
        tokens = [token for each in shown for token in each.token_ids]
        assert tuple(tokens) == output.outputs[0].token_ids
        chosen = [token for name, ids in listener.choices if name == output.request_id for token in ids]
        assert chosen == tokens
        length = len(output.prompt_token_ids)
        for each in shown:
            assert each.position == length
            assert list(each.draft_token_ids[: each.num_accepted]) == list(each.token_ids[: each.num_accepted])
            length += len(each.token_ids)


def test_an_object_without_hooks_is_refused():
    llm = LLM("tiny", device="cpu")
    with pytest.raises(PluginLoadError, match="it has no hook") as raised:
        llm.add_hooks(object())
    assert raised.value.code == "SD-E117"
