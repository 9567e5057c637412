"""Drafts and their laws reach verification row by row, in whatever order the batch has, exactly once."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import counter, make_llm, proposer_of, run

from specdec import SamplingParams
from specdec.core.proposing.draft_store import DraftStore, LawBuffers
from specdec.core.rejection import sampler
from specdec.sdk import DraftLaw, LawKind

ROWS, K, V, M = 4, 3, 5, 2
A, B, C = 3, 0, 2  # rows of the requests a, b, c


def store(form="dense", t2d=None):
    width = M if form == "sparse" else V
    return DraftStore(LawBuffers.allocate(form, (ROWS, K, width), t2d, torch.device("cpu")))


def dense_law(kinds, seed=0):
    """Probabilities and logits for every row, different everywhere."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.tensor(kinds, dtype=torch.uint8)
    probs = torch.rand(len(kinds), K, V, generator=generator).softmax(-1)
    logits = torch.randn(len(kinds), K, V, generator=generator)
    return DraftLaw(kind=kind, probs=probs, logits=logits)


def lengths(drafts, rows, generation=1):
    return [drafts.length(row, generation) for row in rows]


def test_lengths_two_none_one_come_back_in_any_order():
    drafts = store()
    law = dense_law([LawKind.DENSE_PROBS] * 3)
    drafts.put([A, B, C], [1, 1, 1], [[7, 8], [], [9]], law)
    assert lengths(drafts, [A, B, C]) == [2, 0, 1]
    taken = {row: drafts.take(row, 1, K) for row in (C, A, B)}
    assert taken[B] is None
    assert (taken[A].token_ids, taken[C].token_ids) == ([7, 8], [9])
    laws = drafts.laws([C, A], [taken[C].kind, taken[A].kind], 2)
    assert laws.probs.shape == (2, 2, V)
    assert torch.equal(laws.probs[0, :1], law.probs[2, :1])
    assert torch.equal(laws.probs[1, :2], law.probs[0, :2])


def test_a_draft_is_consumed_exactly_once():
    drafts = store()
    drafts.put([A], [1], [[7, 8]], None)
    assert drafts.take(A, 1, K).token_ids == [7, 8]
    assert drafts.take(A, 1, K) is None
    assert drafts.length(A, 1) == 0


def test_a_draft_cut_to_nothing_is_consumed_too():
    drafts = store()
    drafts.put([A], [1], [[7, 8]], None)
    assert drafts.take(A, 1, 0) is None
    assert drafts.take(A, 1, K) is None


def test_a_draft_cut_short_keeps_its_beginning_and_its_law():
    drafts = store()
    law = dense_law([LawKind.DENSE_PROBS])
    drafts.put([A], [1], [[7, 8, 9]], law)
    taken = drafts.take(A, 1, 2)
    assert taken.token_ids == [7, 8]
    assert torch.equal(drafts.laws([A], [taken.kind], 2).probs[0], law.probs[0, :2])


def test_a_request_that_skips_a_step_keeps_draft_and_law():
    drafts = store()
    first, second = dense_law([LawKind.DENSE_PROBS] * 2, seed=1), dense_law([LawKind.DENSE_LOGITS], seed=2)
    drafts.put([A, B], [1, 1], [[1, 2, 3], [4]], first)
    assert drafts.take(A, 1, K).token_ids == [1, 2, 3]  # B is not scheduled
    drafts.put([A], [1], [[5, 6]], second)
    kept, fresh = drafts.take(B, 1, K), drafts.take(A, 1, K)
    laws = drafts.laws([B, A], [kept.kind, fresh.kind], 2)
    assert laws.kind.tolist() == [LawKind.DENSE_PROBS, LawKind.DENSE_LOGITS]
    assert torch.equal(laws.probs[0, :1], first.probs[1, :1])
    assert torch.equal(laws.logits[1, :2], second.logits[0, :2])


def test_a_row_that_changed_hands_never_meets_the_old_draft():
    drafts = store()
    drafts.put([A], [1], [[7, 8]], None)
    assert drafts.length(A, 2) == 0
    assert drafts.take(A, 2, K) is None
    drafts.put([A], [2], [[9]], None)
    assert drafts.take(A, 2, K).token_ids == [9]


def test_dropped_drafts_are_gone():
    drafts = store()
    drafts.put([A, B], [1, 1], [[7], [8]], None)
    drafts.drop(A)
    drafts.drop(C)
    assert lengths(drafts, [A, B]) == [0, 1]


