"""Replays: proposers that draft along a recording, through the engine's own step and without its target."""
