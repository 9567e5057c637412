"""The contract between the engine and a proposer. `import specdec.sdk` loads no torch."""

if __name__ != "specdec.sdk":
    raise ImportError(f"import specdec.sdk, not {__name__}: the same file under two names makes two of every class")

from .config import NetworkSettings, ProposerConfig, StrictModel
from .distribution_kind import DistributionKind
from .errors import ConfigError, ProposerError, Refusal, SpecdecError, SpecdecWarning
from .hooks import Registry, hookimpl
from .host_proposer import HostProposer
from .late_proposer import LateProposer
from .needs import Needs
from .proposer_protocol import API_VERSION, Proposer, ProposerBase
from .services import Services
from .types import (
    PADDING_TOKEN_ID,
    Draft,
    DraftDistribution,
    DraftRandom,
    KeptTokens,
    Phase,
    RequestEnd,
    RequestView,
    SamplingView,
    StepView,
    TargetInfo,
    TokenHistory,
)

__all__ = [
    "API_VERSION",
    "PADDING_TOKEN_ID",
    "ConfigError",
    "DistributionKind",
    "Draft",
    "DraftDistribution",
    "DraftRandom",
    "HostProposer",
    "KeptTokens",
    "LateProposer",
    "Needs",
    "NetworkSettings",
    "Phase",
    "Proposer",
    "ProposerBase",
    "ProposerConfig",
    "ProposerError",
    "Refusal",
    "Registry",
    "RequestEnd",
    "RequestView",
    "SamplingView",
    "Services",
    "SpecdecError",
    "SpecdecWarning",
    "StepView",
    "StrictModel",
    "TargetInfo",
    "TokenHistory",
    "hookimpl",
]
