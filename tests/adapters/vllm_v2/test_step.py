"""What a step of the V2 runner is on the host, and how drafts and their distributions go back to it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec.adapters.vllm_shared.engine_step import UnreadDrafts
from specdec.adapters.vllm_v2.drafting import put_certain, put_logits
from specdec.adapters.vllm_v2.requests import Requests, Running
from specdec.adapters.vllm_v2.step import StepReader
from specdec.core.proposing.draft_store import DistributionBuffers, StoredDraft, TakenDrafts
from specdec.core.proposing.draft_table import DraftReport

K, V, LONGEST = 3, 11, 12


class Batch:
    """vLLM's requests in their rows, and a batch of them: (row, computed tokens, draft tokens among them, sampled)."""

    def __init__(self, texts, parts):
        self.states = SimpleNamespace(
            device=torch.device("cpu"),
            max_model_len=LONGEST,
            total_len=SimpleNamespace(gpu=torch.tensor([len(text) for text in texts], dtype=torch.int32)),
            all_token_ids=SimpleNamespace(gpu=torch.zeros(len(texts), LONGEST, dtype=torch.int32)),
        )
        for row, text in enumerate(texts):
            self.states.all_token_ids.gpu[row, : len(text)] = torch.tensor(text)
        rows, starts, counts, drafts, sampled = zip(*parts, strict=True)
        self.num_sampled = torch.tensor(sampled, dtype=torch.int32)
        self.batch = SimpleNamespace(
            req_ids=[f"request-{row}" for row in rows],
            num_reqs=len(rows),
            idx_mapping=torch.tensor(rows),
            num_draft_tokens_per_req=np.array(drafts) if any(drafts) else None,
            num_scheduled_tokens=np.array(counts),
            query_start_loc=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
            positions=torch.cat([torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]),
            input_ids=torch.zeros(sum(counts), dtype=torch.int32),
        )
        self.requests = Requests({name: Running([1], None, []) for name in self.batch.req_ids})
        self.reader = StepReader(K, self.states, self.requests)

    def read(self, unread=None):
        return self.reader.read(self.batch, self.num_sampled, (), None, K, unread)


def test_rows_are_read_in_the_order_of_the_batch_and_a_prompt_in_chunks_has_sampled_nothing():
    texts = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * LONGEST]
    step, sampled, _ = Batch(texts, [(2, 8, 2, 0, 2), (0, 2, 3, 0, 1), (1, 0, 2, 0, 0)]).read()
    assert step.request_ids == ("request-2", "request-0", "request-1")
    assert step.starts == [8, 2, 0]
    assert sampled == [[9, 9], [5], []]
    assert step.num_tokens == {"request-2": 2, "request-0": 3, "request-1": 2}


def test_drafts_are_those_of_the_step_before_cut_to_what_was_scheduled():
    batch = Batch([[1, 2, 3, 4, 5, 6]], [(0, 3, 3, 2, 2)])
    batch.requests["request-0"].drafts[:] = [5, 7, 8]
    step, sampled, _ = batch.read()
    assert step.drafts == {"request-0": [5, 7]}
    assert sampled == [[5, 6]]


def test_a_filled_slot_that_was_right_by_chance_is_an_accepted_token():
    batch = Batch([[1, 2, 3, 4, 4, 4, 4]], [(0, 3, 4, 3, 3)])
    batch.requests["request-0"].drafts[:] = [4]
    step, sampled, _ = batch.read()
    assert sampled == [[4, 4, 4]]
    assert step.drafts == {"request-0": [4, 4]}


def test_drafts_that_were_not_read_are_known_with_the_next_step_of_requests_that_go_on():
    known, late = DraftReport(2, 2, 0, [7, 8]), StoredDraft(1, 3, frozenset(), None)
    stored = [StoredDraft(1, 2, frozenset(), known), late, late]
    taken = TakenDrafts([0, 1, 2], stored, [2, 3, 3], None, DistributionBuffers.none())
    numbers = torch.tensor([[0] * 6, [3, 2, 0, 4, 5, -1], [3, 2, 0, 4, 5, -1]])
    names = ["request-1", "request-0", "ended"]
    batch = Batch([[1, 2, 9], [3, 4]], [(0, 2, 1, 0, 1), (1, 0, 1, 0, 0)])
    _, sampled, reports = batch.read(UnreadDrafts(names, torch.arange(3), torch.empty(3, K), numbers, None, taken))
    assert sampled == [[9], []]
    assert reports[0] is known
    assert {name: each.drafts for name, each in batch.requests.items()} == {"request-0": [4, 5], "request-1": [7, 8]}


