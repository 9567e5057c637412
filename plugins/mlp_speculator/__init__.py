"""MLP speculator: a small network in a row, one stage for each token."""
