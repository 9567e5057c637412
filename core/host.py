"""The host API: what `specdec.adapters` and `specdec.testing` may use of the core, and nothing else of it.

It is not for users, whose names are in `specdec`, nor for plugins, which know `specdec.sdk` only.
"""

from __future__ import annotations

from . import registry, rejection
from .cache.addressing import BlockTable
from .cache.block_pool import BlockPool
from .cache.host_addressing import CacheView, HostAddressing
from .cache.kv_cache import KVCache, LayerShape
from .cache.row_table import RowTable
from .cache.state_store import StatePass, StateStore
from .cache.transfer import upload
from .config.engine_config import EngineConfig
from .config.speculative_config import SpeculativeConfig
from .engine.assembly import parts_of
from .engine.device import profile_of
from .engine.exporters import prometheus_text
from .engine.plan import target_info
from .engine.verifier_checkpoint import with_verifier
from .engine.view import EngineView
from .kernels.backend import Backend
from .model.find_mixers import mixers_in
from .model.forward_input import ForwardInput
from .model.hidden_states import HiddenStates
from .model.mixers import Mixers
from .model.model_support import locate_model, refuse_unsupported
from .model.partial_target import PartialTarget
from .model.target import TargetOutput
from .model.tokenizer import load_tokenizer
from .proposing.admission import Withheld, admit
from .proposing.between_steps import prefix_of
from .proposing.draft_check import SUM_TOLERANCE
from .proposing.draft_store import DistributionBuffers, DraftStore, TakenDrafts
from .proposing.draft_table import CheckedDraft, DraftReport
from .proposing.proposer_host import ProposerHost
from .proposing.services import BlockDraftKV, EngineServices, KVStorage, logit_scale
from .proposing.speculation import Speculation, SpeculativeSettings
from .proposing.target_access import TargetAccess
from .proposing.top_tokens import TopTokens
from .proposing.view_guard import Snapshot
from .proposing.views import ViewBuilder
from .request.metrics import EngineMetrics
from .request.request import Committed, FinishReason, Request, Scheduled
from .runner.request_progress import RequestProgress
from .runner.scheduler import Schedule, Scheduler
from .runner.step import Runner, verified_step

__all__ = [
    "SUM_TOLERANCE",
    "Backend",
    "BlockDraftKV",
    "BlockPool",
    "BlockTable",
    "CacheView",
    "CheckedDraft",
    "Committed",
    "DistributionBuffers",
    "DraftReport",
    "DraftStore",
    "EngineConfig",
    "EngineMetrics",
    "EngineServices",
    "EngineView",
    "FinishReason",
    "ForwardInput",
    "HiddenStates",
    "HostAddressing",
    "KVCache",
    "KVStorage",
    "LayerShape",
    "Mixers",
    "PartialTarget",
    "ProposerHost",
    "Request",
    "RequestProgress",
    "RowTable",
    "Runner",
    "Schedule",
    "Scheduled",
    "Scheduler",
    "Snapshot",
    "Speculation",
    "SpeculativeConfig",
    "SpeculativeSettings",
    "StatePass",
    "StateStore",
    "TakenDrafts",
    "TargetAccess",
    "TargetOutput",
    "TopTokens",
    "ViewBuilder",
    "Withheld",
    "admit",
    "load_tokenizer",
    "locate_model",
    "logit_scale",
    "mixers_in",
    "parts_of",
    "prefix_of",
    "profile_of",
    "prometheus_text",
    "refuse_unsupported",
    "registry",
    "rejection",
    "target_info",
    "upload",
    "verified_step",
    "with_verifier",
]
