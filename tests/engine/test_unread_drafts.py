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
from specdec.core.proposing.unread_drafts import Report, UnreadDrafts, of_one_kind
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
        return Draft(draft.token_ids, lengths, draft.distribution)


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


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 48}, {"num_kv_blocks": 20, "max_num_seqs": 4}], ids=str
)
def test_short_and_empty_drafts_are_counted_as_what_they_were(
    settings, by_table, prompts, truth, sequences, reference_model
):
    options = {"sequences": sequences, "wrong_every": 3, "ragged": True}
    read = run("Scripted", prompts[:5], GREEDY, options=options, **settings)
    unread = run("DeviceScripted", prompts[:5], GREEDY, options=options, **settings)
    assert drafts_of(unread[0]).unread is not None
    assert drafts_of(read[0]).unread is None
    assert_same_tokens(unread[1], truth[:5], prompts[:5], reference_model)
    if not settings:  # where a plan for more tokens than there are cannot change who fits into a step
        assert unread[2] == read[2]
    assert counter(unread[0], "spec_decode_num_accepted_tokens") > 0


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


def unread(lengths, token_ids, budgets=(3, 3), vocab_size=10):
    kept = UnreadDrafts(4, 3, vocab_size, torch.device("cpu"))
    kept.put([2, 0], budgets, Draft(torch.tensor(token_ids), torch.tensor(lengths)), None)
    return kept


@pytest.mark.parametrize(
    ("lengths", "token_ids", "limits", "expected"),
    [
        ([3, 1], [[1, 2, 3], [4, 5, 6]], [3, 3], [[1, 2, 3], [4]]),
        ([3, 3], [[1, 2, 3], [4, 5, 6]], [2, 0], [[1, 2], []]),
        ([0, 3], [[1, 2, 3], [4, 10, 6]], [3, 3], [[], [4]]),
        ([9, -1], [[1, -2, 3], [4, 5, 6]], [3, 3], [[1], []]),
    ],
)
def test_the_host_counts_those_tokens_that_verification_meets(lengths, token_ids, limits, expected):
    kept = unread(lengths, token_ids)
    reports, drafts = kept.gather(torch.tensor([2, 0]), torch.tensor(limits), 3)
    for report, row, limit, tokens_there in zip(reports.tolist(), drafts.tolist(), limits, expected, strict=True):
        read = kept.tokens(Report.parse(report), limit)
        assert read == tokens_there
        assert row[: len(read)] == read
        assert [*row, NOTHING][len(read)] == NOTHING
        assert min(row) >= NOTHING


def test_distributions_of_two_kinds_become_one():
    probs = torch.rand(3, 2, 5).softmax(-1)
    logits = torch.randn(3, 2, 5)
    kinds = [DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS, DistributionKind.ONE_HOT]
    tagged = of_one_kind(
        DraftDistribution(kind=torch.tensor(kinds, dtype=torch.uint8), draft_probs=probs, draft_logits=logits), "dense"
    )
    assert tagged.kind is DistributionKind.DENSE_LOGITS
    assert tagged.has_distribution.tolist() == [True, True, False]
    torch.testing.assert_close(tagged.distribution.draft_logits[0].softmax(-1), probs[0])
    assert torch.equal(tagged.distribution.draft_logits[1], logits[1])


def test_a_distribution_without_a_tensor_of_the_declared_form_is_none():
    distribution = DraftDistribution(kind=torch.tensor([1], dtype=torch.uint8), draft_probs=torch.ones(1, 1, 1))
    assert of_one_kind(distribution, "sparse") is None
    assert of_one_kind(DraftDistribution(kind=distribution.kind), "dense") is None
    assert not of_one_kind(
        DraftDistribution(kind=distribution.kind + 1, draft_probs=distribution.draft_probs), "dense"
    ).has_distribution.any()


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
