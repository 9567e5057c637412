"""Token Recycling: what it learns of kept and rejected rows, whose it is, and that its drafts are accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.plugins.token_recycling import TokenRecyclingProposer
from specdec.sdk import ConfigError, ProposerConfig, RequestView
from specdec.sdk.extensions import RejectedTokens
from specdec.testing import step_view
from specdec.testing.fakes import fake_target_info

K = 3
PROMPTS = ["def read_lines(path):\n", "class Stack:\n", "import os\n\ndef main():\n"]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
METHOD = "specdec.plugins.token_recycling:TokenRecyclingProposer"


def ints(values):
    return torch.tensor(values, dtype=torch.int64)


def shown(tokens, tops, rejected=(), names=("a",)):
    """A step of one text for each name. tops: the likeliest token after each. rejected: (token, likeliest)."""
    count = len(names)
    view = step_view([tokens] * count, K, request_ids=names)
    top = ints(tops * count)[:, None]
    drafts = ints([token for token, _ in rejected] * count)
    after = ints([best for _, best in rejected] * count)[:, None]
    return replace(
        view,
        kept=replace(view.kept, top_ids=top, top_logprobs=torch.zeros(top.shape)),
        rejected=RejectedTokens(
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
        proposer.on_start(RequestView(request_id=name, slot=0, generation=1, prompt_token_ids=(), namespace=namespace))
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


def test_namespaces_used_longest_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr("specdec.plugins.token_recycling.proposer.MOST_NAMESPACES", 1)
    proposer = TokenRecyclingProposer(ProposerConfig(num_draft_tokens=K))
    for name in ("a", "b"):
        proposer.on_start(RequestView(request_id=name, slot=0, generation=1, prompt_token_ids=(), namespace=name))
        proposer.observe(shown([5, 6], [6], names=(name,)))
    proposer.on_finish(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=(), namespace="a"))
    proposer.on_start(RequestView(request_id="c", slot=0, generation=1, prompt_token_ids=(), namespace="b"))
    assert drafts(proposer, shown([5], [], names=("c",))) == [[6]]
    assert len(proposer._successors) == 1


def of_trees(**more):
    config = ProposerConfig(num_draft_tokens=2, max_nodes=4, **more)
    proposer = TokenRecyclingProposer(config)
    proposer.on_start(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=(), namespace=""))
    return proposer


def tree(proposer, newest, budget=4):
    step = replace(shown([newest], [], names=("a",)), budget=ints([budget]), width=4)
    draft = proposer.propose(step)
    length = int(draft.lengths[0])
    return list(zip(draft.parents[0, :length].tolist(), draft.token_ids[0, :length].tolist(), strict=True))


def seen(proposer, tokens, tops):
    """Observe one text whose rows have several likeliest tokens each."""
    step = shown(tokens, [0] * (len(tokens) - 1))
    top = ints(tops)
    proposer.observe(replace(step, kept=replace(step.kept, top_ids=top, top_logprobs=torch.zeros(top.shape))))


def test_a_tree_has_the_successors_of_each_of_its_tokens():
    proposer = of_trees()
    seen(proposer, [5, 6, 7, 5], [[6, 8], [7, 9], [5, 1]])
    assert tree(proposer, 5) == [(-1, 6), (0, 7), (-1, 8), (0, 9)], "6 before 8, and what follows 6 before what is less"


def test_what_follows_in_the_prompt_goes_before_the_successors_that_are_known():
    proposer = of_trees()
    seen(proposer, [5, 6, 5], [[6, 8], [5, 1]])
    seen(proposer, [5, 8, 5], [[-1, -1], [-1, -1]])
    assert tree(proposer, 5, budget=2) == [(-1, 8), (0, 5)]
    assert proposer._successors[""][5] == [8, 6]


@pytest.mark.parametrize("more", [{}, {"num_speculative_tokens": 5, "max_nodes": 16}], ids=["chain", "tree"])
def test_text_is_plain_decodings_and_drafts_are_accepted(more, plain):
    llm = LLM("tiny", speculative_config={"method": METHOD, **more}, max_model_len=256)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == plain
    assert llm.engine.metrics.acceptance.mean_acceptance_length > (1.8 if more else 1.5)


@pytest.fixture(scope="module")
def plain():
    return [each.outputs[0].token_ids for each in LLM("tiny", max_model_len=256).generate(PROMPTS, PARAMS)]


def bound(vocab_size=64):
    proposer = TokenRecyclingProposer(ProposerConfig(num_draft_tokens=K))
    proposer.bind(fake_target_info(vocab_size=vocab_size), None)
    return proposer


def test_what_was_saved_is_loaded_by_namespace(proposer, tmp_path):
    proposer.bind(fake_target_info(vocab_size=64), None)
    drafted = drafts(proposer, shown([1, 2, 3], [2, 3], rejected=[(3, 8)]))
    assert drafted == [[8]]
    proposer.save(tmp_path)
    other = bound()
    other.load(tmp_path)
    assert other._successors == proposer._successors
    other.on_start(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=(), namespace="left"))
    assert drafts(other, shown([3], [])) == drafted
    other.on_start(RequestView(request_id="a", slot=0, generation=1, prompt_token_ids=(), namespace="right"))
    assert drafts(other, shown([3], [])) == [[]], "another tenant's are not used"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ('{"format": 1, "vocab_size": 65}', "this target needs"),
        ('{"format": 1, "vocab_size": 64}\n["a", [[1, 64]]]', "line 2"),
        ('{"format": 1, "vocab_size": 64}\n["a", [[1]]]', "line 2"),
        ('{"format": 1, "vocab_size": 64}\n["a", {"1": [2]}]', "line 2"),
    ],
)
def test_successors_that_do_not_fit_are_refused(tmp_path, content, told):
    if content is not None:
        (tmp_path / "successors.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="SD-E180") as raised:
        bound().load(tmp_path)
    assert told in str(raised.value)


def test_a_second_run_knows_what_the_first_one_learned(tmp_path):
    config = {"method": METHOD, "num_speculative_tokens": K, "state_dir": tmp_path / "state"}
    accepted = []
    for _ in range(2):
        with LLM("tiny", speculative_config=config) as llm:
            output = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0]
            accepted.append(output.spec_decode_metrics["num_accepted_draft_tokens"])
    assert accepted[1] > accepted[0]
