"""Wall time of `metainfer compile`, and the compiler's own part of it.

    python benchmarks/compile_time.py

Runs the command in a fresh process five times each: SmolLM2 for the CPU and for the 8-card PCIe
machine, and a model of 61 layers of 3 kinds without weights. "own" leaves out importing torch and
torch.export.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 5
SIXTY_ONE = '''
"""61 layers of 3 kinds: two windows and full attention, none of them with weights."""

from metainfer.ir.rope import Rope
from metainfer.models.decoder import decoder_spec
from metainfer.models.decoder_config import DecoderConfig

spec = decoder_spec(
    "sixty_one",
    DecoderConfig(
        hidden=256, layers=61, heads=8, kv_heads=2, head_dim=32, intermediate=512, vocab=1000,
        max_positions=4096, eps=1e-5, rope=Rope(), tie=False,
        windows=tuple((0, 128, 512)[i % 3] for i in range(61)),
    ),
)
'''


def run(model: str, hw: str) -> tuple[float, float]:
    """(wall, own) seconds of one compilation."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan"
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "metainfer", "compile", model, "--hw", hw, "--out", str(out)],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wall = time.perf_counter() - start
        timings = json.loads((out / "plan.json").read_text())["timings"]
    return wall, timings["total"] - timings["capture"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        many = Path(folder) / "sixty_one.py"
        many.write_text(SIXTY_ONE)
        for model, hw in (("smollm2", "cpu"), ("smollm2", "8xpcie"), (str(many), "cpu")):
            pairs = [run(model, hw) for _ in range(REPEATS)]
            wall, own = (statistics.median(p[i] for p in pairs) for i in (0, 1))
            least = min(p[0] for p in pairs)
            name = Path(model).stem
            print(f"{name:10} {hw:8} wall {wall:6.2f} s (least {least:.2f})   own {own:5.2f} s")


if __name__ == "__main__":
    main()
