"""Drafts the text that a request's grammar forces. No model, no weights."""

from __future__ import annotations

from .proposer import ForcedProposer

__all__ = ["ForcedProposer"]
