"""Plants small faults in rooms of the code and tells which of them the tests find.

    python -m proofs.mutants --rooms engine losses --sample 100 --seed 0

A fault is planted in a copy of the tree; the tests that run its line start there, the fastest
first, until one fails or `--budget-s` of tests have passed. A fault that none finds is a survivor.
Which tests run which lines is measured once for each file of tests and kept, as are the verdicts:
until the room's code, the tests that found the fault or, where none did, any tests of the room
change. Tests marked slow or cuda are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from proofs.mutants.bench import Bench, Room
from proofs.mutants.operators import KINDS, Mutant
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject
from utils.programs import create_program_parser, prepare_file, run_program
from utils.storage.places import get_user_cache

ROOT = Path(__file__).resolve().parents[2]

ROOMS = [
    Room("engine", ("engine.py",), ("tests/test_engine.py", "tests/test_faults.py")),
    Room(
        "optim_factory",
        ("optim_factory.py",),
        ("tests/test_optim_factory.py", "tests/tasks/test_dry_run.py"),
    ),
    Room("losses", ("losses/*.py",), ("tests/losses/*.py",)),
    Room("pp", ("big_vision/pp/*.py",), ("tests/big_vision/test_pp_*.py",)),
    Room(
        "order",
        ("big_vision/input/order.py",),
        ("tests/big_vision/test_input_order.py", "tests/test_datasets*.py"),
    ),
    Room("mixing", ("tasks/images/mixing.py",), ("tests/tasks/test_mixing.py",)),
    Room("erasing", ("tasks/images/erasing.py",), ("tests/tasks/test_erasing.py",)),
    Room(
        "checkpoint",
        ("utils/checkpoint/*.py",),
        ("tests/utils/test_checkpoint*.py", "tests/test_fuzz_checkpoints.py"),
    ),
    Room(
        "resume",
        ("job/resume.py",),
        (
            "tests/job/test_resume.py",
            "tests/test_faults.py",
            "tests/test_teachers.py",
            "tests/test_datasets_resume.py",
            "tests/test_resume*.py",
            "tests/test_run_directories.py",
        ),
    ),
    Room(
        "patches",
        ("models/patches/*.py",),
        (
            "tests/models/patches/test_*.py",
            "tests/models/test_gradient_parts.py",
            "tests/test_patches_runs.py",
        ),
    ),
    Room(
        "runtime",
        ("utils/runtime/*.py",),
        (
            "tests/utils/test_runtime*.py",
            "tests/utils/test_xla_transfers.py",
            "tests/utils/test_mesh_batches.py",
            "tests/test_engine.py",
            "tests/test_runtime_options.py",
            "tests/test_groups.py",
            "tests/test_spmd_graph.py",
        ),
    ),
]
# Imported once; torch_xla before TensorFlow, as everywhere.
FRAMEWORKS = (
    "torch",
    "torchvision",
    "timm",
    "torch_xla",
    "tensorflow",
    "tensorflow_datasets",
    "hypothesis",
    "pydantic_settings",
    "matplotlib",
    "sklearn",
)
MARK = "not slow and not cuda"
_CAUGHT = ("caught", "late", "crashed")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags, plant, print; gives the exit code."""
    return run_program(run, create_parser().parse_args(argv))


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.mutants")
    names = ", ".join(room.name for room in ROOMS)
    add = parser.add_argument
    add("--rooms", nargs="+", metavar="ROOM", help=f"of {names} (default: all)")
    add("--sample", type=int, default=300, help="faults in all rooms together (default 300)")
    add("--seed", type=int, default=0, help="of the sample (default 0)")
    add("--budget-s", type=float, default=60.0, help="of tests for one fault (default 60)")
    add("--cache", type=Path, help="what is known from before (default ~/.cache/mutants)")
    add("--json", type=Path, help="write all verdicts here")
    return parser


