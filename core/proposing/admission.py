"""Whether the engine can give a proposer what it needs: answered once, in numbers, before weights load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specdec.sdk.errors import Refusal
from specdec.sdk.extensions import DraftKV, TargetKV, TargetLayers, TargetTokens
from specdec.sdk.needs import Needs
from specdec.sdk.types import TargetInfo

from .draft_table import distribution_width

if TYPE_CHECKING:
    from ..registry import LoadedProposer

logger = logging.getLogger("specdec")

DISTRIBUTION_BYTES = 4  # draft probabilities are kept in float32
TOKEN_ID_BYTES = 8
MIB = 2**20

Withheld = Mapping[str, tuple[str, str]]
"""By the id of an extension that is not offered: why, and what works instead."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What admitting a proposer costs. The engine takes it from its memory budget."""

    distribution_bytes: int  # draft distributions of every row between two steps; 0 where no distribution is kept
    draft_kv_bytes_per_block: int  # beside the target's own, for each KV block

    @property
    def keeps_distribution(self) -> bool:
        """Whether verification will read draft distributions."""
        return self.distribution_bytes > 0


def admit(
    loaded: LoadedProposer,
    target: TargetInfo,
    *,
    distribution_budget_bytes: int | None = None,
    withheld: Withheld | None = None,
) -> Admission:
    """Compute what `loaded` costs on `target`, or raise Refusal with the numbers and what would work.

    `distribution_budget_bytes` is the most that draft distributions may take; None: no limit. `withheld`: what is known
    of the extensions that are not in `target.extensions`.
    """
    try:
        _check_extensions(loaded, target, withheld or {})
        admission = _admit(loaded, target, distribution_budget_bytes)
    except Refusal as refusal:
        raise refusal.attributed_on(loaded.plugin) from None
    logger.info(
        "proposer %s: draft distributions %.1f MiB, draft KV %d bytes per block",
        loaded.plugin,
        admission.distribution_bytes / MIB,
        admission.draft_kv_bytes_per_block,
    )
    return admission


def _admit(loaded: LoadedProposer, target: TargetInfo, distribution_budget_bytes: int | None) -> Admission:
    needs = loaded.needs
    _check_hidden_states(needs, target)
    _check_draft_vocabulary(needs, target)
    _check_top_k(needs, target)
    _check_target_kv(needs, target)
    draft_kv = needs.extension(DraftKV)
    probabilistic = loaded.config.draft_sample_method == "probabilistic"
    if len(set(needs.distributions)) > 1:
        raise Refusal("its drafts report distributions of two forms", "one form: this engine keeps one")
    if probabilistic and not needs.distributions:
        reason = 'draft_sample_method is "probabilistic", and this proposer reports no distribution of its drafts'
        raise Refusal(f"{reason} (Needs.distributions is empty)", '"draft_sample_method": "greedy"')
    k = loaded.config.width
    distribution_bytes = target.max_num_seqs * k * _distribution_bytes_per_token(needs, target) if probabilistic else 0
    if distribution_budget_bytes is not None and distribution_bytes > distribution_budget_bytes:
        raise _distribution_too_large(needs, target, k, distribution_budget_bytes)
    return Admission(
        distribution_bytes=distribution_bytes,
        draft_kv_bytes_per_block=_draft_kv_bytes_per_block(draft_kv, target) if draft_kv else 0,
    )


def _check_extensions(loaded: LoadedProposer, target: TargetInfo, withheld: Withheld) -> None:
    needs, nodes = loaded.needs, loaded.config.max_nodes
    for each in needs.asked:
        if each.id not in target.extensions:
            works = f"{type(each).__name__} only where target.extensions has {each.id}"
            other = next((id_ for id_ in target.extensions if id_.partition("@")[0] == each.name), None)
            why = f"this engine has {other}" if other else "this engine does not have it"
            why, works = withheld.get(each.id, (why, works))
            raise Refusal(f"it asks for {each.id}: {why}", works)
    if nodes is not None and nodes > target.max_nodes:
        raise Refusal(
            f"its trees have {nodes} nodes, and {target.max_nodes} is the most", f'"max_nodes": {target.max_nodes}'
        )


