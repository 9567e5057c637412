"""The mutants of the verifier: what peers got wrong, and what one slip in this code would do."""

from __future__ import annotations

from .mutation import Mutant

RATIO, LAYOUT = "rejection/ratio.py", "rejection/layout.py"
BACKEND, FILTERS, PICK = "rejection/torch_backend.py", "kernels/filters.py", "kernels/pick.py"

SUBTRACT = "weights.flatten(1)[:, : distribution.vocab_size].sub_(table.of(requests, of_drafts, distribution))"
DRAFTED_ID = "chunk.token_ids.gather(1, stop)[requests]"

MUTANTS = [
    Mutant("residual_is_p", "dense", RATIO, before=SUBTRACT, after="None"),
    Mutant(
        "ratio_accept_with_one_hot_residual",
        "dense",
        RATIO,
        before=SUBTRACT,
        after=f"weights.flatten(1).scatter_(1, {DRAFTED_ID}, 0.0)",
    ),
    Mutant(
        "residual_minus_q_only_at_draft",
        "dense",
        RATIO,
        before=SUBTRACT,
        after=f"""
            kept, flat, x = weights.clone(), weights.flatten(1), {DRAFTED_ID}
            {SUBTRACT}
            weights = kept.squeeze(2).scatter(1, x, flat.gather(1, x)).unsqueeze(2)""",
    ),
    Mutant(
        "accept_by_p_alone",
        "dense",
        RATIO,
        before="(target_prob >= draft_prob) | (uniforms.accept[:, places] * draft_prob < target_prob)",
        after="uniforms.accept[:, places] < target_prob",
    ),
    Mutant("abs_instead_of_clamp", "dense", RATIO, before="weights.clamp_(min=0.0)", after="weights.abs_()"),
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
        before="rows = chunk.rows.gather(1, stop)",
        after="rows = chunk.rows.gather(1, (stop - 1).clamp(min=0))",
    ),
    Mutant(
        "residual_of_the_next_draft_distribution",
        "dense",
        RATIO,
        before="of_drafts = places[requests]",
        after="of_drafts = (places[requests] + 1)",
    ),
    Mutant(
        "tested_against_the_next_row",
        "dense",
        BACKEND,
        before="prob = distribution.prob_of(chunk.rows, chunk.token_ids)",
        after="prob = distribution.prob_of(chunk.rows.roll(-1, 1), chunk.token_ids)",
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
        RATIO,
        before="self.probs[requests, places].to(target.weights.dtype), self.t2d",
        after="torch.nn.functional.normalize(self.probs[requests, places] ** 0.8, p=1.0, dim=1), self.t2d",
    ),
    Mutant(
        "impossible_read_as_no_proposal",
        "impossible",
        RATIO,
        before="drawn = chunk.token_ids != NO_PROPOSAL",
        after="drawn = chunk.token_ids >= 0",
    ),
    Mutant(
        "no_proposal_read_as_impossible",
        "hole",
        RATIO,
        before="drawn = chunk.token_ids != NO_PROPOSAL",
        after="drawn = chunk.has_draft",
    ),
    Mutant(
        "mass_outside_draft_vocabulary_dropped",
        "mapped",
        RATIO,
        before="distribution[:, t2d.clamp(min=0)], 0.0)",
        after="distribution[:, t2d.clamp(min=0)], 1.0)",
    ),
    Mutant(
        "test_looks_up_target_ids_in_draft_distribution",
        "mapped",
        RATIO,
        before="draft_ids = token_ids if t2d is None else t2d[token_ids]",
        after="draft_ids = token_ids",
    ),
    Mutant(
        "draft_logits_not_normalised",
        "logits",
        RATIO,
        before="draft_ids].double() / self._mass(rows)",
        after="draft_ids].double()",
    ),
    Mutant(
        "sparse_distribution_not_subtracted",
        "sparse",
        RATIO,
        before="0), torch.where(known, probs, 0.0)",
        after="0), torch.zeros_like(probs)",
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
        before="cutoff = torch.minimum(cutoff, maxima)\n    drop_below(cutoff, logits, weights)",
        after="cutoff = torch.minimum(cutoff, maxima)",
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
