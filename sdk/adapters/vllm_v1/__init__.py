"""What runs in vLLM's workers, for its V1 model runner. `specdec.sdk.adapters.vllm` is the way in."""
