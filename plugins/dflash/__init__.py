"""Block drafting: all drafts of a step are filled in at once from the target's hidden states."""
