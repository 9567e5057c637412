"""Gemma 4's assistants: small networks that attend to the target's own keys and values."""
