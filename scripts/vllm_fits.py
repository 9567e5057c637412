"""Say whether a vLLM has the V2 runner that the adapter was written for: python -m scripts.vllm_fits [FOLDER]

FOLDER: the package `vllm` of a checkout or of an unpacked wheel. Without it: the vLLM that is installed. Nothing of it
is imported, so a build for GPUs can be asked about on any machine. Exits 1 and lists the differences if there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path

from specdec.adapters.vllm_v2.compatibility import TRIED_VERSIONS, differences
from specdec.adapters.written_for import folder_of


def main(folder: Path) -> int:
    if not (folder / "v1").is_dir():
        print(f"{folder} is no folder of the package vllm")
        return 2
    lines = differences(folder)
    if not lines:
        tried = ", ".join(TRIED_VERSIONS)
        print(f"{folder} fits: names and parameters are those of vLLM {tried}; what functions do is not compared")
        return 0
    print(f"{folder} does not fit; it differs from vLLM {', '.join(TRIED_VERSIONS)}:", *lines, sep="\n  ")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else folder_of("vllm")))
