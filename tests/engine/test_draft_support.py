"""A drafted token that its reported distribution cannot have drawn is never accepted, and is told of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_steps import address_by_table
from engine_helpers import make_llm, tokens
from engine_proposers import DenseDistributions, SparseDistributions
from inside import drafts_of
from sweeps import covering
from torch import Tensor

from specdec import SamplingParams
from specdec.core.proposing.draft_check import DraftChecker
from specdec.core.proposing.draft_table import DraftReport, DraftTable, can_draw, measure, target_to_draft
from specdec.sdk import DistributionKind, Draft, DraftDistribution, Needs, ProposerError, StrictModel
from specdec.sdk.errors import PluginId
from specdec.testing import step_view

V, K = 4096, 4
ANY = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
FAR = 10**6


def without(distribution: DraftDistribution, token_ids: Tensor, fault: str) -> DraftDistribution:
    """The same, but no drafted token can come from it."""
    places = token_ids.clamp(min=0)[..., None]
    if fault == "zero probability":
        return replace(distribution, probs=torch.zeros_like(distribution.probs).scatter(2, (places + 1) % V, 1))
    if fault == "no probability that is a number":
        return replace(distribution, probs=distribution.probs.scatter(2, places, torch.nan))
    if fault == "infinite logit":
        return replace(distribution, logits=distribution.logits.scatter(2, places, -torch.inf))
    if fault == "sparse ids out of range":
        return replace(distribution, sparse_ids=torch.full_like(distribution.sparse_ids, FAR))
    if fault == "one sparse id out of range":
        return replace(distribution, sparse_ids=distribution.sparse_ids.index_fill(2, torch.tensor(-1), V))
    if fault == "other sparse ids":
        return replace(distribution, sparse_ids=(places + 1 + torch.arange(distribution.sparse_ids.shape[2])) % V)
    assert fault == "sparse probability of zero"
    probs = distribution.sparse_probs.masked_fill(distribution.sparse_ids == places, 0)
    return replace(distribution, sparse_probs=probs / probs.sum(2, keepdim=True))


KINDS = {
    "zero probability": "probs",
    "no probability that is a number": "probs",
    "infinite logit": "logits",
    "sparse ids out of range": "sparse",
    "one sparse id out of range": "sparse",
    "other sparse ids": "sparse",
    "sparse probability of zero": "sparse",
}


class FaultOptions(StrictModel):
    fault: str
    kind: str
    after: int = 0  # steps that go well before
    sequences: tuple[tuple[int, ...], ...] = ()
    wrong_every: int = 0
    ragged: bool = False
    vocab_size: int = V


class Faults:
    """Mixed into a proposer with distributions: from some step on they miss what was drafted."""

    Options = FaultOptions
    count = 0

    def propose(self, step):
        draft = super().propose(step)
        self.count += 1
        if self.count <= self.options.after:
            return draft
        return replace(draft, distribution=without(draft.distribution, draft.token_ids, self.options.fault))


class FaultyDense(Faults, DenseDistributions):
    pass


class FaultySparse(Faults, SparseDistributions):
    pass


class DeviceDense(FaultyDense):
    @classmethod
    def needs(cls, config, target):
        return Needs(distributions=("dense",), placement="device")


class DeviceSparse(FaultySparse):
    @classmethod
    def needs(cls, config, target):
        return Needs(distributions=("sparse",), sparse_top_m=8, placement="device")


@pytest.fixture
def by_table(monkeypatch):
    address_by_table(monkeypatch)


def engine_with(place, fault, sequences, policy, after=0, rule="standard"):
    name = f"{place}{'Sparse' if KINDS[fault] == 'sparse' else 'Dense'}"
    speculative = {"draft_sample_method": "probabilistic", "on_proposer_error": policy, "rejection_sample_method": rule}
    options = {"fault": fault, "kind": KINDS[fault], "after": after, "sequences": sequences}
    return make_llm(f"{__name__}:{name}", k=K, options=options, speculative=speculative)


def texts(llm, prompts):
    each = [ANY.replace(seed=seed) for seed in range(len(prompts))]
    return tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], each))


@pytest.mark.parametrize("after", [0, 20])
@pytest.mark.parametrize("fault", KINDS)
def test_the_host_refuses_it_in_every_step(fault, after, prompts, sequences):
    llm = engine_with("Faulty", fault, sequences, "raise", after)
    with pytest.raises(ProposerError) as caught:
        texts(llm, prompts[:2] if after == 0 else [prompts[0]] * 4)
    unknown = fault == "no probability that is a number"  # what is no distribution at all is told as that
    assert caught.value.code == ("SD-E205" if unknown else "SD-E206")
    assert "draft position 0" in str(caught.value)
    assert fault != "sparse ids out of range" or f"{FAR}, {FAR}" in str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "rule"),
    covering(
        ["zero probability", "infinite logit", "sparse ids out of range", "other sparse ids"], ["standard", "block"]
    ),
)
def test_on_a_device_it_is_not_accepted_and_the_text_is_the_targets(fault, rule, by_table, prompts, sequences):
    """Such drafts are no drafts: text and random numbers are those of plain decoding."""
    llm = engine_with("Device", fault, sequences, "skip_step", rule=rule)
    assert drafts_of(llm).table is not None
    assert texts(llm, prompts[:3]) == texts(make_llm(), prompts[:3])
    assert set(llm.engine.metrics.proposer_errors) == {"SD-E206"}
    assert llm.engine.metrics.acceptance.num_accepted_tokens == 0


def test_on_a_device_it_is_told_of_when_it_is_read_and_the_engine_can_go_on(by_table, prompts, sequences):
    llm = engine_with("Device", "other sparse ids", sequences, "raise")
    llm.engine.add_request(prompts[0], ANY, "0")
    llm.engine.step()
    with pytest.raises(ProposerError, match=r"(?s)SD-E206.*'0', row 0 of the step, draft position 0"):
        llm.engine.step()
    llm.engine.check_integrity()


def test_a_token_outside_the_draft_vocabulary_has_no_probability():
    t2d = target_to_draft([7, 3], 10, torch.device("cpu"))
    assert t2d.tolist() == [-1, -1, -1, 1, -1, -1, -1, 0, -1, -1]
    distribution = DraftDistribution(
        kind=torch.tensor([DistributionKind.DENSE_PROBS]), probs=torch.tensor([[[0.0, 1.0]] * 4])
    )
    token_ids = torch.tensor([[7, 3, 2, -1]])
    assert can_draw(DistributionKind.DENSE_PROBS, distribution, token_ids, t2d, 10)[0, :3].tolist() == [
        False,
        True,
        False,
    ]


def test_on_a_device_the_draft_vocabulary_is_mapped_before_a_token_is_looked_up():
    """Target ids 7 and 3 are draft ids 0 and 1; without the map both would be looked up beyond the table's end."""
    t2d = target_to_draft([7, 3], 10, torch.device("cpu"))
    kinds = torch.tensor([DistributionKind.DENSE_PROBS] * 2, dtype=torch.uint8)
    distribution = DraftDistribution(kind=kinds, probs=torch.tensor([[[0.0, 1.0], [1.0, 0.0]]] * 2))
    draft = Draft(torch.tensor([[3, 7], [3, 3]]), torch.tensor([2, 2]), distribution=distribution)
    numbers = measure(draft, {DistributionKind.DENSE_PROBS}, t2d, 10)
    rows, table = torch.tensor([0, 1]), DraftTable(2, 2, torch.device("cpu"))
    table.put(rows, numbers)
    _, token_ids = table.gather(rows, torch.tensor([2, 2]), 2)
    assert token_ids.tolist() == [[3, 7], [3, -1]]
    assert [DraftReport.parse(row).num_usable for row in numbers.tolist()] == [2, 1]


