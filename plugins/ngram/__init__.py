"""Prompt lookup: drafts what followed the last occurrence of the text's own ending. No model, no weights."""

from __future__ import annotations

from .proposer import NgramProposer

__all__ = ["NgramProposer"]
