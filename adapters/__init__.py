"""Proposers inside other engines, and theirs inside ours. Nothing else imports these modules."""

if __name__ != "specdec.adapters":
    raise ImportError(f"import specdec.adapters, not {__name__}: one file under two names makes two of every class")
