"""Lossless verification of drafts: `verify`, `verify_block`, `sample`; and their types."""

from .sampler import VerificationRule as VerificationRule
from .sampler import plan as plan
from .sampler import sample as sample
from .sampler import verify as verify
from .sampler import verify_block as verify_block
from .types import IMPOSSIBLE as IMPOSSIBLE
from .types import NO_PROPOSAL as NO_PROPOSAL
from .types import PADDING_TOKEN_ID as PADDING_TOKEN_ID
from .types import STATUS_BAD_ROW as STATUS_BAD_ROW
from .types import STATUS_EMPTY_RESIDUAL as STATUS_EMPTY_RESIDUAL
from .types import DistributionKind as DistributionKind
from .types import DraftDistributions as DraftDistributions
from .types import DraftRows as DraftRows
from .types import SamplingRows as SamplingRows
from .types import Uniforms as Uniforms
from .types import Verdict as Verdict
