"""Drafting with heads that read the target's hidden states: EAGLE-1, EAGLE-3 and P-EAGLE."""
