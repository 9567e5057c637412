"""Whether the engine can give a proposer what it needs: answered once, in numbers, before weights load."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from specdec.sdk.errors import Refusal
from specdec.sdk.needs import DraftKV, Needs
from specdec.sdk.trees import MOST_NODES
from specdec.sdk.types import TargetInfo

from ..registry import LoadedProposer

logger = logging.getLogger("specdec")

BYTES_PER_VALUE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
DISTRIBUTION_BYTES = 4  # draft probabilities are kept in float32
TOKEN_ID_BYTES = 8
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What admitting a proposer costs. The engine takes it from its memory budget."""

    distribution_bytes: int  # draft distributions of every row between two steps; 0 where no distribution is kept
    draft_kv_bytes_per_block: int  # beside the target's own, for each KV block
    hidden_bytes_per_token: int  # hidden states shown for each kept row
    top_k_bytes_per_token: int = 0  # the target's most likely tokens, likewise

    @property
    def keeps_distribution(self) -> bool:
        """Whether verification will read draft distributions."""
        return self.distribution_bytes > 0


def admit(
    loaded: LoadedProposer,
    target: TargetInfo,
    *,
    distribution_budget_bytes: int | None = None,
    no_trees: str | None = "",
) -> Admission:
    """What `loaded` costs on `target`, or Refusal with the numbers and what would work.

    `distribution_budget_bytes` is the most that draft distributions may take; None: no limit. `no_trees`: why trees are
    not verified here, behind a comma. None: they are.
    """
    try:
        _refuse_reserved(loaded, no_trees)
        admission = _admit(loaded, target, distribution_budget_bytes)
    except Refusal as refusal:
        raise refusal.attributed_on(loaded.plugin) from None
    logger.info(
        "proposer %s: draft distributions %.1f MiB, draft KV %d bytes per block, hidden states %d bytes per token, "
        "the target's most likely tokens %d bytes per token",
        loaded.plugin,
        admission.distribution_bytes / MIB,
        admission.draft_kv_bytes_per_block,
        admission.hidden_bytes_per_token,
        admission.top_k_bytes_per_token,
    )
    return admission


def _admit(loaded: LoadedProposer, target: TargetInfo, distribution_budget_bytes: int | None) -> Admission:
    needs = loaded.needs
    _check_hidden_states(needs, target)
    _check_draft_vocabulary(needs, target)
    _check_top_k(needs, target)
    _check_target_kv(needs, target)
    probabilistic = loaded.config.draft_sample_method == "probabilistic"
    if probabilistic and needs.distribution == "one_hot":
        reason = 'draft_sample_method is "probabilistic", and this proposer reports no distribution of its drafts'
        reason += ' (distribution="one_hot")'
        raise Refusal(reason, '"draft_sample_method": "greedy"')
    k = loaded.config.num_draft_tokens
    distribution_bytes = target.max_num_seqs * k * _distribution_bytes_per_token(needs, target) if probabilistic else 0
    if distribution_budget_bytes is not None and distribution_bytes > distribution_budget_bytes:
        raise _distribution_too_large(needs, target, k, distribution_budget_bytes)
    return Admission(
        distribution_bytes=distribution_bytes,
        draft_kv_bytes_per_block=_draft_kv_bytes_per_block(needs.draft_kv, target) if needs.draft_kv else 0,
        hidden_bytes_per_token=len(needs.hidden_states) * target.hidden_size * _value_bytes(target.dtype),
        top_k_bytes_per_token=needs.target_top_k * (TOKEN_ID_BYTES + DISTRIBUTION_BYTES),
    )


def _refuse_reserved(loaded: LoadedProposer, no_trees: str | None) -> None:
    needs = loaded.needs
    if needs.topology == "tree":
        if no_trees is not None:
            raise Refusal(f'its drafts are a tree (topology="tree"){no_trees}', 'topology="chain"')
        if loaded.config.num_draft_tokens > MOST_NODES:
            reason = f"num_speculative_tokens is {loaded.config.num_draft_tokens}, and a tree has {MOST_NODES} nodes"
            raise Refusal(f"{reason} at most", f'"num_speculative_tokens": {MOST_NODES}')
    if needs.multimodal:
        raise Refusal("it needs image or audio inputs (multimodal=True)", "a proposer for text")


def _check_hidden_states(needs: Needs, target: TargetInfo) -> None:
    beyond = [k for k in needs.hidden_states if isinstance(k, int) and k > target.num_layers]
    if beyond:
        reason = f"it reads the hidden states after layer {', '.join(map(str, beyond))} of {target.model}"
        limit = f"boundaries 0 .. {target.num_layers} (the target has {target.num_layers} layers)"
        raise Refusal(reason, f'{limit}, or "final"')


def _check_top_k(needs: Needs, target: TargetInfo) -> None:
    if needs.target_top_k > target.vocab_size:
        reason = f"it reads the target's {needs.target_top_k} most likely tokens, and there are {target.vocab_size}"
        raise Refusal(reason, f"target_top_k={target.vocab_size} or less")


def _check_target_kv(needs: Needs, target: TargetInfo) -> None:
    run = needs.target_layers.layers if needs.target_layers else ()
    beyond = [layer for layer in (*needs.target_kv, *run) if layer >= target.num_layers]
    if beyond:
        reason = f"it uses keys and values of layer {', '.join(map(str, beyond))} of {target.model}"
        raise Refusal(reason, f"layers 0 .. {target.num_layers - 1} (the target has {target.num_layers} layers)")


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
    if dtype not in BYTES_PER_VALUE:
        raise Refusal(f'the dtype "{dtype}" is unknown', ", ".join(BYTES_PER_VALUE))
    return BYTES_PER_VALUE[dtype]


def _distribution_bytes_per_token(needs: Needs, target: TargetInfo) -> int:
    if needs.distribution == "sparse":
        return needs.sparse_top_m * (DISTRIBUTION_BYTES + TOKEN_ID_BYTES)
    return DISTRIBUTION_BYTES * _distribution_width(needs, target)


def _distribution_width(needs: Needs, target: TargetInfo) -> int:
    return target.vocab_size if needs.draft_vocabulary is None else len(needs.draft_vocabulary)


def _distribution_too_large(needs: Needs, target: TargetInfo, k: int, budget: int) -> Refusal:
    rows, per_token = target.max_num_seqs, _distribution_bytes_per_token(needs, target)
    width = (
        f"{needs.sparse_top_m} entries"
        if needs.distribution == "sparse"
        else f"{_distribution_width(needs, target)} ids"
    )
    needed = rows * k * per_token / MIB
    reason = (
        f"its {needs.distribution} draft distributions take {rows} rows x {k} drafts x {width} = {needed:.1f} MiB, "
        f"and the budget is {budget / MIB:.1f} MiB"
    )
    fitting_k, fitting_rows = budget // (rows * per_token), budget // (k * per_token)
    works = [f'"num_speculative_tokens": {fitting_k}'] if fitting_k else []
    works += [f"max_num_seqs={fitting_rows}"] if fitting_rows else []
    works += ["a sparse draft distribution"] if needs.distribution == "dense" else []
    return Refusal(reason, ", or ".join([*works, '"draft_sample_method": "greedy"']))