def test_slots_are_filled_with_a_token_that_can_be_embedded_and_kept_without_it():
    batch = Batch([[1, 2, 9], [3, 4]], [(0, 2, 1, 0, 1), (1, 0, 1, 0, 0)])
    step, sampled, _ = batch.read()
    slots, lengths = batch.reader.keep(step, sampled, [[5, 6], []])
    assert slots.tolist() == [[5, 6, 9], [0, 0, 0]]
    assert lengths.tolist() == [2, 0]
    assert [each.drafts for each in batch.requests.values()] == [[5, 6], []]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_verifier_finds_q_by_row_when_it_divides_by_the_temperature(temperature):
    q = torch.rand(2, K, V).softmax(dim=-1)
    logits = torch.full((4, K, V), 7.0)
    put_logits(logits, torch.tensor([2, 0]), q, torch.full((2,), temperature))
    torch.testing.assert_close((logits[[2, 0]] / temperature).softmax(dim=-1), q)
    assert (logits[[1, 3]] == 7).all(), "requests that skip the step keep theirs"


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_slots_of_requests_without_drafts_are_certain_whatever_stood_in_their_rows(temperature):
    logits, rows, slots = torch.randn(4, K, V), torch.tensor([2, 0]), torch.tensor([[1, 5, 5], [10, 0, 3]])
    others = logits[[1, 3]]
    put_certain(logits, rows, slots)
    q = (logits[rows] / temperature).softmax(dim=-1)
    assert torch.equal(q, torch.nn.functional.one_hot(slots, V).float())
    assert torch.equal(logits[[1, 3]], others)


def test_a_greedy_request_has_certain_slots():
    logits = torch.zeros(1, K, V)
    certain = torch.nn.functional.one_hot(torch.tensor([[4, 5, 5]]), V).float()
    put_logits(logits, torch.tensor([0]), certain, torch.zeros(1))
    assert logits.argmax(dim=-1).tolist() == [[4, 5, 5]]
    assert not logits.isnan().any()


def new(name, tokens, prompt_len, *blocks):
    groups = [[99], list(blocks)]
    return SimpleNamespace(
        req_id=name,
        prefill_token_ids=tokens,
        prompt_len=prompt_len,
        sampling_params=None,
        mm_features=[],
        block_ids=groups,
    )


def test_blocks_are_those_of_the_draft_layers_group_and_new_after_preemption():
    requests = Requests()
    requests.group = 1
    requests.add([new("a", [1, 2, 3], 3, 5, 6)])
    requests.extend(SimpleNamespace(req_ids=["a"], new_block_ids=[([98], [7])]))
    assert requests["a"].blocks == [5, 6, 7]
    requests["a"].drafts[:] = [1]
    requests.end((), ["a"])
    assert requests["a"].drafts == []
    requests.add([new("a", [1, 2, 3, 4], 3, 8)])
    assert requests["a"].blocks == [8]
    assert requests["a"].prompt_token_ids == [1, 2, 3], "outputs are no part of the prompt"
    requests.end(["a"], ())
    assert requests == {}


def test_a_longer_prompt_of_a_request_that_runs_is_the_next_turn_of_a_session():
    requests = Requests()
    requests.add([new("a", [1, 2, 3], 3), new("b", [1], 1)])
    news = [new("a", [1, 2, 3, 4, 5], 5), new("b", [1, 2], 1), new("c", [1], 1)]
    assert requests.with_next_turn(news) == ["a"], "b comes back after preemption, with an output; c is new"


def test_requests_that_vllm_makes_up_have_no_blocks_here():
    requests = Requests()
    requests.group = 1
    requests.extend(SimpleNamespace(req_ids=["_warmup_0_"], new_block_ids=[([98], [7])]))
    assert requests == {}
