"""How fast the run index is: `python -m proofs.benchmark_index --runs 10000 [--out FILE]`.

Writes a store of runs into a temporary directory: 120 keys of configuration, 18 numbers at the end,
a history of 20 lines, weights left behind, each with another seed and learning rate, and a teacher
with 400 students. Times a rebuild, an idle refresh, one after a change, a query, and commands of
`python -m tools.runs` as whole processes. On a shared machine wall time says little, so processor
time, the least of five tries, is printed beside it. Exit code 1: processor time exceeds a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from store.index.database import RunIndex
from store.record.environment import read_environment
from store.record.ids import create_id
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser
from utils.storage.json_files import write_json

ROOT = Path(__file__).resolve().parents[1]
_WANTED = "model.name=vit_tiny and data.name=imagenet2012 and eval.top1>70"
# Seconds, and MiB of the index's file, for ten thousand runs.
LIMITS = {
    "rebuild_s": 20.0,
    "refresh_s": 0.3,
    "index_mib": 40.0,
    "list_s": 1.0,
    "list_filter_s": 1.0,
    "show_s": 1.0,
    "show_teacher_s": 1.0,
    "compare_s": 1.0,
    "gate_s": 1.0,
    "tag_s": 1.0,
    "cost_s": 1.0,
}
_PAIR = ("experiment_01/run_00001", "experiment_02/run_00002")
# All others of the first two experiments have learnt from it: its own by a copy of its weights.
_TEACHER, _SUM = "experiment_00/run_00000", "a" * 64
# What is asked as a whole process.
_QUESTIONS = {
    "list_s": ("list",),
    "list_filter_s": ("list", "--filter", _WANTED, "--sort", "eval.top1", "--show", "optim.lr"),
    "show_s": ("show", _PAIR[0]),
    "show_teacher_s": ("show", _TEACHER),
    "compare_s": ("compare", *_PAIR),
    "gate_s": ("gate", *_PAIR, "--gate", "eval.top1:-:100:minor"),
    "tag_s": ("tag", _PAIR[0], "--add", "seen"),
    "cost_s": ("cost", *_PAIR),
}
_NAMES = ("vit_tiny", "vit_small", "resnet50", "convnext_tiny")
_FINAL = (
    "eval_top1",
    "eval_top5",
    "eval_loss",
    "eval_ece",
    "test_top1",
    "test_loss",
    "train_s",
    "steps",
    "parameters",
    "graphs",
    "host_reads",
)


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.benchmark_index")
    parser.add_argument("--runs", type=int, default=10_000, help="runs in the store")
    parser.add_argument("--url", default="", help="of another database, as for --index")
    parser.add_argument("--out", type=Path, help="JSON file with the figures")
    return parser


def run(options: argparse.Namespace) -> int:
    """Make the store, measure, compare with the limits; gives the exit code."""
    with tempfile.TemporaryDirectory(prefix="index-cost-") as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        root = Path(folder) / "runs"
        make_store(root, options.runs)
        time.sleep(2.5)  # a file that is younger is read again by every refresh
        facts = measure(root, options.url)
    faults = [name for name, limit in LIMITS.items() if facts[name][1] > limit]
    print(f"{'':<16}{'clock':>10}{'processor':>12}{'limit':>8}")
    for name, (clock, processor) in facts.items():
        limit = f"{LIMITS[name]:8g}" if name in LIMITS else ""
        mark = "  EXCEEDED" if name in faults else ""
        print(f"{name:<16}{clock:10.3f}{processor:12.3f}{limit}{mark}")
    if options.out:
        record = {"runs": options.runs, **facts, "environment": read_environment()}
        write_json(options.out, record)
    return int(bool(faults))


def make_store(root: Path, count: int) -> None:
    """Write runs of fifty experiments."""
    draw = random.Random(16)
    others = "".join(f"  key_{n:02d}: value of {n}\n" for n in range(20))
    sections = "".join(f"{name}:\n{others}" for name in ("runtime", "distill", "profile"))
    teacher = create_id()
    for number in range(count):
        folder = root / f"experiment_{number % 50:02d}" / f"run_{number:05d}"
        folder.mkdir(parents=True)
        final = {name: draw.random() * 100 for name in _FINAL}
        facts: JsonObject = {
            "schema_version": 2,
            "id": create_id() if number else teacher,
            "experiment": folder.parent.name,
            "name": folder.name,
            "started": 1.7e9 + number,
            "status": "complete",
            "attempts": 1,
            "environment": {"host": "vm", "device": "cpu"},
            "final": final,
        }
        if number and number % 50 < 2:
            known = {"id": teacher, "path": _TEACHER} if number % 50 else {}
            facts["lineage"] = [
                {"generation": 1, "via": "teacher", "weights": _SUM, "scores": final, **known}
            ]
        (folder / "artifacts.json").write_text(json.dumps(_list_files(number)))
        (folder / "run.json").write_text(json.dumps(facts, indent=2))
        head = (
            f"model:\n  name: {_NAMES[number % 4]}\n  args:\n    depth: {number % 3}\n{others}"
            f"data:\n  name: imagenet2012\n{others}optim:\n  lr: {draw.random() / 100}\n{others}"
            f"train:\n  seed: {number}\n{others}"
        )
        (folder / "config_resolved.yaml").write_text(f"{head}{sections}")
        lines = [
            {
                "step": step,
                "kind": "train",
                "attempt": 1,
                "loss/total": draw.random(),
                "lr": 0.1,
                "grad_norm": 1.0,
                "img_per_s": 1e3,
                "time_s": step,
                "epoch": step / 10,
            }
            for step in range(20)
        ]
        lines.append({"step": 20, "kind": "eval", "attempt": 1, "top1": 1.0, "loss": 2.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _list_files(number: int) -> JsonObject:
    """Of each run other weights, and five files more."""
    names = ("student.safetensors", *(f"file_{place}.json" for place in range(5)))
    kinds = ("weights", *("facts",) * 5)
    digest = _SUM if number == 0 else f"{number:064x}"
    return {
        "schema_version": 2,
        "artifacts": [
            {"path": name, "kind": kind, "bytes": 10, "sha256": digest, "crc32c": "0" * 8}
            for name, kind in zip(names, kinds, strict=True)
        ],
    }


def measure(root: Path, url: str) -> dict[str, tuple[float, float]]:
    """Seconds of each kind of use, by the clock and of the processor; MiB twice."""
    index = RunIndex(str(root), url)
    facts = {"rebuild_s": _time(index.rebuild, tries=1), "refresh_s": _time(index.refresh)}
    touched = root / "experiment_00" / "run_00000" / "run.json"
    touched.write_text(touched.read_text() + "\n")
    facts["changed_s"] = _time(index.refresh, tries=1)
    time.sleep(2.5)
    index.refresh()
    facts["query_s"] = _time(lambda: index.select(_WANTED))
    size = sum(file.stat().st_size for file in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.sqlite"))
    facts["index_mib"] = (size / (1 << 20), size / (1 << 20))
    place = ["--store", str(root), *(["--index", url] if url else [])]
    for name, words in _QUESTIONS.items():
        command = [sys.executable, "-m", "tools.runs", *words, *place]
        facts[name] = _time(partial(_call, command))
    return facts


def _call(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def _time(function: Callable[[], object], tries: int = 5) -> tuple[float, float]:
    times = []
    for _ in range(tries):
        clock, processor = time.perf_counter(), _read_processor()
        function()
        times.append((time.perf_counter() - clock, _read_processor() - processor))
    return min(clock for clock, _ in times), min(processor for _, processor in times)


def _read_processor() -> float:
    """Seconds of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
