"""One stage, in this process: `python -m benchmarks.gpu.stage MODULE:FUNCTION FIGURES MODELS [--limit S] [--smoke]`."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work")
    parser.add_argument("figures", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from .run import Run  # imports torch

    module, function = args.work.split(":")
    run = Run.make(args.figures, args.models, args.limit, smoke=args.smoke)
    getattr(importlib.import_module(module), function)(run)


if __name__ == "__main__":
    main()
