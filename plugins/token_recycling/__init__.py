"""Token Recycling: drafts what the target last thought likely after each token, rejected drafts included."""

from __future__ import annotations

from .proposer import TokenRecyclingProposer

__all__ = ["TokenRecyclingProposer"]
