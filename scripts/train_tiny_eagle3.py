"""Train the EAGLE-3 head of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_eagle3 --compile`."""

from __future__ import annotations

from .drafters import eagle3
from .drafters.row_training import train_rows
from .drafters.run import arguments_for, commonest_tokens, open_workshop, write_checkpoint

NUM_UNROLLED_STEPS = 5


def main() -> None:
    arguments = arguments_for(__doc__, steps=900)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, vocab_size = workshop.target, len(workshop.tokenizer)
    chosen = commonest_tokens(workshop.stream, vocab_size, eagle3.DRAFT_VOCAB_SIZE)
    head = eagle3.Eagle3(chosen, target.embedding, target.unembedding)

    def export() -> None:
        write_checkpoint(arguments.out / "eagle3", head.state_dict(), eagle3.config(vocab_size))

    train_rows("eagle3", head, workshop, export, arguments, num_steps=NUM_UNROLLED_STEPS, vocabulary=chosen)


if __name__ == "__main__":
    main()
