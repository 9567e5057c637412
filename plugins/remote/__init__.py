"""Drafts of a proposer in another process, which `specdec serve-proposer` runs."""

from __future__ import annotations

from .proposer import RemoteProposer

__all__ = ["RemoteProposer"]
