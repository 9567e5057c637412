"""Drafts and their distributions reach verification row by row, in whatever order the batch has, exactly once."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import counter, make_llm, run
from inside import proposer_of, verify_with

from specdec import SamplingParams
from specdec.core.proposing.draft_store import DistributionBuffers, DraftStore
from specdec.core.proposing.draft_table import CheckedDraft, DraftReport
from specdec.core.rejection import sampler
from specdec.sdk import DistributionKind, DraftDistribution

ROWS, K, V, M = 4, 3, 5, 2
A, B, C = 3, 0, 2  # rows of the requests a, b, c


def store(form="dense", t2d=None):
    width = M if form == "sparse" else V
    return DraftStore(DistributionBuffers.allocate(form, (ROWS, K, width), t2d, torch.device("cpu")))


def dense_distribution(kinds, seed=0):
    """Probabilities and logits for every row, different everywhere."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.tensor(kinds, dtype=torch.uint8)
    probs = torch.rand(len(kinds), K, V, generator=generator).softmax(-1)
    logits = torch.randn(len(kinds), K, V, generator=generator)
    return DraftDistribution(kind=kind, probs=probs, logits=logits)


def put(drafts, rows, generations, token_ids, distribution):
    """Store drafts that the host has read."""
    kinds = [DistributionKind.ONE_HOT] * len(rows) if distribution is None else distribution.kind.tolist()
    reports = [DraftReport(len(ids), len(ids), kind, ids) for ids, kind in zip(token_ids, kinds, strict=True)]
    drafts.put(rows, generations, CheckedDraft.read(reports, distribution))


def take(drafts, rows, limit=K, generation=1):
    return drafts.take([(row, generation, limit) for row in rows])


def lengths(drafts, rows, generation=1):
    return [drafts.length(row, generation) for row in rows]


def test_lengths_two_none_one_come_back_in_any_order():
    drafts = store()
    distribution = dense_distribution([DistributionKind.DENSE_PROBS] * 3)
    put(drafts, [A, B, C], [1, 1, 1], [[7, 8], [], [9]], distribution)
    assert lengths(drafts, [A, B, C]) == [2, 0, 1]
    taken = take(drafts, [C, A, B])
    assert taken.token_ids == [[9], [7, 8], []]
    assert taken.lengths == [1, 2, 0]
    distributions = taken.distributions()
    assert distributions.draft_probs.shape == (3, 2, V)
    assert distributions.kind[2] == DistributionKind.ONE_HOT
    assert torch.equal(distributions.draft_probs[0, :1], distribution.probs[2, :1])
    assert torch.equal(distributions.draft_probs[1, :2], distribution.probs[0, :2])


def test_a_draft_is_consumed_exactly_once():
    drafts = store()
    put(drafts, [A], [1], [[7, 8]], None)
    assert take(drafts, [A]).token_ids == [[7, 8]]
    assert take(drafts, [A]).token_ids == [[]]
    assert drafts.length(A, 1) == 0


def test_a_draft_cut_to_nothing_is_consumed_too():
    drafts = store()
    put(drafts, [A], [1], [[7, 8]], None)
    assert take(drafts, [A], limit=0).token_ids == [[]]
    assert take(drafts, [A]).token_ids == [[]]


def test_a_draft_cut_short_keeps_its_beginning_and_its_distribution():
    drafts = store()
    distribution = dense_distribution([DistributionKind.DENSE_PROBS])
    put(drafts, [A], [1], [[7, 8, 9]], distribution)
    taken = take(drafts, [A], limit=2)
    assert taken.token_ids == [[7, 8]]
    assert torch.equal(taken.distributions().draft_probs[0], distribution.probs[0, :2])


def test_a_request_that_skips_a_step_keeps_draft_and_distribution():
    drafts = store()
    first, second = (
        dense_distribution([DistributionKind.DENSE_PROBS] * 2, seed=1),
        dense_distribution([DistributionKind.DENSE_LOGITS], seed=2),
    )
    put(drafts, [A, B], [1, 1], [[1, 2, 3], [4]], first)
    assert take(drafts, [A]).token_ids == [[1, 2, 3]]  # B is not scheduled
    put(drafts, [A], [1], [[5, 6]], second)
    distributions = take(drafts, [B, A]).distributions()
    assert distributions.kind.tolist() == [DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS]
    assert torch.equal(distributions.draft_probs[0, :1], first.probs[1, :1])
    assert torch.equal(distributions.draft_logits[1, :2], second.logits[0, :2])


