"""Measuring proposers: which prompts, how they are timed, how outputs are compared, what a result says.

Nothing here prints.
"""

if __name__ != "specdec.lab":
    raise ImportError(f"import specdec.lab, not {__name__}: one file under two names makes two of every class")
