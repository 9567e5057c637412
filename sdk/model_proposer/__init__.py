"""Bases of model-based proposers: a checkpoint's weights, draft KV, drafting loops, and draft distributions.

    from specdec.sdk.model_proposer import AutoregressiveProposer

Importing it loads torch; `import specdec.sdk` does not.
"""

from .autoregressive import AutoregressiveProposer, DraftInputs
from .base import ModelOptions, ModelProposer, TargetEmbedding, TargetHead
from .draft_masks import DraftMasks
from .drafts import DraftChain
from .each import per_request, width_of
from .from_target import CachedTargetProposer
from .kv_shape import draft_kv_of
from .lora import LowRank, LowRankPair, is_adapter, load_adapter, read_adapter
from .masked import MaskedOptions, MaskedProposer, mask_token_id
from .parallel import ParallelOptions, ParallelProposer
from .rotary import rotate
from .sampling import DraftSampler, Drawing, DrawRule
from .vocabulary import DraftVocabulary
from .weights import Weights, load_module

__all__ = [
    "AutoregressiveProposer",
    "CachedTargetProposer",
    "DraftChain",
    "DraftInputs",
    "DraftMasks",
    "DraftSampler",
    "DraftVocabulary",
    "DrawRule",
    "Drawing",
    "LowRank",
    "LowRankPair",
    "MaskedOptions",
    "MaskedProposer",
    "ModelOptions",
    "ModelProposer",
    "ParallelOptions",
    "ParallelProposer",
    "TargetEmbedding",
    "TargetHead",
    "Weights",
    "draft_kv_of",
    "is_adapter",
    "load_adapter",
    "load_module",
    "mask_token_id",
    "per_request",
    "read_adapter",
    "rotate",
    "width_of",
]
