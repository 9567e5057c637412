"""A step: who computes what, the batch, the pass, the verification, the commit."""
