"""The DFlash family's variants, recognised to be refused by name: each has parts that change what it drafts."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from specdec.sdk import Checkpoint, CheckpointError, Refusal

from .fields import ANYTHING, anywhere

_VARIANTS = {"dflash2": "DFlash2", "dspark": "DSpark", "xpress": "XPress", "domino": "Domino", "lilicorr": "LiLiCorr"}

SPECULATORS_TYPES = frozenset({"dflash", "dflash2", "dspark", "xpress"})

_FIELDS = {
    "selector_rank": "DFlash2",
    "conv_kernel_size": "DFlash2",
    "markov_rank": "DSpark",
    "num_jacobi_passes": "XPress",
    "pure_draft_prefix_len": "Domino",
}

_TENSORS = {
    "*attention_conv.*": "DFlash2",
    "*mlp_conv.*": "DFlash2",
    "*candidate_selector.*": "DFlash2",
    "*markov_head.*": "DSpark",
    "*confidence_head.*": "DSpark",
    "*refiner_head.*": "XPress",
    "*prefix_gru.*": "Domino",
    "*lilicorr.*": "LiLiCorr",
}

_WORKS = "a plain DFlash checkpoint"


def is_family_architecture(name: str) -> bool:
    """Whether a class name in `architectures` is one of the family's."""
    return name == "DFlashDraftModel" or _named_in(name) is not None


def refuse_variants(checkpoint: Checkpoint) -> None:
    """Raise Refusal if config.json marks a variant of the family, with the mark."""
    for mark, value in _marks(checkpoint):
        variant = _named_in(str(value))
        if variant:
            raise _refusal(variant, mark, value)
    projector = checkpoint.get("dflash_config.projector_type", str, "none")
    if projector not in ("none", "dflash"):
        raise Refusal(f"dflash_config.projector_type {projector!r} is not implemented", _WORKS)
    for field, variant in _FIELDS.items():
        value = anywhere(checkpoint, field, ANYTHING)
        if value:
            raise _refusal(variant, field, value)


def refuse_variant_tensors(names: Iterable[str], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError SD-E174 if a tensor belongs to a variant that the configuration does not admit to be."""
    for name in sorted(names):
        for pattern, variant in _TENSORS.items():
            if fnmatchcase(name, pattern):
                facts = {"tensor": name, "checkpoint": checkpoint.directory, "fix": _WORKS}
                raise CheckpointError(
                    "SD-E174", f"the draft checkpoint is a {variant}, which is not implemented", facts
                )


def _refusal(variant: str, mark: str, value: object) -> Refusal:
    return Refusal(f"this is a {variant} checkpoint ({mark}: {value!r}), and {variant} is not implemented", _WORKS)


def _marks(checkpoint: Checkpoint) -> Iterable[tuple[str, Any]]:
    for path in ("speculators_model_type", "speculators_config.algorithm", "dflash_config.projector_type"):
        yield path, checkpoint.get(path, str, "")
    for name in checkpoint.get("architectures", list, []):
        yield "architectures", name


def _named_in(text: str) -> str | None:
    return next((variant for mark, variant in _VARIANTS.items() if mark in text.lower()), None)
