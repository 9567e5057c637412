"""Train the tiny mixture of experts, a target of its own: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_moe`.

It learns from the dense target's distributions, which takes fewer steps than learning from text alone.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .drafters.distil import distil
from .drafters.run import arguments_for
from .train_tiny_target import shared_settings


def mixture(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        hidden_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=320,
        moe_intermediate_size=160,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        **shared_settings(tokenizer),
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    arguments = arguments_for(__doc__, steps=500)
    distil("moe", "target", mixture, arguments, routed=True)


if __name__ == "__main__":
    main()
