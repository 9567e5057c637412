"""Train the EAGLE-1 head of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_eagle`."""

from __future__ import annotations

from .drafters import eagle
from .drafters.row_training import train_rows
from .drafters.run import arguments_for, open_workshop, write_checkpoint

NUM_UNROLLED_STEPS = 3


def main() -> None:
    arguments = arguments_for(__doc__, steps=450)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    target, tokenizer = workshop.target, workshop.tokenizer
    head = eagle.Eagle(target.embedding, target.unembedding)

    def export() -> None:
        config = eagle.config(len(tokenizer), tokenizer.eos_token_id)
        write_checkpoint(arguments.out / "eagle", head.state_dict(), config)

    train_rows("eagle", head, workshop, export, arguments, num_steps=NUM_UNROLLED_STEPS)


if __name__ == "__main__":
    main()
