"""Comparing proposers: what is varied, how the figures of each come out, and by how much they differ."""

from .recorded import REPEAT, compared_replays, run_compare_recorded
from .run import run_compare
from .table import Measured, comparison_facts
from .variants import Sweep, Variant, variants

__all__ = [
    "REPEAT",
    "Measured",
    "Sweep",
    "Variant",
    "compared_replays",
    "comparison_facts",
    "run_compare",
    "run_compare_recorded",
    "variants",
]
