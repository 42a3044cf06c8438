"""How well `runs trend` tells a slow-down from noise: `python -m proofs.benchmark_trends`.

Plants a slow-down of 5 % under noise of 3 % and asks after each of the first three reports, as
`runs trend` does; counts quiet reports that raise an alarm; and reads a store of 1,000 reports.
Exit code 1: more than 5 % of quiet reports raise an alarm, under normal noise.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from store.quality.trends import NEWEST, WINDOW, find_trends, judge, keep_report, read_reports
from utils.errors import EXIT_FAILED
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser, prepare_file, require_at_least
from utils.storage.json_files import write_json

SLOW_DOWN, NOISE = 0.05, 0.03
MOST_ALARMS = 0.05
_FIGURE = "1 x step_p50_s"
_REPORTS = 1000
_SIGMA = 0.5  # of the logarithm of skewed noise
Draw = Callable[[random.Random], float]


def _draw_skewed(draw: random.Random) -> float:
    """Mostly a little faster than the mean, sometimes much slower: skewness 1.75."""
    mean = math.exp(_SIGMA**2 / 2)
    return (draw.lognormvariate(0, _SIGMA) - mean) / (mean * math.sqrt(math.exp(_SIGMA**2) - 1))


# Kinds of noise of standard deviation 1.
KINDS: dict[str, Draw] = {
    "normal": lambda draw: draw.gauss(0, 1),
    "Laplace": lambda draw: draw.expovariate(math.sqrt(2)) * draw.choice((-1, 1)),
    "skewed, slow outliers": _draw_skewed,
    "skewed, fast outliers": lambda draw: -_draw_skewed(draw),
}


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.benchmark_trends")
    parser.add_argument("--tries", type=int, default=4000, help="simulations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def prove(options: argparse.Namespace) -> int:
    """Measure all figures; return 1 if quiet reports raise too many alarms."""
    require_at_least(1, options, "tries")
    prepare_file(options.json, "--json")
    rows = {}
    print(f"{'noise':<24}{'found within 3':>16}{'quiet reports with alarm':>26}")
    for kind, noise in KINDS.items():
        draw = random.Random(options.seed)
        share = count_found(draw, noise, options.tries) / options.tries
        alarms = count_alarms(draw, noise, options.tries) / options.tries
        rows[kind] = {"found": share, "alarms": alarms}
        print(f"{kind:<24}{share:>16.1%}{alarms:>26.1%}", flush=True)
    bound = count_bound(random.Random(options.seed), 50 * options.tries) / (50 * options.tries)
    print(f"{'normal, spread known':<24}{bound:>16.1%}{'5.0%':>26}")
    seconds = time_store(options.seed)
    print(f"{_REPORTS} stored reports read and judged in {seconds:.2f} s of processor time")
    content = {"kinds": rows, "bound": bound, "store_s": seconds, "tries": options.tries}
    if options.json:
        write_json(options.json, content)
    # Three standard errors above the limit is no chance.
    slack = 3 * math.sqrt(MOST_ALARMS * (1 - MOST_ALARMS) / options.tries)
    return EXIT_FAILED if rows["normal"]["alarms"] > MOST_ALARMS + slack else 0


def count_found(draw: random.Random, noise: Draw, tries: int) -> int:
    """Slow-downs that raise an alarm at one of their first three reports."""
    count = 0
    for _ in range(tries):
        values = [1 + NOISE * noise(draw) for _ in range(WINDOW + NEWEST - 1)]
        for _ in range(3):
            values.append(1 + SLOW_DOWN + NOISE * noise(draw))
            if is_alarm(values):
                count += 1
                break
    return count


def count_alarms(draw: random.Random, noise: Draw, tries: int) -> int:
    """Reports of quiet series, one after the other, at which an alarm stands."""
    values = [1 + NOISE * noise(draw) for _ in range(WINDOW + NEWEST - 1)]
    count = 0
    for _ in range(tries):
        values.append(1 + NOISE * noise(draw))
        count += is_alarm(values)
    return count


def is_alarm(values: list[float]) -> bool:
    """Return whether the newest report raises an alarm."""
    return judge(_FIGURE, values)[3] in ("worse", "much worse")


def count_bound(draw: random.Random, tries: int) -> int:
    """Count slow-downs that a test with the known spread finds: an upper bound.

    Weights and thresholds are the best of a search over both at 5 % of quiet reports.
    """
    count = 0
    for _ in range(tries):
        mean = draw.gauss(0, 1 / math.sqrt(WINDOW))
        shift = SLOW_DOWN / NOISE
        x = [draw.gauss(0, 1) - mean for _ in range(2)]
        x += [draw.gauss(shift, 1) - mean for _ in range(3)]
        count += any(
            0.25 * x[j] + 0.5 * x[j + 1] + x[j + 2] > 1.947 and x[j + 2] > 1 for j in range(3)
        )
    return count


def time_store(seed: int) -> float:
    """Processor seconds to read and judge a store of 1,000 reports of two figures."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_REPORTS):
            keep_report(Path(folder), make_report(number, 1 + NOISE * draw.gauss(0, 1)))
        began = time.process_time()
        for identity, reports in read_reports(Path(folder)).items():
            find_trends(identity, reports)
        return time.process_time() - began


def make_report(number: int, step_s: float) -> JsonObject:
    """Create a report of `tools.benchmark` as a store holds it."""
    result = {
        "processes": 1,
        "hardware": "CPU",
        "devices": 1,
        "global_batch_size": 8,
        "unit": "img",
        "step_p50_s": step_s,
        "img_per_s": 8 / step_s,
        "img_per_s_repeats": [8 / step_s] * 5,
    }
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1.7e9 + 3600 * number))
    return {
        "schema": 2,
        "created": created,
        "environment": {"git_commit": f"{number:012x}"},
        "settings": {"input": "synthetic"},
        "config": {"model": {"name": "vit"}},
        "results": [result],
    }


main = CommandLine(create_parser, prove)

if __name__ == "__main__":
    sys.exit(main())
