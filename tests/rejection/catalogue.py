"""The mutants of the verifier: what peers got wrong, and what one slip in this code would do."""

from __future__ import annotations

from .mutation import Mutant

RATIO, LAYOUT, DRAFT_LAW = "rejection/ratio.py", "rejection/layout.py", "rejection/draft_law.py"
BACKEND, FILTERS, PICK = "rejection/torch_backend.py", "kernels/filters.py", "kernels/pick.py"

SUBTRACT = "table.subtract(residual.flatten(1)[:, : law.vocab_size], requests, places)"
DRAFTED_ID = "drafts.token_ids[requests, places].unsqueeze(1)"

MUTANTS = [
    Mutant("residual_is_p", "dense", RATIO, before=SUBTRACT, after="None"),
    Mutant(
        "ratio_accept_with_one_hot_residual",
        "dense",
        RATIO,
        before=SUBTRACT,
        after=f"residual.flatten(1).scatter_(1, {DRAFTED_ID}, 0.0)",
    ),
    Mutant(
        "residual_minus_q_only_at_draft",
        "dense",
        RATIO,
        before=SUBTRACT,
        after=f"""
            kept, flat, x = residual.clone(), residual.flatten(1), {DRAFTED_ID}
            {SUBTRACT}
            residual = kept.squeeze(2).scatter(1, x, flat.gather(1, x)).unsqueeze(2)""",
    ),
    Mutant(
        "accept_by_p_alone",
        "dense",
        RATIO,
        before="(target_prob >= draft_prob) | (coins.accept * draft_prob < target_prob)",
        after="coins.accept < target_prob",
    ),
    Mutant("abs_instead_of_clamp", "dense", RATIO, before="residual.clamp_(min=0.0)", after="residual.abs_()"),
    Mutant(
        "always_accept",
        "dense",
        RATIO,
        before="accept=likelier & possible",
        after="accept=likelier | True",
    ),
    Mutant(
        "residual_of_the_row_before",
        "dense",
        RATIO,
        before="rows = layout.rows.gather(1, stop)",
        after="rows = layout.rows.gather(1, (stop - 1).clamp(min=0))",
    ),
    Mutant(
        "residual_of_the_next_draft_law",
        "dense",
        RATIO,
        before="places = num_accepted[requests]",
        after="places = (num_accepted[requests] + 1)",
    ),
    Mutant(
        "tested_against_the_next_row",
        "dense",
        BACKEND,
        before="rows = layout.rows[:, :-1]",
        after="rows = layout.rows[:, 1:]",
    ),
    Mutant(
        "bonus_of_the_row_before",
        "one_hot",
        LAYOUT,
        before="rows=(starts + offsets)",
        after="rows=(starts + offsets.clamp(max=len(offsets) - 2))",
    ),
    Mutant(
        "residual_temperature_differs",
        "dense",
        DRAFT_LAW,
        before="law = self.weights[requests, positions].to(weights.dtype)",
        after="law = torch.nn.functional.normalize(self.weights[requests, positions] ** 0.8, p=1.0)",
    ),
    Mutant(
        "impossible_read_as_no_proposal",
        "impossible",
        RATIO,
        before="drafts.token_ids != NO_PROPOSAL",
        after="drafts.token_ids >= 0",
    ),
    Mutant(
        "no_proposal_read_as_impossible",
        "hole",
        RATIO,
        before="layout.has_draft & (drafts.token_ids != NO_PROPOSAL)",
        after="layout.has_draft",
    ),
    Mutant(
        "mass_outside_draft_vocabulary_dropped",
        "mapped",
        DRAFT_LAW,
        before="law[:, self.t2d.clamp(min=0)], 0.0)",
        after="law[:, self.t2d.clamp(min=0)], 1.0)",
    ),
    Mutant(
        "test_looks_up_target_ids_in_draft_law",
        "mapped",
        DRAFT_LAW,
        before="draft_ids = token_ids if self.t2d is None else self.t2d[token_ids]",
        after="draft_ids = token_ids",
    ),
    Mutant(
        "draft_logits_not_normalised",
        "logits",
        DRAFT_LAW,
        before="probs = probs / self.mass",
        after="probs = probs * 1.0",
    ),
    Mutant(
        "sparse_law_not_subtracted",
        "sparse",
        DRAFT_LAW,
        before="torch.where(known, -probs, 0.0)",
        after="torch.zeros_like(probs)",
    ),
    Mutant(
        "filters_ignored",
        "filtered",
        BACKEND,
        before="if sampling.any_filter:",
        after="if sampling.any_filter and len(logits) < 2:",
    ),
    Mutant(
        "top_p_before_top_k",
        "filtered",
        FILTERS,
        before="scale[rows], cutoff[rows], filters.top_p[rows]",
        after="scale[rows], torch.full_like(cutoff[rows], -torch.inf), filters.top_p[rows]",
    ),
    Mutant("top_k_keeps_one_less", "top_k", FILTERS, before="top_k - 1, 0)", after="(top_k - 2).clamp(min=0), 0)"),
    Mutant(
        "top_p_keeps_one_less",
        "top_p",
        FILTERS,
        before="clamp_(max=candidates.shape[1] - 1)",
        after="sub_(1).clamp_(min=0)",
    ),
    Mutant("min_p_of_probability", "min_p", FILTERS, before="min_p.log2() / scale", after="min_p.log2()"),
    Mutant(
        "temperature_of_another_request",
        "one_hot_temperature",
        BACKEND,
        before="scale_of(sampling.temperature)[owner]",
        after="scale_of(torch.ones_like(sampling.temperature))[owner]",
    ),
    Mutant(
        "pick_one_too_early",
        "one_hot",
        PICK,
        before="right=True).clamp_(max=num_tiles - 1)",
        after="right=True).sub_(1).clamp_(min=0)",
    ),
]
