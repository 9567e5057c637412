"""Drafts that stay on their device until they are verified: the same text and books as drafts that are read at once."""

from __future__ import annotations

import pytest
import torch
from device_steps import address_by_table
from engine_helpers import GREEDY, assert_same_tokens, counter, make_llm, tokens
from engine_proposers import DenseDistributions, Scripted, SparseDistributions, ragged_length
from inside import drafts_of, proposer_of
from sweeps import covering

from specdec import SamplingParams
from specdec.core.proposing.draft_store import DistributionBuffers, DraftStore
from specdec.core.proposing.draft_table import CheckedDraft, DraftReport, DraftTable, measure
from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs, ProposerError

K, V = 4, 4096
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
NOTHING = -1


class OnDevice:
    """Mixed into a proposer of the host: its drafts count as lying on a device."""

    @classmethod
    def needs(cls, config, target):
        needs = super().needs if isinstance(super().needs, Needs) else super().needs(config, target)
        return needs.replace(placement="device")


class Ragged:
    """Mixed into a proposer with distributions: lengths that depend on the position alone."""

    def propose(self, step):
        draft = super().propose(step)
        pairs = zip(step.committed_length.tolist(), step.budget.tolist(), strict=True)
        lengths = torch.tensor([ragged_length(length, budget) for length, budget in pairs])
        return Draft(draft.token_ids, lengths, distribution=draft.distribution)


class DeviceScripted(OnDevice, Scripted):
    pass


class RaggedDense(Ragged, DenseDistributions):
    pass


class DeviceRaggedDense(OnDevice, RaggedDense):
    pass


class RaggedSparse(Ragged, SparseDistributions):
    pass


class DeviceRaggedSparse(OnDevice, RaggedSparse):
    pass


class Unusable(OnDevice, Scripted):
    """One id or length of each draft is not what it may be."""

    class Options(Scripted.Options):
        fault: str = "id"

    def propose(self, step):
        draft = super().propose(step)
        if self.options.fault == "id":
            draft.token_ids[0, 1] = V + 5
        elif self.options.fault == "sentinel":
            draft.token_ids[0, 1] = -2
        else:
            draft.lengths[0] = step.budget[0] + (1 if self.options.fault == "long" else -K - 1)
        return draft


@pytest.fixture
def by_table(monkeypatch):
    address_by_table(monkeypatch)


def run(name, prompts, params, *, options, **settings):
    llm = make_llm(f"{__name__}:{name}", k=K, options=options, **settings)
    each = [params.replace(seed=seed) for seed in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], each)
    books = [output.outputs[0].spec_decode_metrics for output in outputs]
    return llm, tokens(outputs), books


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 48}, {"num_kv_blocks": 20, "max_num_seqs": 4}], ids=str
)
def test_short_and_empty_drafts_are_counted_as_what_they_were(
    settings, by_table, prompts, truth, sequences, reference_model
):
    options = {"sequences": sequences, "wrong_every": 3, "ragged": True}
    read = run("Scripted", prompts[:5], GREEDY, options=options, **settings)
    unread = run("DeviceScripted", prompts[:5], GREEDY, options=options, **settings)
    assert drafts_of(unread[0]).table is not None
    assert drafts_of(read[0]).table is None
    assert_same_tokens(unread[1], truth[:5], prompts[:5], reference_model)
    if not settings:  # where a plan for more tokens than there are cannot change who fits into a step
        assert unread[2] == read[2]
    assert counter(unread[0], "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule"), covering(["probs", "logits", "mixed", "sparse"], ["standard", "block"]))
def test_distributions_of_short_drafts_give_the_same_tokens(kind, rule, by_table, prompts, sequences):
    """Verification meets NO_PROPOSAL where it would have met the end of the draft, and draws with the same uniforms."""
    name = "RaggedSparse" if kind == "sparse" else "RaggedDense"
    speculative = {"draft_sample_method": "probabilistic", "rejection_sample_method": rule}
    given = {"options": {"sequences": sequences, "kind": kind}, "speculative": speculative}
    read = run(name, prompts[:3], SAMPLED, **given)
    unread = run(f"Device{name}", prompts[:3], SAMPLED, **given)
    assert unread[1:] == read[1:]
    assert counter(unread[0], "spec_decode_num_draft_tokens") > 20
    assert (counter(unread[0], "one_hot_fallback_rows") > 0) == (kind == "mixed")


