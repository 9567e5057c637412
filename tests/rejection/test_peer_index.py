"""Where each known defect of another engine is guarded against, or why it cannot occur here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec.core.rejection import Uniforms, sample, verify
from specdec.testing.rejection.exact_distribution import exact_distribution
from specdec.testing.rejection.reference import Params

from .problems import DRAFTERS, NO_FILTER, SAMPLING, filtered_table, problem_of, random_model, sampling_rows

TESTS = Path(__file__).parents[1]
CATALOGUE = "test_mutant_of_the_verifier_is_caught"
EXACT = "test_output_follows_target_distribution"
LIAR = "test_drafter_whose_report_is_not_its_distribution_is_caught"
BAD = "test_bad_row_emits_its_argmax_and_rejects_its_draft"
SAME = "test_same_verdict_as_the_torch_backend_and_the_reference"
NO_TWICE = "test_no_random_number_is_used_twice"
PLACE = "test_streams_of_a_seed_do_not_depend_on_the_place_in_the_batch"

GUARDS: dict[str, str] = {
    "R1 vllm#40149": "test_any_trimming_is_lossless_for_one_hot_drafts",
    "R2 xllm#2175, EAGLE#20": CATALOGUE,
    "R3 transformers#47932, DeepSpec#31": LIAR,
    "R4 transformers#32867, #28166, #28508": LIAR,
    "R5 vllm#9834, #15063": EXACT,
    "R6 vllm#42744, sglang#10617": "test_sampling_parameters_hold_on_every_row_and_not_only_on_the_bonus_row",
    "R7 sglang 0.5.23, penalties per step": "test_penalties_that_count_drafted_tokens_keep_the_distribution",
    "R8 sglang 0.5.23, order of filters": "test_no_drafts_is_plain_sampling_with_the_same_seed",
    "R9 sglang 0.5.23, greedy on some devices": SAME,
    "R10 vllm#46533": "test_ids_outside_the_vocabulary_are_never_accepted",
    "R11 vllm v2, impossible drafts": "test_impossible_and_no_proposal_follow_different_distributions",
    "R12 vllm v1, holes": "test_impossible_and_no_proposal_follow_different_distributions",
    "R13 flashinfer#879": "test_padding_and_poison_beyond_the_drafts_change_no_bit",
    "R14 flashinfer, empty residual": "test_residual_emptied_by_a_wrong_distribution_falls_back_to_the_target",
    "R15 flashinfer#424": NO_TWICE,
    "R16 vllm#44744": "test_tail_tile_never_gives_an_id_beyond_the_vocabulary",
    "R17 vllm#21876, #20531, #45060": BAD,
    "R18 vllm#53029, #50183": "test_bad_rows_give_a_legal_token_beside_healthy_ones",
    "R19 vllm-ascend#14116": "test_nan_is_never_sampled",
    "R20 vllm v2, equal distributions": "test_equal_distributions_accept_every_draft_whatever_the_uniform",
    "R21 sglang#35771": "test_lowest_uniform_does_not_accept_what_the_target_forbids",
    "R22 sglang#12561": "test_workspace_of_a_larger_plan_is_used_again_and_again_without_a_trace",
    "R23 vllm#54282, #47386": NO_TWICE,
    "R24 local-inference-lab#98": PLACE,
    "R26 vllm#6038, #13196": PLACE,
    "R27 vllm#43150, #47524": "test_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should",
    "R29 pytorch#192577": "test_every_emitted_token_has_positive_probability",
    "R30 vllm-ascend#2881": "test_inputs_are_not_modified",
    "R31 vllm-ascend#7807": "test_mutant_of_the_block_rule_is_caught",
    "R32 vllm#18902, #19482": "test_penalties_that_count_drafted_tokens_keep_the_distribution",
    "R35 vllm-rbln#915, jaymody#3": "test_temperature_zero_takes_the_lowest_of_equal_maxima",
    "R36 1Cat-vLLM#656": "test_order_and_company_of_requests_change_no_bit",
    "R37 vllm v2, smaller vocabulary": "test_tokens_beyond_the_draft_vocabulary_keep_their_mass",
    "R39 vllm PR#35398": "test_shapes_that_contradict_each_other_are_refused",
    "R40 vllm#41258, #45369": "test_bytes_moved_stay_near_the_least_possible",
    "R42 vllm#35301, #28693": "test_trimming_on_the_draft_distribution_is_lossless",
}
CANNOT_OCCUR: dict[str, str] = {
    "R25 vllm#17498": "one process; a uniform is a function of seed, position and purpose, so ranks would agree",
    "R28 vllm#59786": "no window of noise is laid over tokens: a row takes one uniform",
    "R33 vllm#44727": "a verdict has no log-probabilities; tests/engine/test_requests.py compares those of a request",
    "R34 vllm-ascend#6685": "probabilities and logits are different fields of DraftDistributions, tagged by kind",
    "R38 vllm#29274": "the last row is never compared: its place has no draft id, and the loop ends before it",
    "R41 MCSD#5, EAGLE#110, mlx-swift-lm#459": "no defects; explained in docs/explanation/losslessness.md",
}


def test_every_known_defect_has_a_case_or_a_reason() -> None:
    numbers = [int(re.match(r"R(\d+) ", name)[1]) for name in (*GUARDS, *CANNOT_OCCUR)]
    assert sorted(numbers) == list(range(1, 43))


def test_every_case_exists() -> None:
    source = "".join(path.read_text() for path in (TESTS / "rejection").glob("test_*.py"))
    assert [case for case in GUARDS.values() if f"def {case}(" not in source] == []


@pytest.mark.parametrize("drafter", ["one_hot", "dense_probs", "sparse"])
def test_penalties_that_count_drafted_tokens_keep_the_distribution(drafter: str) -> None:
    """Row i is penalised for the request's first i drafts; one penalty for all rows of a step is another
    distribution.
    """
    model = random_model(seed=12, num_drafts=2)
    base = model.target[0]
    counts = torch.nn.functional.one_hot(torch.arange(len(base)), len(base)).double()
    once, twice = base - 1.3 * counts, base - 1.3 * (counts.unsqueeze(1) + counts.unsqueeze(0))
    penalised = replace(model, target=[base, once, twice])
    drawn = DRAFTERS[drafter](penalised, torch.float64)
    stated = problem_of(penalised, drawn, SAMPLING["all"], torch.float64)
    assert exact_distribution(verify, stated, 46).total_variation <= 1e-12
    relaxed = replace(stated, target_logits=[base, base.expand_as(once), base.expand_as(twice)])
    relaxed = replace(relaxed, target_distributions=[filtered_table(t, SAMPLING["all"]) for t in penalised.target])
    assert exact_distribution(verify, relaxed, 24).total_variation >= 1e-2


def test_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    """262144 tokens 20.5 below the top hold 3.3e-4 of the mass; noise of 24 bits never draws one of them."""
    count, gap = 262_144, 20.5
    logits = torch.zeros(9, count + 1)
    logits[:, 0] = gap
    tail = count / (count + float(torch.tensor(gap, dtype=torch.float64).exp()))
    shares = (torch.arange(9, dtype=torch.float64) + 0.5) / 9
    uniforms = Uniforms((1 - tail + shares * tail).unsqueeze(1))
    drawn = sample(logits, sampling_rows([NO_FILTER] * 9), uniforms).output_ids.flatten()
    assert (drawn - shares * count).abs().max() <= 1e-3 * count
    below = Uniforms(torch.full((9, 1), 1 - 1.001 * tail, dtype=torch.float64))
    assert not sample(logits, sampling_rows([Params()] * 9), below).output_ids.any()
