"""Token Recycling: what it learns of kept and rejected rows, whose it is, and that its drafts are accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.plugins.token_recycling import TokenRecyclingProposer
from specdec.sdk import ProposerConfig, RejectedRows, RequestView
from specdec.testing import step_view

K = 3
METHOD = "specdec.plugins.token_recycling:TokenRecyclingProposer"


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def shown(tokens, tops, rejected=(), names=("a",)):
    """A step of one text for each name. tops: the likeliest token after each kept row. rejected: (token, likeliest)."""
    count = len(names)
    view = step_view([tokens] * count, K, request_ids=names)
    top = ints(tops * count)[:, None]
    drafts = ints([token for token, _ in rejected] * count)
    after = ints([best for _, best in rejected] * count)[:, None]
    return replace(
        view,
        kept=replace(view.kept, top_ids=top, top_logprobs=torch.zeros(top.shape)),
        rejected=RejectedRows(
            start=torch.arange(count) * len(rejected),
            num_rejected=ints([len(rejected)] * count),
            positions=torch.zeros_like(drafts),
            token_ids=drafts,
            top_ids=after,
            top_logprobs=torch.zeros(after.shape),
        ),
    )


@pytest.fixture
def proposer():
    proposer = TokenRecyclingProposer(ProposerConfig(num_draft_tokens=K))
    for name, namespace in (("a", "left"), ("b", "left"), ("c", "right")):
        proposer.on_start(RequestView(request_id=name, row=0, generation=1, prompt_token_ids=(), namespace=namespace))
    return proposer


def drafts(proposer, step):
    proposer.observe(step)
    draft = proposer.propose(step)
    return [ids[:n] for ids, n in zip(draft.token_ids.tolist(), draft.lengths.tolist(), strict=True)]


def test_it_follows_the_likeliest_tokens_from_one_to_the_next(proposer):
    assert drafts(proposer, shown([5, 6, 7, 5], [6, 8, 5])) == [[6, 8]]


def test_rejected_rows_teach_too_and_the_text_has_the_last_word(proposer):
    assert drafts(proposer, shown([5, 6, 7], [6, 7], rejected=[(7, 9), (9, 5), (5, 1)])) == [[9, 5, 6]]


def test_where_the_target_computed_no_logits_the_prompt_teaches(proposer):
    assert drafts(proposer, shown([5, 6, 7, 5], [-1, -1, 5])) == [[6, 7, 5]]


def test_requests_learn_from_each_other_within_their_namespace_only(proposer):
    proposer.observe(shown([5, 6, 7, 5], [6, 7, 5]))
    step = shown([5], [], names=("b", "c"))
    assert drafts(proposer, step) == [[6, 7, 5], []]


def test_namespaces_used_longest_ago_are_forgotten():
    options = TokenRecyclingProposer.Options(max_namespaces=1)
    proposer = TokenRecyclingProposer(ProposerConfig(num_draft_tokens=K, options=options))
    for name in ("a", "b"):
        proposer.on_start(RequestView(request_id=name, row=0, generation=1, prompt_token_ids=(), namespace=name))
        proposer.observe(shown([5, 6], [6], names=(name,)))
    proposer.on_finish(RequestView(request_id="a", row=0, generation=1, prompt_token_ids=(), namespace="a"))
    proposer.on_start(RequestView(request_id="c", row=0, generation=1, prompt_token_ids=(), namespace="b"))
    assert drafts(proposer, shown([5], [], names=("c",))) == [[6]]
    assert len(proposer._successors) == 1


def test_text_is_plain_decodings_and_drafts_are_accepted():
    prompts = ["def read_lines(path):\n", "class Stack:\n", "import os\n\ndef main():\n"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = {}
    for method in (None, METHOD):
        llm = LLM("tiny", speculative_config=method and {"method": method}, max_model_len=256)
        found[method] = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert found[METHOD] == found[None]
    assert llm.engine.metrics.acceptance.mean_acceptance_length > 1.5
