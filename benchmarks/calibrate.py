"""Calibrate a machine on the device at hand, and how well the cost model then meets its own measurements (predicted / measured).

python benchmarks/calibrate.py [--device cuda] [--save machine.json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from timing import header, row

from hostir.runtime.calibrate import calibrate


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=None)
    parser.add_argument("--save", default=None, metavar="FILE")
    options = parser.parse_args()
    header("calibration of the cost model")
    found = calibrate(options.device)
    print(json.dumps(asdict(found.machine), indent=2))
    print(f"{'what':<32} {'measured':>12} {'predicted':>12} {'ratio':>7}")
    for p in found.points:
        print(f"{p.what:<32} {p.measured * 1e6:>9.1f} µs {p.predicted * 1e6:>9.1f} µs {p.ratio:>7.2f}")
        row(bench="calibrate", what=p.what, measured_us=p.measured * 1e6, predicted_us=p.predicted * 1e6, ratio=p.ratio)
    if options.save:
        found.machine.save(options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