def test_a_row_that_changed_hands_never_meets_the_old_draft():
    drafts = store()
    put(drafts, [A], [1], [[7, 8]], None)
    assert drafts.length(A, 2) == 0
    assert take(drafts, [A], generation=2).token_ids == [[]]
    put(drafts, [A], [2], [[9]], None)
    assert take(drafts, [A], generation=2).token_ids == [[9]]


def test_an_empty_draft_replaces_what_was_there():
    drafts = store()
    put(drafts, [A], [1], [[7]], None)
    put(drafts, [A], [1], [[]], None)
    assert take(drafts, [A]).token_ids == [[]]


def test_every_kind_of_dense_distribution_mixes_in_one_batch():
    drafts = store()
    kinds = [DistributionKind.DENSE_LOGITS, DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS]
    distribution = dense_distribution(kinds)
    put(drafts, [A, B, C], [1, 1, 1], [[1, 2, 3], [4], [5, 6]], distribution)
    distributions = take(drafts, [B, C, A]).distributions()
    assert distributions.kind.tolist() == [
        DistributionKind.ONE_HOT,
        DistributionKind.DENSE_PROBS,
        DistributionKind.DENSE_LOGITS,
    ]
    assert torch.equal(distributions.draft_probs[1, :2], distribution.probs[2, :2])
    assert torch.equal(distributions.draft_logits[2], distribution.logits[0])


def test_sparse_distributions_are_stored_by_row():
    drafts = store("sparse")
    ids = torch.arange(2 * K * M).view(2, K, M) % V
    probs = torch.rand(2, K, M, generator=torch.Generator().manual_seed(0))
    distribution = DraftDistribution(
        kind=torch.full((2,), DistributionKind.SPARSE, dtype=torch.uint8), sparse_ids=ids, sparse_probs=probs
    )
    put(drafts, [C, A], [1, 1], [[1, 2, 3], [4]], distribution)
    distributions = take(drafts, [A, C]).distributions()
    assert torch.equal(distributions.sparse_ids[1], ids[0])
    assert torch.equal(distributions.sparse_probs[0, :1], probs[1, :1])
    assert distributions.draft_probs is None
    assert distributions.draft_logits is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_distributions_are_kept_as_float32(dtype):
    drafts = store()
    distribution = DraftDistribution(
        kind=torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8),
        probs=torch.full((1, K, V), 0.25, dtype=dtype),
    )
    put(drafts, [A], [1], [[1]], distribution)
    assert take(drafts, [A]).distributions().draft_probs.dtype == torch.float32


def test_drafts_without_distribution_give_no_distributions():
    drafts = store()
    put(drafts, [A, B], [1, 1], [[1], [2]], None)
    assert take(drafts, [A, B]).distributions() is None


def test_a_row_without_a_distribution_is_counted_and_changes_no_other():
    drafts = store()
    put(
        drafts, [A, B], [1, 1], [[1], [2]], dense_distribution([DistributionKind.DENSE_PROBS, DistributionKind.ONE_HOT])
    )
    kinds = take(drafts, [A, B]).distributions().kind.tolist()
    assert kinds == [DistributionKind.DENSE_PROBS, DistributionKind.ONE_HOT]
    assert drafts.num_one_hot_fallbacks == 1


def test_a_row_without_a_draft_is_no_fallback():
    drafts = store()
    put(drafts, [A, B], [1, 1], [[1], []], dense_distribution([DistributionKind.DENSE_PROBS, DistributionKind.ONE_HOT]))
    assert drafts.num_one_hot_fallbacks == 0


