"""Train the byte-level BPE tokenizer of the tiny models: `python -m scripts.train_tokenizer`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import Corpus, load_corpus

VOCAB_SIZE = 4096
MAX_LENGTH = 4096
EOS, IM_START, IM_END, PAD, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"
NUM_RESERVED = 11
SPECIAL_TOKENS = (EOS, IM_START, IM_END, PAD, MASK, *(f"<|reserved_{i}|>" for i in range(NUM_RESERVED)))

# One word, one digit, one run of punctuation with the line ends after it, or one run of space: newline and
# indentation stay apart from words, so that source code of any depth shares tokens.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """A lossless byte-level BPE of `VOCAB_SIZE` ids; the special tokens are the last ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in corpus.train), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"expected {VOCAB_SIZE} tokens, found {tokenizer.get_vocab_size()}: too little text")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny/target"))
    arguments = parser.parse_args()
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus)
    tokenizer.save_pretrained(arguments.out)
    sample = "".join(document.text for document in corpus.held_out)[:200_000]
    num_tokens = len(tokenizer.encode(sample, verbose=False))
    print(f"{len(tokenizer)} tokens, {len(sample) / num_tokens:.2f} characters per token (held out)")


if __name__ == "__main__":
    main()
