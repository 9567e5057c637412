"""Tests that need a CUDA device; without one each of them is skipped, and says so.

PYTHONPATH=src python3 -m pytest tests/gpu --confcutdir tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers")]


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))