def test_tensors_of_a_kind_that_no_row_has_are_not_looked_at():
    drafts = store()
    distribution = DraftDistribution(
        kind=torch.tensor([DistributionKind.DENSE_PROBS], dtype=torch.uint8),
        probs=torch.full((1, K, V), 0.2),
        logits=torch.zeros(1, K, V + 7),
    )
    put(drafts, [A], [1], [[1]], distribution)
    assert torch.equal(take(drafts, [A]).distributions().draft_probs[0, 0], distribution.probs[0, 0])


def test_one_hot_storage_takes_no_memory():
    buffers = DistributionBuffers.allocate("one_hot", (ROWS, K, V), None, torch.device("cpu"))
    assert buffers.dense is None
    assert buffers.sparse_ids is None
    assert buffers.sparse_probs is None


class Spy:
    """Passes every batch on to verification and keeps what it was given, by (request seed, position)."""

    def __init__(self):
        self.seen = {}
        self.num_batches_with_distributions = 0

    def verify(self, logits, cu_rows, drafts, sampling):
        distributions = drafts.distributions
        self.num_batches_with_distributions += distributions is not None
        for b, key in enumerate(zip(sampling.seed.tolist(), sampling.position.tolist(), strict=True)):
            count = int(drafts.lengths[b])
            if count:
                kind = (
                    DistributionKind.ONE_HOT if distributions is None else DistributionKind(int(distributions.kind[b]))
                )
                assert key not in self.seen, "a draft is verified twice"
                self.seen[key] = (
                    drafts.token_ids[b, :count].tolist(),
                    kind,
                    self.distribution(distributions, kind, b, count),
                )
        return sampler.verify(logits, cu_rows, drafts, sampling)

    @staticmethod
    def distribution(distributions, kind, b, count):
        """The row's distribution as dense probabilities [count, V]; None for one-hot."""
        if kind is DistributionKind.ONE_HOT:
            return None
        if kind is DistributionKind.SPARSE:
            dense = torch.zeros(count, 4096)
            return dense.scatter_(
                1, distributions.sparse_ids[b, :count].clamp(min=0), distributions.sparse_probs[b, :count]
            )
        probs = (
            distributions.draft_probs
            if kind is DistributionKind.DENSE_PROBS
            else distributions.draft_logits.softmax(-1)
        )
        return probs[b, :count]


SAMPLED = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
TIGHT = {"num_kv_blocks": 13, "max_num_batched_tokens": 60}


def run_with_spy(prompts, sequences, *, proposer="DenseDistributions", kind="probs", params=None, **settings):
    spy = Spy()
    method = settings.pop("draft_sample_method", "probabilistic")
    speculative = {"draft_sample_method": method}
    llm = make_llm(proposer, options={"sequences": sequences, "kind": kind}, speculative=speculative, **settings)
    verify_with(llm, spy.verify)
    for seed, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, (params or [SAMPLED] * len(prompts))[seed].replace(seed=seed), str(seed))
        llm.engine.step()  # arrivals one by one: batches of every size and order
    run(llm.engine)
    return llm, spy


@pytest.mark.parametrize("kind", ["probs", "logits", "mixed", "sparse"])
@pytest.mark.parametrize("settings", [{}, TIGHT], ids=["roomy", "preempting"])
def test_the_distribution_that_is_verified_is_the_distribution_that_was_reported(kind, settings, prompts, sequences):
    proposer = "SparseDistributions" if kind == "sparse" else "DenseDistributions"
    llm, spy = run_with_spy(prompts[:4], sequences, proposer=proposer, kind=kind, **settings)
    reported = proposer_of(llm).reported
    assert len(spy.seen) > 20
    assert len({kind_seen for _, kind_seen, _ in spy.seen.values()}) == (3 if kind == "mixed" else 1)
    for (seed, position), (token_ids, kind_seen, distribution) in spy.seen.items():
        kind_reported, drafted, distribution_reported = reported[str(seed), position]
        assert token_ids == drafted[: len(token_ids)]
        assert kind_seen == kind_reported
        if distribution is not None:
            torch.testing.assert_close(distribution, distribution_reported[: len(token_ids)], rtol=1e-5, atol=1e-8)
    assert (counter(llm, "num_preemptions") > 0) == bool(settings)


