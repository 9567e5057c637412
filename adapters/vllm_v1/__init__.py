"""What runs in vLLM's workers, for its V1 model runner. `specdec.adapters.vllm` is the way in."""