def run(options: argparse.Namespace) -> int:
    """Measure, plant, print."""
    if options.sample < 1:
        raise UserError(f"--sample ({options.sample}) must be at least 1")
    rooms = find_rooms(options.rooms)
    prepare_file(options.json, "--json")
    cache = options.cache or get_user_cache("mutants", former="mutants")
    cache.mkdir(parents=True, exist_ok=True)
    with Bench(ROOT, cache, mark=MARK, frameworks=FRAMEWORKS) as bench:
        rows = evaluate_all(bench, rooms, options)
    print_table(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def find_rooms(names: Sequence[str] | None) -> list[Room]:
    """Rooms by name; all of them where none is named.

    Raises:
      UserError: there is no such room.
    """
    known = {room.name: room for room in ROOMS}
    for name in names or ():
        if name not in known:
            raise UserError(f"--rooms {name!r} is no room; {get_hint(name, known)}")
    return [known[name] for name in dict.fromkeys(names or known)]


def choose(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw a sample that stays the same for all faults whose line does not change."""

    def draw(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed}|{mutant.name}".encode()).hexdigest()

    drawn = {mutant.name for mutant in sorted(mutants, key=draw)[:count]}
    return [mutant for mutant in mutants if mutant.name in drawn]


def evaluate_all(
    bench: Bench, rooms: Sequence[Room], options: argparse.Namespace
) -> list[JsonObject]:
    """Run a sample's faults, room by room; return them with their verdicts."""
    by_room = {room: bench.list_mutants(room) for room in rooms}
    sample = choose(
        [m for candidates in by_room.values() for m in candidates], options.sample, options.seed
    )
    rows: list[JsonObject] = []
    for room, mutants in by_room.items():
        own = [mutant for mutant in mutants if mutant in sample]
        rows += evaluate_room(bench, room, own, options.budget_s) if own else []
    return rows


def evaluate_room(
    bench: Bench, room: Room, mutants: Sequence[Mutant], budget_s: float
) -> list[JsonObject]:
    """Faults of one room with their verdicts; those known from before are taken from there.

    Tests that found a fault run once more without any: what fails then has found nothing.
    """
    path = bench.cache / f"verdicts-{room.name}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for test in bench.measure(room).failed:
        sys.stderr.write(f"{test} fails without a fault: it counts for nothing\n")
    for index, mutant in enumerate(mutants):
        key = f"{mutant.name}|{budget_s:g}"
        if key not in known or known[key]["proof"] != bench.get_proof(room, known[key]):
            known[key] = bench.judge(room, mutant, budget_s)
            known[key]["proof"] = bench.get_proof(room, known[key])
            path.write_text(json.dumps(known), encoding="utf-8")
        where = f"{mutant.file}:{mutant.line} {mutant.kind}"
        sys.stderr.write(f"{index + 1}/{len(mutants)} {known[key]['verdict']}: {where}\n")
    rows: list[JsonObject] = [
        {"room": room.name, **asdict(m), **known[f"{m.name}|{budget_s:g}"]} for m in mutants
    ]
    killers = sorted({row["by"] for row in rows if "::" in row["by"]})
    failed = bench.run_tests(killers, 1e9)["failed"] if killers else []
    for row in rows:
        row["verdict"] = "unsure" if row["by"] in failed and row["by"] else row["verdict"]
    return rows


def print_table(rows: Sequence[JsonObject]) -> None:
    """Print the share that was caught by room and kind, and each fault that was not."""
    for field in ("room", "kind"):
        print(f"{field:<18} {'caught':>6} {'of':>5} {'share':>7}")
        order = [room.name for room in ROOMS] if field == "room" else list(KINDS)
        for name in order:
            _print_share(name, [row for row in rows if row[field] == name])
    _print_share("all", rows)
    survivors = [row for row in rows if row["verdict"] not in _CAUGHT]
    for row in survivors:
        note = row["verdict"] if row["left"] == 0 else f"{row['verdict']}, {row['left']} tests left"
        before, after = (" ".join(row[side].split()) for side in ("before", "after"))
        print(f"{row['file']}:{row['line']}: {before} -> {after or 'nothing'} ({note})")
    counts = Counter(row["verdict"] for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


def _print_share(name: str, rows: Sequence[JsonObject]) -> None:
    if rows:
        caught = sum(row["verdict"] in _CAUGHT for row in rows)
        print(f"{name:<18} {caught:>6} {len(rows):>5} {100 * caught / len(rows):>6.1f}%")


if __name__ == "__main__":
    sys.exit(main())