def test_an_all_greedy_batch_stores_and_gathers_no_distribution(prompts, sequences):
    greedy = [SAMPLED.replace(temperature=0)] * 3
    llm, spy = run_with_spy(prompts[:3], sequences, params=greedy)
    assert spy.seen
    assert spy.num_batches_with_distributions == 0
    assert counter(llm, "one_hot_fallback_rows") == 0


def test_greedy_drafting_stores_and_gathers_no_distribution(prompts, sequences):
    llm, spy = run_with_spy(prompts[:3], sequences, draft_sample_method="greedy")
    assert spy.seen
    assert spy.num_batches_with_distributions == 0
    assert counter(llm, "one_hot_fallback_rows") == 0


def test_greedy_and_sampled_requests_share_a_batch_with_distributions(prompts, truth, sequences):
    params = [SAMPLED, SAMPLED.replace(temperature=0)] * 2
    llm, spy = run_with_spy(prompts[:4], sequences, params=params)
    assert spy.num_batches_with_distributions > 0
    reported = proposer_of(llm).reported
    for (seed, position), (token_ids, _, _) in spy.seen.items():
        assert token_ids == reported[str(seed), position][1][: len(token_ids)]


def test_only_one_hot_rows_of_a_mixed_proposer_are_counted_as_fallbacks(prompts, sequences):
    llm, _ = run_with_spy(prompts[:3], sequences, kind="mixed")
    stored = [kind for kind, drafted, _ in proposer_of(llm).reported.values() if drafted]
    assert counter(llm, "one_hot_fallback_rows") == stored.count(DistributionKind.ONE_HOT) > 0


@pytest.mark.parametrize(
    ("form", "fields"),
    [("one_hot", []), ("dense", [["draft_logits"], ["draft_probs"]]), ("sparse", [["sparse_ids", "sparse_probs"]])],
)
def test_an_example_of_each_kind_has_the_shape_of_what_is_taken(form, fields):
    examples = DistributionBuffers.allocate(form, (ROWS, K, V), None, torch.device("cpu")).examples(2)
    held = [{name: each for name, each in vars(example).items() if each is not None} for example in examples]
    assert [sorted(each.keys() - {"kind"}) for each in held] == fields
    for each in held:
        assert each.pop("kind").shape == (2,)
        assert {tensor.shape for tensor in each.values()} == {(2, K, V)}


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_distributions_are_kept_as_drawn_where_the_user_has_another_default_dtype(form, half_by_default):
    buffers = DistributionBuffers.allocate(form, (ROWS, K, V), None, torch.device("cpu"))
    (kept,) = (each for each in (buffers.dense, buffers.sparse_probs) if each is not None)
    assert kept.dtype == torch.float32


def test_rows_and_kinds_are_sent_where_a_draft_has_a_distribution_and_only_there():
    drafts = store()
    put(drafts, [A, B], [1, 1], [[7, 8], [9]], dense_distribution([DistributionKind.DENSE_PROBS] * 2))
    assert take(drafts, [A, B]).columns([0, 2])[2:] == [[A, B], [DistributionKind.DENSE_PROBS] * 2]
    put(drafts, [A, B], [1, 1], [[7, 8], [9]], None)
    assert take(drafts, [A, B]).columns([0, 2]) == [[2, 1], [7, 8, 9, -1]]


def test_rows_without_a_distribution_are_counted_where_others_report_one():
    drafts = store()
    kinds = [DistributionKind.DENSE_PROBS, DistributionKind.ONE_HOT, DistributionKind.ONE_HOT]
    put(drafts, [A, B, C], [1, 1, 1], [[7, 8], [9], []], dense_distribution(kinds))
    assert drafts.num_one_hot_fallbacks == 1


def test_the_parents_of_a_tree_come_back_with_it():
    drafts = DraftStore(DistributionBuffers.none(), keeps_trees=True)
    tree = DraftReport(3, 3, DistributionKind.ONE_HOT, [7, 8, 9], [-1, -1, 0])
    chain = DraftReport(2, 2, DistributionKind.ONE_HOT, [5, 6])
    drafts.put([A, B], [1, 1], CheckedDraft.read([tree, chain], None))
    assert take(drafts, [B, A]).parents == [[-1, 0], [-1, -1, 0]]
