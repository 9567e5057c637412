"""Comparing proposers: what is varied, how the figures of each come out, and by how much they differ."""

from .recorded import run_compare_recorded
from .run import run_compare
from .variants import Sweep, variants

__all__ = ["Sweep", "run_compare", "run_compare_recorded", "variants"]
