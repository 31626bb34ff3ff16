"""What ``import hostir`` costs: alone, and on top of ``import torch``, which every user pays anyway. The budget is 80 ms.

    python benchmarks/import_time.py [--repeat 7]

Each figure is the median over fresh interpreters.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET_MS = 80


def milliseconds(before: str, measured: str, repeat: int) -> float:
    """The median time of the statement ``measured`` in a fresh interpreter that ran ``before``, after one run that warms the disk."""
    code = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); {before}; t = time.perf_counter(); {measured}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(repeat + 1)]
    return statistics.median(float(run.stdout) for run in runs[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="the cost of import hostir")
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args().repeat
    print(f"import torch                  {milliseconds('pass', 'import torch', repeat):8.1f} ms")
    print(f"import hostir alone           {milliseconds('pass', 'import hostir', repeat):8.1f} ms")
    print(f"import hostir after torch     {milliseconds('import torch', 'import hostir', repeat):8.1f} ms   (budget {BUDGET_MS} ms)")


if __name__ == "__main__":
    main()
