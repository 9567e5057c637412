"""Train the MTP module of the tiny hybrid: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_hybrid_mtp`."""

from __future__ import annotations

from .drafters import mtp
from .drafters.gated import HYBRID, GatedLayer, ZeroCentredNorm
from .drafters.run import arguments_for, open_workshop
from .train_tiny_mtp import train_module


def main() -> None:
    arguments = arguments_for(__doc__, steps=300)
    folder = arguments.out / "hybrid"
    workshop = open_workshop(folder, arguments.seed)
    target = workshop.target
    module = mtp.Mtp(target.embedding, target.unembedding, HYBRID, GatedLayer, ZeroCentredNorm)
    train_module("hybrid_mtp", module, workshop, folder, arguments)


if __name__ == "__main__":
    main()