def check(draft, placement="host", **needs):
    checker = DraftChecker(
        PluginId("mine", "m:Mine"),
        Needs(placement=placement, **needs),
        V,
        torch.device("cpu"),
    )
    step = step_view([[1, 2, 3]] * len(draft.token_ids), draft.token_ids.shape[1])
    return checker.check(draft, step, [draft.token_ids.shape[1]] * len(draft.token_ids))


def test_rows_of_every_kind_beside_each_other_are_each_held_to_their_own():
    token_ids = torch.tensor([[3, 4]] * 3)
    table = torch.zeros(3, 2, V).scatter(2, token_ids[..., None], 1)
    kinds = torch.tensor(
        [DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS], dtype=torch.uint8
    )
    draft = Draft(
        token_ids, torch.tensor([2, 2, 2]), distribution=DraftDistribution(kind=kinds, probs=table, logits=table.log())
    )
    assert check(draft, distributions=("dense",)).token_ids == token_ids.tolist()
    padded = replace(draft, token_ids=torch.tensor([[3, 4], [3, -1], [3, 4]]), lengths=torch.tensor([2, 1, 2]))
    assert check(padded, distributions=("dense",)).token_ids[1] == [3]
    for row, place in ((1, 1), (2, 0)):
        wrong = token_ids.clone()
        wrong[row, place] += 2
        with pytest.raises(ProposerError, match=rf"row {row} of the step, draft position {place}"):
            check(replace(draft, token_ids=wrong), distributions=("dense",))


class Halves(Tensor):
    """Answers with floats whatever it holds."""

    def tolist(self):
        return torch.Tensor(self).div(2).as_subclass(Tensor).tolist()


@pytest.mark.parametrize("placement", ["host", "device"])
def test_what_is_read_of_a_tensor_is_what_it_holds(placement):
    """A subclass whose tolist gives floats passed for integers, and failed in the next step."""
    draft = Draft(torch.tensor([[3, 4]]).as_subclass(Halves), torch.tensor([2]).as_subclass(Halves))
    assert draft.lengths.tolist() == [1.0]
    checked = check(draft, placement)
    assert checked.token_ids == [[3, 4]]
    assert all(type(token_id) is int for token_id in checked.token_ids[0])
