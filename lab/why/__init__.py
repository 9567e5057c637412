"""Why drafts were rejected: what the target and the proposer thought of each rejected token, and what that cost."""

from .run import run_why
from .summary import why_facts
from .trace import Choices, Traced, View, misses_of

__all__ = ["Choices", "Traced", "View", "misses_of", "run_why", "why_facts"]
