"""Relatives of these heads that are not implemented, recognised to be refused by name."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError

from .decoder_config import is_latent

_TENSORS = {
    "parallel_draft_heads.*": "an EAGLE head with Medusa heads on top",
    "*.lora_[AB].*": "an EAGLE head with adapters of the target",
    "embed*_layernorm.*": "an EAGLE-1 head with norms around its projection",
    "post_embedding_layernorm.*": "an EAGLE-1 head with norms around its projection",
    "hidden_layernorm.*": "an EAGLE-1 head with norms around its projection",
    "*lm_head_layernorm.*": "an EAGLE-1 head with norms around its projection",
    "enorm.*": "an EAGLE-1 head with norms around its projection",
    "hnorm.*": "an EAGLE-1 head with norms around its projection",
    "fusion_fc.*": "an EAGLE-1 head in the retired layout of speculators",
    "layers.[1-9]*.hidden_norm.*": "a multi-layer EAGLE-3 head whose later layers have norms of the first",
    "*_scale": "a quantized EAGLE head",
    "*_scale_inv": "a quantized EAGLE head",
}
_LATENT = ".kv_a_proj_with_mqa.weight"
_WORKS = "a plain EAGLE-1, EAGLE-3 or P-EAGLE checkpoint"


def refuse_variants(checkpoint: Checkpoint, names: Collection[str], prefix: str) -> None:
    """Raise Refusal if config.json marks a relative, CheckpointError SD-E170, E174 if only its tensors, `names`, do."""
    if checkpoint.get("speculators_model_type", str, "") == "eagle":
        reason = "this is an EAGLE-1 head in the retired layout of speculators, which is not implemented"
        raise Refusal(reason, "the head as its authors published it")
    latent = is_latent(checkpoint, prefix)
    if not latent and any(name.endswith(_LATENT) for name in names):
        facts = {"field": f"{prefix}kv_lora_rank", "file": checkpoint.config_file, "found": f"tensors *{_LATENT}"}
        raise CheckpointError("SD-E170", "the draft checkpoint's configuration has no 'kv_lora_rank'", facts)
    if not latent and not checkpoint.get(prefix + "is_neox_style", bool, True):
        reason = "its configuration says is_neox_style: false, and rotary pairs of neighbours are not implemented"
        raise Refusal(reason, _WORKS)
    for name in sorted(names):
        for pattern, variant in _TENSORS.items():
            if fnmatchcase(name, pattern):
                facts = {"tensor": name, "checkpoint": checkpoint.directory, "works": _WORKS}
                raise CheckpointError("SD-E174", f"the draft checkpoint is {variant}, which is not implemented", facts)