def test_an_empty_draft_replaces_what_was_there():
    drafts = store()
    drafts.put([A], [1], [[7]], None)
    drafts.put([A], [1], [[]], None)
    assert drafts.take(A, 1, K) is None


def test_every_kind_of_dense_law_mixes_in_one_batch():
    drafts = store()
    kinds = [LawKind.DENSE_LOGITS, LawKind.ONE_HOT, LawKind.DENSE_PROBS]
    law = dense_law(kinds)
    drafts.put([A, B, C], [1, 1, 1], [[1, 2, 3], [4], [5, 6]], law)
    order = [B, C, A]
    taken = [drafts.take(row, 1, K) for row in order]
    laws = drafts.laws(order, [each.kind for each in taken], K)
    assert laws.kind.tolist() == [LawKind.ONE_HOT, LawKind.DENSE_PROBS, LawKind.DENSE_LOGITS]
    assert torch.equal(laws.probs[1, :2], law.probs[2, :2])
    assert torch.equal(laws.logits[2], law.logits[0])


def test_sparse_laws_are_stored_by_row():
    drafts = store("sparse")
    ids = torch.arange(2 * K * M).view(2, K, M) % V
    probs = torch.rand(2, K, M, generator=torch.Generator().manual_seed(0))
    law = DraftLaw(kind=torch.full((2,), LawKind.SPARSE, dtype=torch.uint8), sparse_ids=ids, sparse_probs=probs)
    drafts.put([C, A], [1, 1], [[1, 2, 3], [4]], law)
    taken = [drafts.take(row, 1, K) for row in (A, C)]
    laws = drafts.laws([A, C], [each.kind for each in taken], K)
    assert torch.equal(laws.sparse_ids[1], ids[0])
    assert torch.equal(laws.sparse_probs[0, :1], probs[1, :1])
    assert laws.probs is None
    assert laws.logits is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_laws_are_kept_as_float32(dtype):
    drafts = store()
    law = DraftLaw(
        kind=torch.tensor([LawKind.DENSE_PROBS], dtype=torch.uint8), probs=torch.full((1, K, V), 0.25, dtype=dtype)
    )
    drafts.put([A], [1], [[1]], law)
    assert drafts.laws([A], [drafts.take(A, 1, K).kind], 1).probs.dtype == torch.float32


def test_drafts_without_law_give_no_laws():
    drafts = store()
    drafts.put([A, B], [1, 1], [[1], [2]], None)
    kinds = [drafts.take(row, 1, K).kind for row in (A, B)]
    assert drafts.laws([A, B], kinds, 1) is None


def test_a_row_without_a_law_is_counted_and_changes_no_other():
    drafts = store()
    drafts.put([A, B], [1, 1], [[1], [2]], dense_law([LawKind.DENSE_PROBS, LawKind.ONE_HOT]))
    kinds = [drafts.take(row, 1, K).kind for row in (A, B)]
    assert kinds == [LawKind.DENSE_PROBS, LawKind.ONE_HOT]
    assert drafts.num_one_hot_fallbacks == 1


def test_a_row_without_a_draft_is_no_fallback():
    drafts = store()
    drafts.put([A, B], [1, 1], [[1], []], dense_law([LawKind.DENSE_PROBS, LawKind.ONE_HOT]))
    assert drafts.num_one_hot_fallbacks == 0


def test_tensors_of_a_kind_that_no_row_has_are_not_looked_at():
    drafts = store()
    law = DraftLaw(
        kind=torch.tensor([LawKind.DENSE_PROBS], dtype=torch.uint8),
        probs=torch.full((1, K, V), 0.2),
        logits=torch.zeros(1, K, V + 7),
    )
    drafts.put([A], [1], [[1]], law)
    assert torch.equal(drafts.laws([A], [drafts.take(A, 1, K).kind], 1).probs[0, 0], law.probs[0, 0])


def test_one_hot_storage_takes_no_memory():
    buffers = LawBuffers.allocate("one_hot", (ROWS, K, V), None, torch.device("cpu"))
    assert buffers.dense is None
    assert buffers.sparse_ids is None
    assert buffers.sparse_probs is None


