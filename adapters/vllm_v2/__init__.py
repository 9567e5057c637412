"""Proposers inside vLLM's V2 model runner. `plugin.register` is the entry point that vLLM calls in each process."""
