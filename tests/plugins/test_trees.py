"""Packaged drafters that draft trees: the text of plain decoding, in fewer steps than their chains take."""

from __future__ import annotations

import pytest
from mtp_checkpoints import QWEN, fitted_module, tiny_target
from plugin_helpers import TargetStates
from replaying import tiny_truth

from specdec import LLM, SamplingParams
from specdec.sdk import ConfigError, Refusal

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True, seed=3)
TEXTS = ["def read(path):\n    with open(path) as", "The quick brown fox jumps over", "import os\n\nfor name in os."]
DEPTHS = {"tiny/eagle3": 5, "tiny/eagle": 5, "tiny/dflash": 7, "tiny/medusa": 3, "tiny/draft": 4}
DRAWN = {"draft_sample_method": "probabilistic"}


def made(model=None, nodes=None, **more):
    config = None
    if model is not None:
        config = {"model": model, "num_speculative_tokens": DEPTHS[model], **more}
        config |= {} if nodes is None else {"max_nodes": nodes}
    return LLM("tiny", speculative_config=config, max_model_len=256, max_num_seqs=4)


def generated(llm, params=GREEDY):
    outputs = llm.generate(TEXTS, params)
    steps = sum(each.outputs[0].spec_decode_metrics["num_target_steps"] for each in outputs)
    return [list(each.outputs[0].token_ids) for each in outputs], steps


@pytest.fixture(scope="module")
def plain():
    llm = made()
    return {params: generated(llm, params)[0] for params in (GREEDY, SEEDED)}


@pytest.mark.slow
@pytest.mark.parametrize("model", DEPTHS)
def test_a_tree_gives_plain_text_in_fewer_steps_than_a_chain(model, plain):
    chain, tree = made(model), made(model, 16)
    _, steps_of_chain = generated(chain)
    for params in (GREEDY, SEEDED):
        texts, steps = generated(tree, params)
        assert texts == plain[params]
        if params is GREEDY:
            assert steps < steps_of_chain


@pytest.mark.slow
@pytest.mark.parametrize("model", DEPTHS)
def test_a_drawn_tree_takes_fewer_steps_than_a_drawn_chain_and_keeps_greedy_text(model, plain):
    """Sampled and greedy requests in one step. A request's drafts depend on no other, so neither does its text."""
    chain, tree = made(model, **DRAWN), made(model, 16, **DRAWN)
    steps = {}
    for name, llm in (("chain", chain), ("tree", tree)):
        steps[name] = sum(generated(llm, SEEDED.replace(seed=seed))[1] for seed in range(3))
        assert generated(llm)[0] == plain[GREEDY]
    assert steps["tree"] < steps["chain"]
    mixed = tree.generate(TEXTS, [SEEDED, GREEDY, SEEDED])
    texts = [list(each.outputs[0].token_ids) for each in mixed]
    alone = generated(tree, SEEDED)[0]
    assert texts == [alone[0], plain[GREEDY][1], alone[2]]


@pytest.mark.full
def test_a_module_of_the_target_drafts_trees(tmp_path):
    """MTP: chains and trees of its single module, one-hot and drawn."""
    module = fitted_module(TargetStates(), tiny_truth()[3:9])
    target = tiny_target(tmp_path / "target", module.tensors(QWEN, 0), mtp_num_hidden_layers=1)

    def engine(**more):
        config = {"method": "mtp", "num_speculative_tokens": 3, **more} if more else None
        return LLM(str(target), speculative_config=config, max_model_len=256, max_num_seqs=4)

    plain = engine()
    texts = {params: generated(plain, params)[0] for params in (GREEDY, SEEDED)}
    chain, one_hot, drawn = engine(method="mtp"), engine(max_nodes=12), engine(max_nodes=12, **DRAWN)
    _, steps_of_chain = generated(chain)
    for params in (GREEDY, SEEDED):
        found, steps = generated(one_hot, params)
        assert found == texts[params]
        assert params is SEEDED or steps < steps_of_chain
    assert generated(drawn)[0] == texts[GREEDY]
    assert generated(drawn, SEEDED)[1] < sum(map(len, texts[SEEDED]))


def test_a_tree_is_as_large_and_as_deep_as_asked():
    sizes: set[int] = set()
    engine = made("tiny/eagle3", 16).engine
    engine.add_request([5, 6, 7, 8], GREEDY)
    while engine.has_unfinished_requests:
        for each in engine.step():
            sizes.add(each.num_drafted)
            if each.accepted_nodes is not None:
                assert len(each.accepted_nodes) <= 5
    assert max(sizes) == 16


def test_near_the_end_of_the_context_trees_are_cut(plain):
    llm = LLM(
        "tiny",
        speculative_config={"model": "tiny/eagle3", "num_speculative_tokens": 5, "max_nodes": 16},
        max_model_len=48,
    )
    prompt = {"prompt_token_ids": list(range(5, 25))}
    short = LLM("tiny", max_model_len=48)
    params = GREEDY.replace(max_tokens=100)
    found, expected = (list(each.generate([prompt], params)[0].outputs[0].token_ids) for each in (llm, short))
    assert found == expected
    assert len(found) == 28


def test_a_proposer_of_chains_refuses_a_number_of_nodes():
    method = "specdec.plugins.layer_skip.proposer:LayerSkipProposer"
    with pytest.raises(Refusal, match="max_nodes is 16, and this proposer drafts chains"):
        LLM("tiny", speculative_config={"method": method, "num_speculative_tokens": 4, "max_nodes": 16})


@pytest.mark.parametrize("nodes", [0, 65, "16"])
def test_a_number_of_nodes_out_of_range_is_refused(nodes):
    with pytest.raises(ConfigError, match="max_nodes"):
        made("tiny/eagle3", nodes)


def test_a_target_with_states_refuses_trees_with_the_reason():
    with pytest.raises(Refusal, match="keep a state, which has one successor"):
        LLM("tiny/hybrid", speculative_config={"method": "mtp", "num_speculative_tokens": 3, "max_nodes": 8})


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_trees_of_seen_text_branch_where_several_tokens_followed(method):
    config = {"method": method, "num_speculative_tokens": 6, "max_nodes": 12}
    llm = LLM("tiny", speculative_config=config, max_model_len=256)
    prompt = [9, 5, 6, 7, 9, 5, 8, 3, 9, 5, 6, 4, 9, 5]
    plain = LLM("tiny", max_model_len=256)
    found, expected = (each.generate([{"prompt_token_ids": prompt}], GREEDY)[0].outputs[0] for each in (llm, plain))
    assert found.token_ids == expected.token_ids
    assert found.spec_decode_metrics["num_draft_tokens"] > found.spec_decode_metrics["num_spec_steps"]


def test_followers_of_a_context_come_with_their_shares():
    from specdec.plugins.suffix.automaton import SuffixAutomaton

    automaton = SuffixAutomaton(4)
    automaton.extend([9, 5, 6, 9, 5, 8, 9, 5, 6, 9, 5])
    context = next(automaton.contexts(automaton.tail))
    assert context.length >= 2
    shares = {token: share for token, share, _ in automaton.followers(context)}
    assert max(shares, key=shares.get) in (6, 8)
    assert sum(shares.values()) == pytest.approx(1)
