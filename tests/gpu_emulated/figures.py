"""What a decoding step asks of a device, for each proposer: the table `figures.json`, which this writes anew.

PYTHONPATH=src:tests/helpers python tests/gpu_emulated/figures.py

waits: the host stands until the device is done. uploads: transfers to it. launches: operators and kernels, one by one.
replays, nodes: recorded work, and the launches within it. A tree has 6 nodes and the depth of a chain. A hybrid's other
figures depend on how many drafts were accepted: of it only waits are in the table. Of three requests, at most K=3
drafts, on the tiny target.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from emulated_cuda import EmulatedCuda, emulated_cuda, plain_kernels
from serving import CASES, HYBRID_CASES, TREES_OF_DEVICE, engine, make_mtp_target, prompt

from specdec import LLM, SamplingParams

TABLE = Path(__file__).with_name("figures.json")
CHECKED_STEPS = 18
"""The first steps of a proposer are looked at more closely, and work is recorded in them."""


def expected() -> dict[str, dict[str, int]]:
    return json.loads(TABLE.read_text())


def figures(cuda: EmulatedCuda, llm: LLM, form: str) -> dict[str, int]:
    """Of one decoding step of three requests."""
    temperature = 0 if form == "greedy" else 0.8
    for index in range(3):
        params = SamplingParams(temperature=temperature, max_tokens=100, seed=index, ignore_eos=True)
        llm.engine.add_request(prompt(llm, index), params)
    for _ in range(CHECKED_STEPS):
        llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    return counts.figures()


def main() -> None:
    torch.set_num_threads(1)
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        mtp_target = make_mtp_target(Path(folder))
        for name, form in CASES + TREES_OF_DEVICE + HYBRID_CASES:
            with emulated_cuda() as cuda, plain_kernels(cuda):
                found = figures(cuda, engine(name, form, mtp_target), form)
                table[f"{name}-{form}"] = {"waits": found["waits"]} if (name, form) in HYBRID_CASES else found
            rows = [f"  {json.dumps(case)}: {json.dumps(row)}" for case, row in table.items()]
            TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