@pytest.mark.parametrize(
    ("fault", "code"), [("id", "SD-E203"), ("sentinel", "SD-E203"), ("long", "SD-E202"), ("short", "SD-E202")]
)
def test_an_unusable_draft_is_told_of_when_it_is_read_and_changes_nothing(
    fault, code, by_table, prompts, truth, sequences, reference_model
):
    options = {"sequences": sequences, "fault": fault}
    llm, found, _ = run(
        "Unusable", prompts[:3], GREEDY, options=options, speculative={"on_proposer_error": "skip_step"}
    )
    assert_same_tokens(found, truth[:3], prompts[:3], reference_model)
    assert set(llm.engine.metrics.proposer_errors) == {code}


def test_an_unusable_draft_stops_the_engine_where_that_is_asked_for_and_it_can_go_on(by_table, prompts, sequences):
    options = {"sequences": sequences, "fault": "id"}
    llm = make_llm(f"{__name__}:Unusable", k=K, options=options, speculative={"on_proposer_error": "raise"})
    llm.engine.add_request(prompts[0], GREEDY, "0")
    llm.engine.step()
    with pytest.raises(ProposerError, match="SD-E203"):
        llm.engine.step()
    llm.engine.check_integrity()
    request = llm.engine.get_request("0")
    assert request.num_uncomputed_tokens == 1
    assert request.token_ids == sequences[0][: len(request.token_ids)]


def test_penalties_see_unread_drafts(by_table, prompts, sequences):
    """They change the logits behind each draft token, so that text with and without drafts is the same."""
    params = GREEDY.replace(frequency_penalty=0.7, repetition_penalty=1.1, min_tokens=8)
    options = {"sequences": sequences, "wrong_every": 3, "ragged": True}
    _, found, _ = run("DeviceScripted", prompts[:3], params, options=options)
    plain = make_llm()
    expected = plain.generate([{"prompt_token_ids": prompt} for prompt in prompts[:3]], params)
    assert found == tokens(expected)


ROWS, BUDGETS = [2, 0], [3, 3]
WANTED = [(row, 1, 3) for row in ROWS]


def stored(draft, kinds=frozenset(), buffers=None, vocab_size=10):
    """A store in whose rows a draft lies that the host has not read."""
    store = DraftStore(buffers or DistributionBuffers.none(), DraftTable(4, 3, torch.device("cpu")))
    numbers = measure(draft, kinds, None, vocab_size)
    store.put(ROWS, [1, 1], CheckedDraft(BUDGETS, [None, None], numbers, draft.distribution, kinds))
    return store


def verified(taken):
    """What verification meets, and what the host reads with its outcome."""
    width = taken.width
    sent = [torch.tensor(column, dtype=torch.int64) for column in taken.columns([0, 10])]
    tokens = torch.full((20,), 77)
    drafts, numbers = taken.put_in(tokens, sent)
    assert tokens[: taken.lengths[0]].tolist() == drafts.token_ids[0, : taken.lengths[0]].clamp(min=0).tolist()
    assert tokens[10 : 10 + taken.lengths[1]].tolist() == drafts.token_ids[1, : taken.lengths[1]].clamp(min=0).tolist()
    assert drafts.token_ids.shape == (2, width)
    return drafts, taken.reports(numbers.tolist())


@pytest.mark.parametrize(
    ("lengths", "token_ids", "limits", "expected"),
    [
        ([3, 1], [[1, 2, 3], [4, 5, 6]], [3, 3], [[1, 2, 3], [4]]),
        ([3, 3], [[1, 2, 3], [4, 5, 6]], [2, 0], [[1, 2], []]),
        ([0, 3], [[1, 2, 3], [4, 10, 6]], [3, 3], [[], [4]]),
        ([9, -1], [[1, -2, 3], [4, 5, 6]], [3, 3], [[1], []]),
        ([3, 3], [[1, 2, 3], [4, 5, 6]], [0, 0], [[], []]),
    ],
)
def test_the_host_counts_those_tokens_that_verification_meets(lengths, token_ids, limits, expected):
    store = stored(Draft(torch.tensor(token_ids), torch.tensor(lengths)))
    assert [store.length(row, 1) for row in ROWS] == BUDGETS
    taken = store.take([(row, 1, limit) for row, limit in zip(ROWS, limits, strict=True)])
    drafts, reports = verified(taken)
    assert taken.verified(reports) == expected
    for row, tokens_there in zip(drafts.token_ids.tolist(), expected, strict=True):
        assert row[: len(tokens_there)] == tokens_there
        assert [*row, NOTHING][len(tokens_there)] == NOTHING
        assert min(row, default=0) >= NOTHING


