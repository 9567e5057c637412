"""Bias, min_tokens and penalties of all rows at once do what they do row by row, token by token."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.core.request.request import Request
from specdec.core.runner.sampling import adjust_logits, likely, read_likely
from specdec.sdk import Draft

V = 50
PARAMS = {
    "bias": {"logit_bias": {3: 2.5, 7: -100.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (5, 9)},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.4},
    "none": {},
}
PARAMS["all"] = {name: value for each in PARAMS.values() for name, value in each.items()}


def request(params, output=(4, 4, 3)):
    made = Request(
        request_id="a",
        prompt_token_ids=[1, 3, 3, 8],
        params=SamplingParams(**params),
        seed=0,
        max_total_tokens=100,
        end_token_ids=frozenset(params.get("stop_token_ids", ())),
        detokenizer=None,
    )
    made.commit(list(output))
    return made


def plainly_adjusted(row, params, prompt, outputs):
    """A row of logits as a list, one rule after the other."""
    row = row.clone()
    for token_id, bias in (params.get("logit_bias") or {}).items():
        row[token_id] += bias
    if len(outputs) < params.get("min_tokens", 0):
        for token_id in params["stop_token_ids"]:
            row[token_id] = -torch.inf
    for token_id in {*prompt, *outputs}:
        factor = params.get("repetition_penalty", 1)
        row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id, count in Counter(outputs).items():
        row[token_id] -= params.get("frequency_penalty", 0) * count + params.get("presence_penalty", 0)
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PARAMS)
def test_rows_are_adjusted_as_one_by_one(name, dtype):
    before = torch.randn(7, V, generator=torch.Generator().manual_seed(1)).to(dtype)
    asked, other, ended = request(PARAMS[name]), request({}), request(PARAMS["all"])
    found = before.clone()
    adjust_logits(
        found, [asked, other, ended, asked], [0, 3, 5, 5, 7], torch.tensor([[4, 8], [6, -1], [-1, -1], [11, -1]])
    )
    expected = before.clone()
    for drafts, first in (([4, 8], 0), ([11], 5)):
        for i in range(len(drafts) + 1):
            expected[first + i] = plainly_adjusted(
                before[first + i], PARAMS[name], [1, 3, 3, 8], [4, 4, 3, *drafts[:i]]
            )
    close = {"atol": 0.03, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-6, "rtol": 1e-6}
    torch.testing.assert_close(found, expected, **close)
    assert torch.equal(found == before, expected == before), "other tokens are not touched"


def test_logprobs_are_those_of_the_largest_and_of_what_was_emitted():
    logprobs = torch.randn(3, V, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    emitted = torch.tensor([4, 9, -1, -1])
    found = read_likely({"a": likely(logprobs, emitted, 2), "b": likely(logprobs[:1], emitted, 0)})
    for row, token_id in ((0, 4), (1, 9)):
        top = logprobs[row].topk(2)
        expected = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) | {
            token_id: logprobs[row, token_id].item()
        }
        assert found["a"][row] == expected
    assert found["b"] == [{4: logprobs[0, 4].item()}]


class Sevens:
    """Drafts token 7 again and again."""

    def __init__(self, config):
        pass

    def propose(self, step):
        return Draft.from_lists([[7] * budget for budget in step.budget.tolist()], step.width)


def test_a_drafted_token_that_a_mask_forbids_stays_and_is_rejected():
    """Cutting a draft at a token by its value would change the distribution of what follows."""
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={7: -100.0})
    with LLM("tiny", speculative_config={"method": f"{__name__}:Sevens", "num_speculative_tokens": 2}) as llm:
        updates = list(llm.stream(["def f("], asked))
    assert [each.draft_token_ids for each in updates] == [(), (7, 7), (7, 7), (7, 7), (7,), ()]
    assert [each.num_accepted for each in updates] == [0] * 6
