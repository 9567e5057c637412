"""See the package."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import __doc__ as about
from .runner import DONE, Course
from .stages import STAGES

PER_COMMAND = 575  # seconds: some machines end a command after ten minutes
LEFT, OTHER = 3, 4  # the exit status while stages are left: for the same command, for another


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="a folder: a JSON file and a log of each stage, page.md"
    )
    parser.add_argument(
        "--models", type=Path, help="where made checkpoints lie; default: a temporary folder that stays"
    )
    parser.add_argument("--seconds", type=float, help=f"for this command; default {PER_COMMAND}, of a rehearsal none")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages, again if they have run")
    parser.add_argument("--smoke", action="store_true", help="tiny models on a CPU: whether the stages work")
    args = parser.parse_args(arguments)
    unknown = set(args.only or ()) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(stage.name for stage in STAGES)}")
    models = args.models or Path(tempfile.gettempdir()) / "specdec-gpu-models"
    course = Course(STAGES, args.output.resolve(), models.resolve(), args.smoke)
    seconds = args.seconds or (math.inf if args.smoke else PER_COMMAND)
    left = course.run(seconds, args.only or ())
    print(course.page())
    if left:
        names, limits = [stage.name for stage in left], [course.limit(stage) for stage in left]
        changes = ["--only", *names] if args.only else []
        changes += ["--seconds", f"{max(limits):g}"] if max(limits) > seconds else []
        print(f"left: {', '.join(names)}; run the same command again", *(["with", *changes] if changes else []))
        return OTHER if args.only or min(limits) > seconds else LEFT
    return int(any(record["status"] != DONE for record in map(course.record, course.stages) if record))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what `timeout` sends; the stage ends with its command
    sys.exit(main())
