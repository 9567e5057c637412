"""LayerSkip: the target drafts for itself with its first layers."""
