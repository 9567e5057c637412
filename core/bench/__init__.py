"""Measuring proposers: which prompts, how they are timed, how outputs are compared, what a result says.

Nothing here prints.
"""
