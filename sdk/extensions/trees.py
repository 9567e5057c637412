"""Drafts that are trees."""

from __future__ import annotations

from typing import ClassVar

from ..config import Extension


class Trees(Extension):
    """Drafts may have parents: `Draft.parents`, `StepView.accepted_nodes`, `ProposerConfig.max_nodes`."""

    name: ClassVar[str] = "trees"
    version: ClassVar[int] = 1
