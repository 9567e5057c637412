"""The host API: what `specdec.adapters` and `specdec.testing` may use of the core, and nothing else of it.

It is not for users, whose names are in `specdec`, nor for plugins, which know `specdec.sdk` only.
"""

from __future__ import annotations

from . import registry as registry
from . import rejection as rejection
from .cache.addressing import Addressing as Addressing
from .cache.addressing import CacheView as CacheView
from .cache.block_pool import BlockPool as BlockPool
from .cache.kv_cache import KVCache as KVCache
from .cache.kv_cache import LayerShape as LayerShape
from .cache.row_table import RowTable as RowTable
from .cache.state_store import StateLayout as StateLayout
from .cache.state_store import StateStore as StateStore
from .cache.transfer import upload as upload
from .config.engine_config import EngineConfig as EngineConfig
from .config.speculative_config import SpeculativeConfig as SpeculativeConfig
from .engine.assembly import parts_of as parts_of
from .engine.device import profile_of as profile_of
from .engine.grammars import Grammars as Grammars
from .engine.plan import target_info as target_info
from .engine.verifier_checkpoint import with_verifier as with_verifier
from .kernels.backend import Backend as Backend
from .kernels.backend import compiler as compiler
from .model.find_mixers import mixers_in as mixers_in
from .model.hidden_states import HiddenStates as HiddenStates
from .model.mixers import Mixers as Mixers
from .model.model_support import locate_model as locate_model
from .model.model_support import refuse_unsupported as refuse_unsupported
from .model.partial_target import PartialTarget as PartialTarget
from .model.target import ForwardInput as ForwardInput
from .model.target import TargetOutput as TargetOutput
from .model.tokenizer import load_tokenizer as load_tokenizer
from .proposing.admission import Withheld as Withheld
from .proposing.admission import admit as admit
from .proposing.draft_check import SUM_TOLERANCE as SUM_TOLERANCE
from .proposing.draft_store import DistributionBuffers as DistributionBuffers
from .proposing.draft_store import DraftStore as DraftStore
from .proposing.draft_store import TakenDrafts as TakenDrafts
from .proposing.draft_table import CheckedDraft as CheckedDraft
from .proposing.draft_table import DraftReport as DraftReport
from .proposing.proposer_host import ProposerHost as ProposerHost
from .proposing.proposer_host import prefix_of as prefix_of
from .proposing.services import EngineServices as EngineServices
from .proposing.services import KVStorage as KVStorage
from .proposing.services import Provided as Provided
from .proposing.speculation import Speculation as Speculation
from .proposing.speculation import SpeculativeSettings as SpeculativeSettings
from .proposing.top_tokens import TopTokens as TopTokens
from .proposing.view_guard import Snapshot as Snapshot
from .proposing.view_guard import tensors_of as tensors_of
from .proposing.views import Computed as Computed
from .proposing.views import ViewBuilder as ViewBuilder
from .request.grammar import RequestGrammar as RequestGrammar
from .request.metrics import Counter as Counter
from .request.metrics import EngineMetrics as EngineMetrics
from .request.metrics import Gauge as Gauge
from .request.metrics import Metric as Metric
from .request.metrics import Vector as Vector
from .request.request import Committed as Committed
from .request.request import FinishReason as FinishReason
from .request.request import Request as Request
from .request.request import Scheduled as Scheduled
from .runner.request_progress import RequestProgress as RequestProgress
from .runner.scheduler import Schedule as Schedule
from .runner.scheduler import Scheduler as Scheduler
from .runner.step import Runner as Runner
from .runner.step import verified_step as verified_step