def _check_hidden_states(needs: Needs, target: TargetInfo) -> None:
    beyond = [k for k in needs.hidden_states if isinstance(k, int) and k > target.num_layers]
    if beyond:
        reason = f"it reads the hidden states after layer {', '.join(map(str, beyond))} of {target.model}"
        limit = f"boundaries 0 .. {target.num_layers} (the target has {target.num_layers} layers)"
        raise Refusal(reason, f'{limit}, or "final"')


def _check_top_k(needs: Needs, target: TargetInfo) -> None:
    tokens = needs.extension(TargetTokens)
    if tokens is not None and tokens.top_k > target.vocab_size:
        reason = f"it reads the target's {tokens.top_k} most likely tokens, and there are {target.vocab_size}"
        raise Refusal(reason, f"TargetTokens(top_k={target.vocab_size}) or less")


def _check_target_kv(needs: Needs, target: TargetInfo) -> None:
    beyond = [layer for layer in target_layers_used(needs) if layer >= target.num_layers]
    if beyond:
        reason = f"it uses keys and values of layer {', '.join(map(str, beyond))} of {target.model}"
        raise Refusal(reason, f"layers 0 .. {target.num_layers - 1} (the target has {target.num_layers} layers)")


def target_layers_used(needs: Needs) -> tuple[int, ...]:
    """Layers of the target whose keys and values it reads, or which it runs."""
    asked = needs.extension(TargetKV), needs.extension(TargetLayers)
    return tuple(layer for each in asked if each is not None for layer in each.layers)


def _check_draft_vocabulary(needs: Needs, target: TargetInfo) -> None:
    ids = needs.draft_vocabulary
    if ids is None:
        return
    outside = [(draft_id, id_) for draft_id, id_ in enumerate(ids) if not 0 <= id_ < target.vocab_size]
    if outside:
        draft_id, id_ = outside[0]
        reason = f"its draft_vocabulary maps draft id {draft_id} to target id {id_} ({len(outside)} such ids)"
        raise Refusal(reason, f"target ids 0 .. {target.vocab_size - 1}: a checkpoint made for this target")
    if not ids or len(set(ids)) != len(ids):
        reason = f"its draft_vocabulary has {len(ids)} entries for {len(set(ids))} different target ids"
        raise Refusal(reason, "one target id of its own for each draft id, and at least one")


def _draft_kv_bytes_per_block(kv: DraftKV, target: TargetInfo) -> int:
    values_per_token = kv.num_layers * kv.num_heads * (kv.head_dim + (kv.value_head_dim or kv.head_dim))
    return values_per_token * target.block_size * _value_bytes(kv.dtype or target.dtype)


def _value_bytes(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise Refusal(f'the dtype "{dtype}" is unknown', "a floating-point dtype of torch, such as bfloat16")
    return found.itemsize


def _distribution_bytes_per_token(needs: Needs, target: TargetInfo) -> int:
    bytes_each = DISTRIBUTION_BYTES + (TOKEN_ID_BYTES if needs.stored_form == "sparse" else 0)
    return bytes_each * distribution_width(needs, target.vocab_size)


def _distribution_too_large(needs: Needs, target: TargetInfo, k: int, budget: int) -> Refusal:
    rows, per_token = target.max_num_seqs, _distribution_bytes_per_token(needs, target)
    unit = "entries" if needs.stored_form == "sparse" else "ids"
    width = f"{distribution_width(needs, target.vocab_size)} {unit}"
    needed = rows * k * per_token / MIB
    reason = (
        f"its {needs.stored_form} draft distributions take {rows} rows x {k} drafts x {width} = {needed:.1f} MiB, "
        f"and the budget is {budget / MIB:.1f} MiB"
    )
    fitting_k, fitting_rows = budget // (rows * per_token), budget // (k * per_token)
    works = [f'"num_speculative_tokens": {fitting_k}'] if fitting_k else []
    works += [f"max_num_seqs={fitting_rows}"] if fitting_rows else []
    works += ["a sparse draft distribution"] if needs.stored_form == "dense" else []
    return Refusal(reason, ", or ".join([*works, '"draft_sample_method": "greedy"']))
