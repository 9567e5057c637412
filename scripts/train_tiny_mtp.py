"""Train the MTP module of the tiny target: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_mtp`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .drafters import mtp
from .drafters.row_training import train_rows
from .drafters.run import Workshop, arguments_for, open_workshop, update_json, write_tensors

NUM_UNROLLED_STEPS = 3


def main() -> None:
    arguments = arguments_for(__doc__, steps=300)
    workshop = open_workshop(arguments.out / "target", arguments.seed)
    module = mtp.Mtp(workshop.target.embedding, workshop.target.unembedding)
    train_module("mtp", module, workshop, arguments.out / "target", arguments)


def train_module(name: str, module: mtp.Mtp, workshop: Workshop, folder: Path, arguments: argparse.Namespace) -> None:
    """Train a module of the target in this folder, and write it there."""

    def export() -> None:
        tensors = {mtp.PREFIX + name: tensor for name, tensor in module.state_dict().items()}
        write_tensors(folder / mtp.FILE_NAME, tensors)
        update_json(folder / "config.json", mtp.CONFIG_KEY, len(module.layers))

    train_rows(name, module, workshop, export, arguments, num_steps=NUM_UNROLLED_STEPS)


if __name__ == "__main__":
    main()
