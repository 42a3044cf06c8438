"""How exact and how fast the quantiles of sketches are.

    python -m proofs.benchmark_quantiles [--seeds 20] [--points 10000000] [--out FILE]

Holds quantiles from 0.001 to 0.999 of twelve kinds of streams against the exact ones, at three
epsilons and so many seeds, counts every one that is off by more than its epsilon, merges in random
orders, and measures speed, memory and the cost of one value a step in a loop. Exit code 1: an
error beyond epsilon, a merge with other bits, less than 20 million points a second of processor
time, more than 60 MiB, or more than 1 % of a step of 10 ms.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from store.record.environment import read_environment
from store.record.sketches import QuantileSketch, merge_sketches
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser
from utils.storage.json_files import write_json

QUANTILES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
EPSILONS = (0.05, 0.01, 0.001)
_COUNT = 20_000
_CHUNK = 1 << 16
Draw = Callable[[np.random.Generator, int], np.ndarray]

STREAMS: dict[str, Draw] = {
    "constant": lambda draw, n: np.full(n, draw.uniform(0.1, 9.0)),
    "ties": lambda draw, n: draw.integers(0, 7, n).astype(float),
    "bimodal": lambda draw, n: np.where(draw.random(n) < 0.7, 0.1, 3.0) * draw.uniform(0.9, 1.1, n),
    "heavy tail": lambda draw, n: draw.pareto(1.1, n) + 1,
    "negative": lambda draw, n: -draw.lognormal(0, 2, n),
    "around zero": lambda draw, n: draw.normal(0, 1e-3, n),
    "1e-300": lambda draw, n: draw.lognormal(0, 1, n) * 1e-300,
    "1e300": lambda draw, n: draw.lognormal(0, 1, n) * 1e300,
    "sorted": lambda draw, n: np.sort(draw.gamma(2, 1, n)),
    "reversed": lambda draw, n: np.sort(draw.gamma(2, 1, n))[::-1].copy(),
    "saw-tooth": lambda draw, n: np.arange(n) % draw.integers(50, 500) + 0.5,
    "mixed with nan": lambda draw, n: np.where(
        draw.random(n) < 0.05, draw.choice([np.nan, np.inf, -np.inf], n), draw.lognormal(0, 1, n)
    ),
}


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.benchmark_quantiles")
    parser.add_argument("--seeds", type=int, default=20, help="of each stream and epsilon")
    parser.add_argument("--points", type=int, default=10_000_000, help="values of the timed stream")
    parser.add_argument("--out", type=Path, help="JSON file with the figures")
    return parser


def run(options: argparse.Namespace) -> int:
    """Prove exactness, measure speed; gives the exit code."""
    facts: JsonObject = {"worst": {}, "violations": 0}
    for name in STREAMS:
        for epsilon in EPSILONS:
            errors = [compute_worst(name, epsilon, seed) for seed in range(options.seeds)]
            facts["worst"][f"{name} {epsilon}"] = max(errors)
            facts["violations"] += sum(error > epsilon for error in errors)
        shares = (facts["worst"][f"{name} {epsilon}"] for epsilon in EPSILONS)
        print(f"{name:<16}" + "".join(f"{share:>12.3e}" for share in shares))
    facts["other_bits"] = count_other_merges()
    facts |= measure(options.points)
    print(
        f"quantiles beyond their epsilon: {facts['violations']}, merges with other bits: "
        f"{facts['other_bits']} of 100\n{facts['mpoints_per_s']:.1f} million points a second, "
        f"{facts['mib']:.1f} MiB, {facts['bins']} bins, {facts['loop_us']:.2f} us a step in a loop"
    )
    if options.out:
        record = {**facts, "environment": read_environment()}
        write_json(options.out, record)
    is_bad = facts["violations"] or facts["other_bits"] or facts["mpoints_per_s"] < 20
    return int(bool(is_bad or facts["mib"] > 60 or facts["loop_us"] > 100))


def compute_worst(name: str, epsilon: float, seed: int) -> float:
    """Compute the largest relative error of any quantile of a stream."""
    values = STREAMS[name](np.random.default_rng([seed, len(name)]), _COUNT)
    sketch = QuantileSketch(epsilon)
    sketch.add(values)
    exact = np.sort(values[np.isfinite(values)])
    worst = 0.0
    for q in QUANTILES:
        true = float(exact[int(q * (exact.size - 1))])
        quantile = sketch.get_quantile(q)
        worst = max(worst, abs(quantile - true) / abs(true) if true else abs(quantile))
    return worst


def count_other_merges() -> int:
    """Of a hundred random orders of merging sixteen sketches, how many give another text."""
    draw = np.random.default_rng(5)
    parts = []
    for _ in range(16):
        parts.append(QuantileSketch())
        parts[-1].add(draw.normal(1, 2, 500))
    orders = (draw.permutation(16) for _ in range(100))
    texts = [str(merge_sketches(parts[place] for place in order)) for order in orders]
    return sum(text != texts[0] for text in texts)


def measure(points: int) -> dict[str, float]:
    """Speed by processor time, memory of the sketch, and the cost of feeding it from a loop."""
    import tracemalloc

    draw = np.random.default_rng(3)
    chunk = draw.lognormal(-3, 0.5, _CHUNK)
    sketch = QuantileSketch()
    sketch.add(chunk)
    began = time.process_time()
    for _ in range(points // _CHUNK):
        sketch.add(chunk)
    seconds = time.process_time() - began
    tracemalloc.start()
    for _ in range(8):
        sketch.add(chunk)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "mpoints_per_s": points // _CHUNK * _CHUNK / seconds / 1e6,
        "mib": memory / (1 << 20),
        "bins": sum(len(sketch.to_json()[side]) for side in ("positive", "negative")),
        "loop_us": measure_loop(),
    }


def measure_loop(steps: int = 200_000, every: int = 100) -> float:
    """Microseconds a step of collecting one value and adding the collected ones at log points."""
    sketch = QuantileSketch()
    waiting: list[float] = []
    began = time.process_time()
    for step in range(steps):
        waiting.append(0.01 + step % 7 * 1e-4)
        if len(waiting) == every:
            sketch.add(waiting)
            waiting.clear()
    return (time.process_time() - began) / steps * 1e6


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
