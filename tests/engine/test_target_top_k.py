"""A proposer that asks for it sees the target's most likely tokens after kept and after rejected rows."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import GREEDY, make_llm
from engine_proposers import Bushes, Scripted
from inside import proposer_of

from specdec import LLM, SamplingParams
from specdec.sdk import ConfigError, Needs, Refusal
from specdec.sdk.extensions import TargetTokens, Trees
from specdec.sdk.trees import path_to

M = 4


class Watching(Scripted):
    """Keeps what each request's rows showed: by (request, position) the token, the ids and the log-probabilities."""

    class Options(Scripted.Options):
        placement: str = "host"
        count: int = M

    @classmethod
    def needs(cls, config, target):
        return Needs(
            placement=config.options.placement, extensions=(TargetTokens(top_k=config.options.count, rejected=True),)
        )

    def __init__(self, config):
        super().__init__(config)
        self.kept, self.rejected = {}, []

    def observe(self, step):
        for b, name in enumerate(step.request_ids):
            first, count = int(step.kept.token_offsets[b]), int(step.kept.num_kept[b])
            for i in range(first, first + count):
                self.kept[name, int(step.kept.positions[i])] = row_of(step.kept, i)
            first, count = int(step.rejected.start[b]), int(step.rejected.num_rejected[b])
            assert count == int(step.num_drafted[b] - step.num_accepted[b])
            if count:
                rows = [row_of(step.rejected, i) for i in range(first, first + count)]
                self.rejected.append((name, int(step.rejected.positions[first]), rows))


def row_of(rows, i):
    return int(rows.token_ids[i]), rows.top_ids[i].tolist(), rows.top_logprobs[i].tolist()


@pytest.fixture(scope="module")
def plain():
    with LLM("tiny", max_model_len=512) as llm:
        yield llm


