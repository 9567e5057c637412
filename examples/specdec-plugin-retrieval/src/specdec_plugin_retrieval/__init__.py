"""Drafts what a corpus on disk says after the text's own ending."""

from .index import CorpusIndex
from .proposer import RetrievalProposer

__all__ = ["CorpusIndex", "RetrievalProposer"]
