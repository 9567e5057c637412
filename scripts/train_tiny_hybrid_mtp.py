"""Train the MTP module of the tiny hybrid: `OMP_NUM_THREADS=1 python -m scripts.train_tiny_hybrid_mtp`."""

from __future__ import annotations

from .drafters import mtp
from .drafters.gated import HYBRID, GatedLayer, ZeroCentredNorm
from .drafters.row_training import row_drafter_job
from .drafters.run import arguments_for, drafter_recipe, open_workshop, run, update_json, write_tensors
from .train_tiny_mtp import NUM_UNROLLED_STEPS


def main() -> None:
    arguments = arguments_for(__doc__, steps=300)
    folder = arguments.out / "hybrid"
    workshop = open_workshop(folder, arguments.seed)
    target = workshop.target
    module = mtp.Mtp(target.embedding, target.unembedding, HYBRID, GatedLayer, ZeroCentredNorm)

    def export() -> None:
        tensors = {mtp.PREFIX + name: tensor for name, tensor in module.state_dict().items()}
        write_tensors(folder / mtp.FILE_NAME, tensors)
        update_json(folder / "config.json", mtp.CONFIG_KEY, len(module.layers))

    options = {"num_steps": NUM_UNROLLED_STEPS, "compiled": arguments.compile}
    job = row_drafter_job("hybrid_mtp", module, workshop, export, **options)
    run(job, workshop, drafter_recipe(arguments), arguments)


if __name__ == "__main__":
    main()
