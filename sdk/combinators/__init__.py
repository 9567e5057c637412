"""Proposers made of proposers.

    from specdec.sdk.combinators import Adaptive, Chain

    class LookUpThenModel(Chain):
        parts = (LookUp, SmallModel)

Importing it loads torch; `import specdec.sdk` does not.
"""

from .adaptive import AcceptanceThreshold, Adaptive, LengthPolicy
from .chain import Chain
from .combinator import Combinator

__all__ = ["AcceptanceThreshold", "Adaptive", "Chain", "Combinator", "LengthPolicy"]
