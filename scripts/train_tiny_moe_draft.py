"""Train the draft model of the tiny mixture of experts, a smaller mixture, after the mixture itself.

`OMP_NUM_THREADS=1 python -m scripts.train_tiny_moe_draft`
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .drafters.distil import distil
from .drafters.run import arguments_for
from .train_tiny_target import shared_settings


def small_mixture(tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=192,
        moe_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        **shared_settings(tokenizer),
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    arguments = arguments_for(__doc__, steps=300)
    distil("moe_draft", "moe", small_mixture, arguments, routed=True)


if __name__ == "__main__":
    main()