class Spy:
    """Passes every batch on to verification and keeps what it was given, by (request seed, position)."""

    def __init__(self):
        self.seen = {}
        self.num_batches_with_laws = 0

    def verify(self, logits, cu_rows, drafts, sampling):
        laws = drafts.laws
        self.num_batches_with_laws += laws is not None
        for b, key in enumerate(zip(sampling.seed.tolist(), sampling.position.tolist(), strict=True)):
            count = int(drafts.lengths[b])
            if count:
                kind = LawKind.ONE_HOT if laws is None else LawKind(int(laws.kind[b]))
                assert key not in self.seen, "a draft is verified twice"
                self.seen[key] = (drafts.token_ids[b, :count].tolist(), kind, self.law(laws, kind, b, count))
        return sampler.verify(logits, cu_rows, drafts, sampling)

    @staticmethod
    def law(laws, kind, b, count):
        """The row's law as dense probabilities [count, V]; None for one-hot."""
        if kind is LawKind.ONE_HOT:
            return None
        if kind is LawKind.SPARSE:
            dense = torch.zeros(count, 4096)
            return dense.scatter_(1, laws.sparse_ids[b, :count].clamp(min=0), laws.sparse_probs[b, :count])
        probs = laws.probs if kind is LawKind.DENSE_PROBS else laws.logits.softmax(-1)
        return probs[b, :count]


SAMPLED = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
TIGHT = {"num_kv_blocks": 13, "max_num_batched_tokens": 60}


def run_with_spy(monkeypatch, prompts, sequences, *, proposer="DenseLaws", kind="probs", params=None, **settings):
    spy = Spy()
    method = settings.pop("draft_sample_method", "probabilistic")
    speculative = {"draft_sample_method": method}
    llm = make_llm(proposer, options={"sequences": sequences, "kind": kind}, speculative=speculative, **settings)
    monkeypatch.setattr(llm.engine.parts.runner, "_judge", spy.verify)
    for seed, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, (params or [SAMPLED] * len(prompts))[seed].replace(seed=seed), str(seed))
        llm.engine.step()  # arrivals one by one: batches of every size and order
    run(llm.engine)
    return llm, spy


@pytest.mark.parametrize("kind", ["probs", "logits", "mixed", "sparse"])
@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["roomy", "preempting"])
def test_the_law_that_is_verified_is_the_law_that_was_reported(kind, settings, monkeypatch, prompts, sequences):
    proposer = "SparseLaws" if kind == "sparse" else "DenseLaws"
    llm, spy = run_with_spy(monkeypatch, prompts[:4], sequences, proposer=proposer, kind=kind, **settings)
    reported = proposer_of(llm).reported
    assert len(spy.seen) > 20
    assert len({kind_seen for _, kind_seen, _ in spy.seen.values()}) == (3 if kind == "mixed" else 1)
    for (seed, position), (token_ids, kind_seen, law) in spy.seen.items():
        kind_reported, drafted, law_reported = reported[str(seed), position]
        assert token_ids == drafted[: len(token_ids)]
        assert kind_seen == kind_reported
        if law is not None:
            torch.testing.assert_close(law, law_reported[: len(token_ids)], rtol=1e-5, atol=1e-8)
    assert (counter(llm, "num_preemptions") > 0) == bool(settings)


def test_an_all_greedy_batch_stores_and_gathers_no_law(monkeypatch, prompts, sequences):
    greedy = [SAMPLED.replace(temperature=0)] * 3
    llm, spy = run_with_spy(monkeypatch, prompts[:3], sequences, params=greedy)
    assert spy.seen
    assert spy.num_batches_with_laws == 0
    assert counter(llm, "one_hot_fallback_rows") == 0


def test_greedy_drafting_stores_and_gathers_no_law(monkeypatch, prompts, sequences):
    llm, spy = run_with_spy(monkeypatch, prompts[:3], sequences, draft_sample_method="greedy")
    assert spy.seen
    assert spy.num_batches_with_laws == 0
    assert counter(llm, "one_hot_fallback_rows") == 0


def test_greedy_and_sampled_requests_share_a_batch_with_laws(monkeypatch, prompts, truth, sequences):
    params = [SAMPLED, SAMPLED.replace(temperature=0)] * 2
    llm, spy = run_with_spy(monkeypatch, prompts[:4], sequences, params=params)
    assert spy.num_batches_with_laws > 0
    reported = proposer_of(llm).reported
    for (seed, position), (token_ids, _, _) in spy.seen.items():
        assert token_ids == reported[str(seed), position][1][: len(token_ids)]


def test_only_one_hot_rows_of_a_mixed_proposer_are_counted_as_fallbacks(monkeypatch, prompts, sequences):
    llm, _ = run_with_spy(monkeypatch, prompts[:3], sequences, kind="mixed")
    stored = [kind for kind, drafted, _ in proposer_of(llm).reported.values() if drafted]
    assert counter(llm, "one_hot_fallback_rows") == stored.count(LawKind.ONE_HOT) > 0