def likely(llm, token_ids, max_tokens=1):
    """What the target computes after a text: ids and log-probabilities of each output token's place, in order."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=M)
    [output] = llm.generate([{"prompt_token_ids": list(token_ids)}], params)
    return [sorted(each.items(), key=lambda entry: -entry[1])[:M] for each in output.outputs[0].logprobs]


def require_same(row, expected):
    _, ids, logprobs = row
    assert ids == [token_id for token_id, _ in expected]
    assert torch.allclose(torch.tensor(logprobs), torch.tensor([value for _, value in expected]), atol=1e-4)


@pytest.fixture(scope="module", params=["host", "device"])
def watched(request, prompts, plain):
    """Two requests whose drafts are wrong at every third position, and the texts that were generated."""
    asked, params = [{"prompt_token_ids": prompt} for prompt in prompts[:2]], GREEDY.replace(max_tokens=20)
    sequences = [whole(output) for output in plain.generate(asked, params)]
    options = {"sequences": sequences, "wrong_every": 3, "placement": request.param}
    llm = make_llm("test_target_top_k:Watching", options=options, max_num_batched_tokens=37)
    outputs = llm.generate(asked, params)
    assert [whole(output) for output in outputs] == sequences
    texts = {output.request_id: whole(output) for output in outputs}
    return proposer_of(llm), texts, {output.request_id: len(output.prompt_token_ids) for output in outputs}


def whole(output):
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def test_kept_rows_have_the_targets_most_likely_tokens_where_it_computed_logits(watched, plain):
    proposer, texts, lengths = watched
    for name, text in texts.items():
        expected = likely(plain, text[: lengths[name]], len(text) - lengths[name])
        shown = {position: row for (each, position), row in proposer.kept.items() if each == name}
        assert set(range(lengths[name])) <= shown.keys()
        for position, row in shown.items():
            assert row[0] == text[position]
            if position < lengths[name] - 1:
                assert row[1:] == ([-1] * M, [-torch.inf] * M)
            else:
                require_same(row, expected[position - lengths[name] + 1])


def test_rejected_rows_have_what_follows_the_rejected_drafts(watched, plain):
    proposer, texts, _ = watched
    assert len(proposer.rejected) >= 4
    for name, start, rows in proposer.rejected[:4]:
        drafted = [token_id for token_id, _, _ in rows]
        for count, row in enumerate(rows, 1):
            require_same(row, likely(plain, [*texts[name][:start], *drafted[:count]])[0])


class WatchingTrees(Bushes):
    """Keeps what was shown of rejected nodes, with the whole text that each stands for."""

    needs = Needs(
        extensions=(
            Trees(),
            TargetTokens(top_k=M, rejected=True),
        )
    )

    def __init__(self, config):
        super().__init__(config)
        self.trees, self.rejected = {}, []

    def observe(self, step):
        rejected = step.rejected
        for b, name in enumerate(step.request_ids):
            accepted = int(step.num_accepted[b])
            before = int(step.committed_length[b]) - accepted - 1
            tree = self.trees.pop((name, before), [])[: int(step.num_drafted[b])]
            beside = set(range(len(tree))) - set(step.accepted_nodes[b, :accepted].tolist())
            expected = sorted(self.facts(name, before, tree, node) for node in beside)
            first, count = int(rejected.start[b]), int(rejected.num_rejected[b])
            rows = [(int(rejected.positions[i]), *row_of(rejected, i)) for i in range(first, first + count)]
            assert sorted(row[:2] for row in rows) == [each[:2] for each in expected]
            pairs = zip(sorted(rows, key=lambda row: row[:2]), expected, strict=True)
            known = [row[:2] for row in rows]  # two nodes may have one token at one depth
            self.rejected += [(row, text) for row, (*_, text) in pairs if known.count(row[:2]) == 1]

    def facts(self, name, before, tree, node):
        path = [tree[each][1] for each in path_to(node, [parent for parent, _ in tree])]
        return before + len(path) - 1, tree[node][1], [*self.known[name][:before], *path]

    def tree(self, request_id, length, budget):
        self.trees[request_id, length] = super().tree(request_id, length, budget)
        return self.trees[request_id, length]


def test_rejected_nodes_of_trees_are_shown_with_what_follows_them(prompts, plain):
    asked, params = [{"prompt_token_ids": prompt} for prompt in prompts[:2]], GREEDY.replace(max_tokens=20)
    sequences = [whole(output) for output in plain.generate(asked, params)]
    llm = make_llm("test_target_top_k:WatchingTrees", k=8, options={"sequences": sequences})
    assert [whole(output) for output in llm.generate(asked, params)] == sequences
    found = {tuple(text): row[1:] for row, text in proposer_of(llm).rejected}
    assert len(found) >= 12
    for text in list(found)[::3]:
        require_same(found[text], likely(plain, text)[0])


def test_bias_and_penalties_are_not_in_it(prompts, plain):
    llm = make_llm("test_target_top_k:Watching", options={"sequences": ()})
    [best, second] = [token_id for token_id, _ in likely(plain, prompts[0])[0][:2]]
    params = GREEDY.replace(max_tokens=2, logit_bias={best: -100.0}, repetition_penalty=1.3)
    [output] = llm.generate([{"prompt_token_ids": prompts[0]}], params)
    [row] = [row for (_, position), row in proposer_of(llm).kept.items() if position == len(prompts[0]) - 1]
    assert output.outputs[0].token_ids[0] != best
    require_same(row, likely(plain, prompts[0])[0])
    assert row[1][:2] == [best, second]


def test_more_than_the_vocabulary_is_refused_at_start():
    with pytest.raises(Refusal, match="4097 most likely tokens, and there are 4096"):
        make_llm("test_target_top_k:Watching", options={"count": 4097})


def test_rejected_rows_come_with_a_number():
    with pytest.raises(ConfigError, match="top_k"):
        TargetTokens(rejected=True)


def test_rejected_rows_of_trees_are_for_the_host():
    with pytest.raises(ConfigError, match="rejected nodes of trees are shown on the host"):
        Needs(
            placement="device",
            extensions=(
                TargetTokens(top_k=1, rejected=True),
                Trees(),
            ),
        )


class Careless(Scripted):
    """Reads what it did not declare."""

    def observe(self, step):
        step.rejected.token_ids.tolist()


def test_reading_it_undeclared_names_the_declaration(prompts):
    llm = make_llm("test_target_top_k:Careless")
    with pytest.raises(Exception, match=r"Needs\(extensions=\(TargetTokens\(top_k=8, rejected=True"):
        llm.generate([{"prompt_token_ids": prompts[0]}], GREEDY)
