"""Which member of the DFlash family a checkpoint is; relatives with other layers are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from fnmatch import fnmatchcase

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.errors import CheckpointError

from .fields import ANYTHING, anywhere


class Member(StrEnum):
    """A backbone, and what is done with the outputs of its block."""

    DFLASH = "DFlash"
    LILICORR = "LiLiCorr"  # before DFlash2, whose convolutions it may have
    DFLASH2 = "DFlash2"
    DSPARK = "DSpark"
    DOMINO = "Domino"
    XPRESS = "XPress"


SPECULATORS_TYPES = frozenset({"dflash", "dflash2", "dspark", "xpress"})

_MARKS = {each.lower(): each for each in Member if each is not Member.DFLASH} | {"causal_v5": Member.DOMINO}
"""In names of classes and types, in lower case; Domino had another name early."""

_PLAIN = ("DFlashDraftModel", "MuseGlimmerAssistantModel")

_FIELDS = {
    "lilicorr_candidate_topk": Member.LILICORR,
    "selector_rank": Member.DFLASH2,
    "conv_kernel_size": Member.DFLASH2,
    "markov_rank": Member.DSPARK,
    "num_jacobi_passes": Member.XPRESS,
    "pure_draft_prefix_len": Member.DOMINO,
}

_TENSORS = {
    "*attention_conv.*": (Member.DFLASH2, Member.LILICORR),
    "*mlp_conv.*": (Member.DFLASH2, Member.LILICORR),
    "*candidate_selector.*": (Member.DFLASH2,),
    "*markov_head.*": (Member.DSPARK,),
    "*confidence_head.*": (Member.DSPARK,),
    "*refiner_head.*": (Member.XPRESS,),
    "*prefix_gru.*": (Member.DOMINO,),
    "*lilicorr.*": (Member.LILICORR,),
}

_OF_A_TARGET = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")

_OTHER_LAYERS = {
    "Gemma4DSparkModel": "its draft layers are Gemma 4's",
    "K3DSparkModel": "its draft layers have latent attention (MLA), of which no draft KV is kept",
    "DSparkMiniMaxDraftModel": "its draft layers are MiniMax-M3's",
}

_WORKS = "a checkpoint of the DFlash family with layers like Qwen3's"


def is_family(checkpoint: Checkpoint) -> bool:
    """Whether config.json states a speculators type, a `dflash_config` or an architecture of the family."""
    config = checkpoint.config
    stated = config.get("speculators_model_type")
    if stated is not None:
        return stated in SPECULATORS_TYPES
    if isinstance(config.get("dflash_config"), dict) or _is_of_a_target(checkpoint):
        return True
    return any(str(name) in _PLAIN or _member_in(str(name)) for name in config.get("architectures") or ())


def is_dspark(checkpoint: Checkpoint) -> bool:
    """Whether it is a DSpark checkpoint, those that are refused included."""
    return is_family(checkpoint) and (_member(checkpoint) is Member.DSPARK or _is_of_a_target(checkpoint))


def member_of(checkpoint: Checkpoint) -> Member:
    """Raises Refusal for layers of another kind, and for an unknown way to draw."""
    if _is_of_a_target(checkpoint):
        reason = "this is a DeepSeek-V4 target with DSpark stages inside, which are layers like the target's own"
        raise Refusal(reason, "a DSpark checkpoint of its own, with layers like Qwen3's")
    for name in checkpoint.get("architectures", list, []):
        if name in _OTHER_LAYERS:
            raise Refusal(f"{name} is not implemented: {_OTHER_LAYERS[name]}", _WORKS)
    projector = checkpoint.get("dflash_config.projector_type", str, "none")
    if projector not in ("none", "dflash") and _member_in(projector) is None:
        raise Refusal(f"dflash_config.projector_type {projector!r} is not implemented", _WORKS)
    return _member(checkpoint)


def refuse_tensors_of_others(names: Iterable[str], member: Member, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError SD-E174 if a tensor belongs to a member that the configuration does not admit to be."""
    for name in sorted(names):
        for pattern, others in _TENSORS.items():
            if member not in others and fnmatchcase(name, pattern):
                facts = {"tensor": name, "checkpoint": checkpoint.directory, "its configuration says": str(member)}
                raise CheckpointError("SD-E174", f"the draft checkpoint has a tensor of a {others[0]}", facts)


def _is_of_a_target(checkpoint: Checkpoint) -> bool:
    return any(checkpoint.config.get(key) is not None for key in _OF_A_TARGET)


def _member(checkpoint: Checkpoint) -> Member:
    """The first mark counts; what nothing marks is plain DFlash."""
    told = {_member_in(str(mark)) for mark in _marks(checkpoint)}
    told |= {member for field, member in _FIELDS.items() if anywhere(checkpoint, field, ANYTHING)}
    return next((each for each in Member if each in told), Member.DFLASH)


def _marks(checkpoint: Checkpoint) -> Iterator[str]:
    for path in ("speculators_model_type", "speculators_config.algorithm", "dflash_config.projector_type"):
        yield checkpoint.get(path, str, "")
    yield from checkpoint.get("architectures", list, [])


def _member_in(text: str) -> Member | None:
    return next((member for mark, member in _MARKS.items() if mark in text.lower()), None)
