"""Suffix decoding: drafts what most often followed the text's own ending, here and in past outputs. No weights."""

from __future__ import annotations

from .proposer import SuffixProposer

__all__ = ["SuffixProposer"]
