"""Uno: the target drafts for itself under an adapter."""
