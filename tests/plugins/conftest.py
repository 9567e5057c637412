"""Lets tests import `plugin_helpers` by name, and shares the target whose states drafts are replayed on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def target():
    """The tiny target's own hidden states; whoever wants another target defines a fixture of this name."""
    from plugin_helpers import TargetStates

    return TargetStates()


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """One of the shipped prompts."""
    from replaying import tiny_prompts

    return tiny_prompts()[4]


@pytest.fixture(scope="session")
def sequence() -> list[int]:
    """That prompt with what plain decoding appends."""
    from replaying import tiny_truth

    return tiny_truth()[4]
