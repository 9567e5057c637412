"""Drafting classes written for vLLM or for transformers, in our engine. They are known by their signatures."""
