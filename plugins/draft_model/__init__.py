"""Drafting with a smaller causal language model."""
