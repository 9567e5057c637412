"""Structured output through the library xgrammar, which is imported with the first grammar."""

from __future__ import annotations

from .backend import XGrammarBackend

__all__ = ["XGrammarBackend"]