def test_what_the_host_reads_is_what_was_put():
    draft = Draft(torch.tensor([[1, 2, 3], [4, 12, 6]], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32))
    _, reports = verified(stored(draft).take(WANTED))
    one_hot = DistributionKind.ONE_HOT
    assert reports == [DraftReport(2, 2, one_hot, [1, 2, 3]), DraftReport(3, 1, one_hot, [4, 12, 6])]


DENSE = DistributionBuffers.allocate("dense", (4, 3, 5), None, torch.device("cpu"))
BOTH = frozenset({DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS})


def dense(*kinds):
    probs, logits = torch.rand(2, 3, 5).softmax(-1), torch.randn(2, 3, 5)
    return DraftDistribution(kind=torch.tensor(kinds, dtype=torch.uint8), probs=probs, logits=logits)


def test_distributions_of_two_kinds_lie_beside_each_other():
    distribution = dense(DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS)
    draft = Draft(torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.tensor([3, 3]), distribution=distribution)
    drafts, _ = verified(stored(draft, BOTH, DENSE).take(WANTED))
    assert drafts.distributions.kind.tolist() == [DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS]
    assert torch.equal(drafts.distributions.draft_probs[0], distribution.probs[0])
    assert torch.equal(drafts.distributions.draft_logits[1], distribution.logits[1])


def test_a_row_tagged_with_what_was_not_brought_is_one_hot_and_counted():
    distribution = dense(DistributionKind.DENSE_PROBS, DistributionKind.SPARSE)
    draft = Draft(torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.tensor([3, 3]), distribution=distribution)
    store = stored(draft, BOTH, DENSE)
    taken = store.take(WANTED)
    drafts, reports = verified(taken)
    assert drafts.distributions.kind.tolist() == [DistributionKind.DENSE_PROBS, DistributionKind.ONE_HOT]
    assert store.num_one_hot_fallbacks == 0
    store.count_late(taken, reports)
    assert store.num_one_hot_fallbacks == 1


def test_rows_whose_distributions_are_not_kept_are_one_hot_beside_others():
    """Those of a greedy step: what lies in their buffers is of an earlier draft."""
    distribution = dense(DistributionKind.DENSE_PROBS, DistributionKind.DENSE_PROBS)
    draft = Draft(torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.tensor([3, 3]), distribution=distribution)
    store = stored(draft, BOTH, DENSE)
    again = CheckedDraft(BUDGETS[:1], [None], measure(draft, BOTH, None, 10)[:1], distribution, BOTH)
    store.put(ROWS[:1], [1], again, all_greedy=True)
    drafts, _ = verified(store.take(WANTED))
    assert drafts.distributions.kind.tolist() == [DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS]


def test_the_proposer_of_a_device_is_told_what_was_accepted(by_table, prompts, sequences):
    """The books of the view are those of the drafts that were there, not of those that were planned for."""
    options = {"sequences": sequences, "ragged": True}
    llm = make_llm(f"{__name__}:Watching", k=K, options=options)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:3]], GREEDY)
    watching = proposer_of(llm)
    assert watching.told
    assert all(watching.offered[key] == count for key, count in watching.told.items())
    assert 0 in watching.told.values()


class Watching(DeviceScripted):
    """Keeps, by request and length, how many tokens it offered and how many it was told were verified."""

    def __init__(self, config):
        super().__init__(config)
        self.offered, self.told = {}, {}

    def observe(self, step):
        facts = (step.request_ids, step.committed_length, step.num_accepted, step.num_drafted)
        for request_id, length, accepted, drafted in zip(*facts, strict=True):
            key = request_id, int(length - accepted) - 1
            if key in self.offered:
                self.told[key] = int(drafted)

    def propose(self, step):
        draft = super().propose(step)
        for request_id, length, count in zip(step.request_ids, step.committed_length, draft.lengths, strict=True):
            self.offered[request_id, int(length)] = int(count)
        return draft
