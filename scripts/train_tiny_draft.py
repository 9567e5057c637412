"""Train the draft model of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_draft --compile`."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from .drafters.distil import distil
from .drafters.run import arguments_for
from .train_tiny_target import shared_settings


def draft_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=320,
        **shared_settings(tokenizer),
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    arguments = arguments_for(__doc__, steps=1200)
    distil("draft", "target", draft_model, arguments)


if __name__ == "__main__":
    main()
