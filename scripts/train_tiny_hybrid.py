"""Train the tiny hybrid, a target with linear attention: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_hybrid`.

Three of four layers keep a state (a gated delta rule behind a short convolution), as in Qwen3-Next and Qwen3.5. It
learns from the dense target's distributions, which takes fewer steps than learning from text alone.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .drafters.distil import distil
from .drafters.run import arguments_for
from .train_tiny_target import shared_settings


def hybrid(tokenizer: PreTrainedTokenizerBase) -> Qwen3_5ForCausalLM:
    shared = shared_settings(tokenizer)
    shared["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    config = Qwen3_5TextConfig(
        hidden_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=448,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        **shared,
    )
    return Qwen3_5ForCausalLM(config)


def main() -> None:
    arguments = arguments_for(__doc__, steps=900)
    distil("hybrid", "target", hybrid, arguments)


if __name__ == "__main__":
    main()
