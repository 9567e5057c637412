"""What vLLM's two model runners share: the driver of a proposer, its rows, its settings, and what vLLM is asked for."""
