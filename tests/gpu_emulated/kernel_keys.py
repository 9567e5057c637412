"""Which kernels an engine asks Triton for at its start, and which more while it serves.

    PYTHONPATH=src:tests/helpers:tests/rejection python tests/gpu_emulated/kernel_keys.py eagle3-greedy ...

prints one JSON object for each proposer and form, recorded and not: see `tests/rejection/keys.py`, which
asks for those of verification.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import torch
from emulated_cuda import emulated_cuda, plain_kernels

sys.path.insert(0, str(Path(__file__).parents[1] / "rejection"))

from keys import Keys
from serving import churn, engine, make_mtp_target

from specdec.core.kernels.cuda.draft_uniforms import draft_uniforms
from specdec.core.kernels.cuda.paged_attention.warmed import Warmed
from specdec.core.kernels.cuda.path_move import move_paths
from specdec.core.kernels.cuda.rms_norm import rms_norm
from specdec.core.kernels.cuda.tree_masks import tree_masks

LAUNCHING = {
    "draft_uniforms": draft_uniforms,
    "move_paths": move_paths,
    "tree_masks": tree_masks,
    "rms_norm": rms_norm,
}


def ask_for_kernels(cuda):
    """Let what stands for a kernel launch it as well: `Keys` gathers what for, and computes nothing."""
    stand_in, launching = cuda.kernel, LAUNCHING | {"attend_pages": Warmed()}

    def of(plain, launches):
        launch = launching.get(plain.__name__)
        if launch is None:
            return stand_in(plain, launches)

        @functools.wraps(plain)
        def both(*args, **named):
            launch(*args, **named)
            return plain(*args, **named)

        return stand_in(both, launches)

    cuda.kernel = of


def report(keys, case, graphs, mtp_target):
    keys.found.clear()
    with emulated_cuda() as cuda:
        ask_for_kernels(cuda)
        with plain_kernels(cuda):
            llm = engine(*case, mtp_target, dtype="bfloat16", max_model_len=512, cuda_graphs=graphs)
            before = set(keys.found)
            churn(llm, 8)
            assert not llm.engine.metrics.proposer_errors
    return keys.report(f"{'-'.join(case)} {'unrecorded' if graphs is False else 'recorded'}", before)


def main():
    torch.set_num_threads(1)
    keys = Keys()
    with tempfile.TemporaryDirectory() as folder:
        mtp_target = make_mtp_target(Path(folder))
        for case in sys.argv[1:]:
            for graphs in (None, False):
                print(json.dumps(report(keys, tuple(case.rsplit("-", 1)), graphs, mtp_target)), flush=True)


if __name__ == "__main__":
    main()
