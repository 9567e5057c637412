"""The contract between the engine and a proposer. `import specdec.sdk` loads no torch."""

if __name__ != "specdec.sdk":
    raise ImportError(f"import specdec.sdk, not {__name__}: the same file under two names makes two of every class")

from .checkpoint import Checkpoint
from .config import DraftSampleMethod, NetworkSettings, ProposerConfig, StrictModel
from .errors import (
    CheckpointError,
    ConfigError,
    IntegrityError,
    PluginId,
    PluginLoadError,
    ProposerError,
    Refusal,
    RequestError,
    SpecdecError,
    SpecdecWarning,
    UnsupportedModelError,
)
from .hooks import HookSpecs, Registry, StepStats, VerifiedRequest, VerifiedStep, hookimpl, hookspec
from .host_proposer import HostProposer
from .late_proposer import LateOptions, LateProposer
from .needs import DistributionForm, Needs, Placement, SamplingField
from .proposer_protocol import API_VERSION, Proposer, ProposerBase
from .services import Services
from .types import (
    PADDING_TOKEN_ID,
    DistributionKind,
    Draft,
    DraftDistribution,
    DraftRandom,
    KeptTokens,
    Phase,
    RequestView,
    SamplingView,
    StepView,
    TargetInfo,
)

__all__ = [
    "API_VERSION",
    "PADDING_TOKEN_ID",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DistributionForm",
    "DistributionKind",
    "Draft",
    "DraftDistribution",
    "DraftRandom",
    "DraftSampleMethod",
    "HookSpecs",
    "HostProposer",
    "IntegrityError",
    "KeptTokens",
    "LateOptions",
    "LateProposer",
    "Needs",
    "NetworkSettings",
    "Phase",
    "Placement",
    "PluginId",
    "PluginLoadError",
    "Proposer",
    "ProposerBase",
    "ProposerConfig",
    "ProposerError",
    "Refusal",
    "Registry",
    "RequestError",
    "RequestView",
    "SamplingField",
    "SamplingView",
    "Services",
    "SpecdecError",
    "SpecdecWarning",
    "StepStats",
    "StepView",
    "StrictModel",
    "TargetInfo",
    "UnsupportedModelError",
    "VerifiedRequest",
    "VerifiedStep",
    "hookimpl",
    "hookspec",
]
