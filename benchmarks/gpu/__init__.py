"""The first hour on a CUDA device: everything that only a device can tell, stage by stage.

    python3 -m benchmarks.gpu --output gpu-figures            # again and again, until it says that nothing is left
    python3 -m benchmarks.gpu --output /tmp/smoke --smoke     # every stage with tiny models, on a CPU

docs/how-to/measure-a-gpu.md says what each stage measures and how a bare machine is prepared. A checkout is enough:
where specdec is not installed, the one beside this folder is taken.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "src"))  # behind what is installed
