"""Proves that a change of form has changed nothing else.

    python -m proofs.refactoring --before REVISION
    python -m proofs.refactoring --record FOLDER --tree ../before
    python -m proofs.refactoring --against FOLDER

The same short runs are made in a checkout of the revision and in this tree: images with and without
a teacher, language, numbers, features without labels and delta attention, each on PyTorch, on XLA
and on a mesh of four devices; with stored answers, averages, mixing, accumulation and feature
losses, in two processes, and one that is interrupted and resumed. All deterministic metrics at
every step, all final tensors and all graph counts must be equal bit for bit. A record keeps the
runs of one tree, their data and what they have left, for comparisons later. Exit code 1: they are
not equal.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from store.record.catalogue import METRICS
from store.record.history import get_numbers, keep_deterministic, modernise, read_metrics
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import create_program_parser, run_program

ROOT = Path(__file__).resolve().parents[1]

# What one record of runs says; see `record`.
RECORD_FILE = "record.json"
# Both trees must know these programs by these names.
_PROGRAMS = {"main": ("main.py",), "cache_teacher": ("-m", "tools.cache_teacher")}
_SHORT = ("--train.log_every_steps=4", "--train.epochs=2", "--run.tensorboard=false")
_CPU, _XLA = ("--runtime.device=cpu",), ("--runtime.device=xla",)
_MESH, _FOUR = (*_XLA, "--runtime.parallel=spmd"), (("CPU_NUM_DEVICES", "4"),)
_TEACHER = ("configs/digits_teacher.yaml", *_SHORT)
_STUDENT = (
    "configs/digits_kd.yaml",
    *_SHORT,
    "--teacher_path={out}/digits_teacher/teacher",
)
_REGRESSION = ("configs/regression/friedman1_student.yaml", *_SHORT, "--train.ema")
_LABEL_FREE = (
    "configs/kd/digits_labelfree.yaml",
    *_SHORT,
    "--teacher_path={out}/digits_teacher/teacher",
)
_TOKENS = (
    "--data.name=documents",
    "--data.sequence_length=64",
    "--train.steps=24",
    "--train.log_every_steps=4",
    "--train.accumulate_steps=2",
    "--optim.warmup_steps=4",
    "--run.tensorboard=false",
)
_LANGUAGE = (
    "configs/transformer_text.yaml",
    *_TOKENS,
    '--model.args={"depth": 2, "width": 32, "heads": 4, "kv_heads": 2}',
)
# A layer of Gated DeltaNet and one of full attention.
_DELTA = (
    "configs/delta_text.yaml",
    *_TOKENS,
    *(
        f"--model.args.{name}={value}"
        for name, value in {
            "depth": 2,
            "width": 32,
            "heads": 2,
            "kv_heads": 2,
            "head_width": 16,
            "linear_heads": 2,
            "linear_width": 16,
            "mlp_width": 64,
            "full_every": 2,
            "chunk": 16,
        }.items()
    ),
)
_LAYERS = json.dumps(
    [
        {"name": "kd"},
        {"name": "fitnet", "layers": {"fc_norm": "fc_norm"}, "weight": 0.1},
        {"name": "rkd", "layers": {"fc_norm": "fc_norm"}, "weight": 0.1, "weight_end": 0.0},
    ]
)
# Of the run that goes on: its warm-up ends before its first half does.
_HALVED = ("--train.ema", "--optim.warmup_epochs=1")
_RICH = (
    "--train.ema",
    "--train.ema_decay=0.9",
    "--train.mixup_alpha=0.8",
    "--train.cutmix_alpha=1.0",
    "--train.accumulate_steps=2",
    "--data.random_erasing=0.25",
    "--distill.loss=",
    f"--distill.losses={_LAYERS}",
)


@dataclass(frozen=True)
class Case:
    """One run of main.py.

    Args:
      flags: of main.py, the configuration first.
      before: flags of a run, or of the program that stores answers, that must come first.
      environment: variables of the process.
    """

    flags: tuple[str, ...]
    before: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def _put_on_devices(name: str, flags: tuple[str, ...]) -> dict[str, Case]:
    """List the cases of one configuration: PyTorch, XLA and a mesh of four devices."""
    return {
        name: Case((*flags, *_CPU)),
        f"{name}_xla": Case((*flags, *_XLA)),
        f"{name}_mesh": Case((*flags, *_MESH), environment=_FOUR),
    }


def _interrupt(flags: tuple[str, ...]) -> Case:
    """List the cases of a run that ends in the middle of its second epoch, and goes on."""
    first = ("main", *flags, *_HALVED, "--train.steps=23", "--train.checkpoint_every_steps=23")
    return Case((*flags, *_HALVED, "--run.resume=auto"), before=first)


CASES = {
    # The first one is the teacher of all the others.
    **_put_on_devices("teacher", _TEACHER),
    **_put_on_devices("kd", _STUDENT),
    **_put_on_devices("language", _LANGUAGE),
    **_put_on_devices("regression", _REGRESSION),
    **_put_on_devices("label_free", _LABEL_FREE),
    **_put_on_devices("delta", _DELTA),
    "cached": Case(
        (*_STUDENT, *_XLA, "--distill.loss=kd", "--distill.teacher_cache={out}/cache"),
        before=("cache_teacher", *_STUDENT, *_CPU, "--out={out}/cache"),
    ),
    "rich": Case((*_STUDENT, *_CPU, *_RICH)),
    "rich_xla": Case((*_STUDENT, *_XLA, *_RICH)),
    "processes": Case((*_STUDENT, *_CPU, "--runtime.num_processes=2")),
    "resumed": _interrupt((*_STUDENT, *_CPU)),
    "resumed_xla": _interrupt((*_STUDENT, *_XLA)),
}


def main(argv: list[str] | None = None) -> int:
    """Parse flags, make the runs, compare; gives the exit code."""
    parser = create_program_parser(__doc__, prog="python -m proofs.refactoring")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--before", help="revision that the tree is compared with")
    mode.add_argument("--record", type=Path, metavar="FOLDER", help="keep the tree's runs here")
    mode.add_argument("--against", type=Path, metavar="FOLDER", help="compare with a record")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout than this one")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="some of the runs (default: all)")
    parser.add_argument("--keep", type=Path, help="directory in which the runs stay")
    # Asked to end, it takes its checkout away all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_program(lambda: prove(parser.parse_args(argv)))


def prove(options: argparse.Namespace) -> int:
    """Run every case in the trees that the flags name; gives the exit code."""
    names = [name for name in CASES if name == "teacher" or name in (options.cases or CASES)]
    tree = options.tree.resolve()
    if options.record:
        return record(names, tree, options.record.resolve())
    known = read_record(options.against, names) if options.against else None
    faults = 0
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = (options.against or folder).resolve() / "data"
        before = tree if known else stack.enter_context(checked_out(options.before))
        if not known:
            write_data(data)
        for name in names:
            began = time.perf_counter()
            now = run_case(name, tree, folder.resolve() / "now", data)
            old = (
                known[name] if known else run_case(name, before, folder.resolve() / "before", data)
            )
            lines = compare(old, now)
            faults += bool(lines)
            verdict = "equal bit for bit" if not lines else f"{len(lines)} differences"
            print_case(name, now, verdict, began)
            for line in lines[:8]:
                print(f"    {line}", flush=True)
    return 1 if faults else 0


def record(names: list[str], tree: Path, folder: Path) -> int:
    """Keep a tree's runs in a folder, and what they have left in its `record.json`; gives 0."""
    if (folder / RECORD_FILE).exists():
        raise UserError(f"--record ({str(folder)!r}) holds a record; name a new folder")
    write_data(folder / "data")
    cases = {}
    for name in names:
        began = time.perf_counter()
        cases[name] = run_case(name, tree, folder / "before", folder / "data")
        print_case(name, cases[name], "recorded", began)
    (folder / RECORD_FILE).write_text(json.dumps(cases), encoding="utf-8")
    return 0


def read_record(folder: Path, names: list[str]) -> JsonObject:
    """Read the cases of a record, by their names.

    Raises:
      UserError: it is not a record, or lacks a case.
    """
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except OSError as fault:
        raise UserError(f"--against ({str(folder)!r}): no record: {fault.strerror}") from fault
    if missing := sorted({*names} - {*record}):
        raise UserError(f"--against ({str(folder)!r}) lacks {missing}; name others by --cases")
    return record


def write_data(folder: Path) -> None:
    """Digits, and as text the documents of this tree."""
    prepare = ["-m", "tools.prepare_dataset"]
    call(ROOT, [*prepare, "digits", "--out", str(folder)])
    text = ["--from", str(ROOT / "docs"), "--tokenizer", "byte", "--name", "documents"]
    call(ROOT, [*prepare, "text", *text, "--held-out", "0.01", "--out", str(folder)])


def print_case(name: str, found: JsonObject, verdict: str, began: float) -> None:
    """Say how a case went, in a line."""
    facts = f"{len(found['lines'])} lines, {len(found['tensors'])} tensors"
    print(f"{name:<16} {facts:<26} {verdict}, {time.perf_counter() - began:.0f} s", flush=True)


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check a revision out into a temporary directory."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        command = ["git", "-C", str(ROOT), "worktree", "add", "--detach", str(tree), revision]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"--before ({revision!r}): {done.stderr.strip().splitlines()[-1]}")
        try:
            yield tree
        finally:
            remove = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, check=True, capture_output=True)


def run_case(name: str, tree: Path, out: Path, data: Path) -> JsonObject:
    """Make a case's runs in one tree and read what they have left.

    Args:
      out: directory of the tree's runs; a case finds its teacher there.
      data: directory of the datasets.
    """
    case = CASES[name]
    places = [f"--data.root={data}", f"--run.output_dir={out}", f"--run.run_id={name}"]
    starts: list[tuple[str, ...]] = [("main", *case.flags)]
    if case.before:
        starts.insert(0, case.before)
    for program, *flags in starts:
        config, *rest = (flag.replace("{out}", str(out)) for flag in flags)
        own = places if program == "main" else places[:1]
        words = [*_PROGRAMS[program], "--config", config, *rest, *own]
        call(tree, words, dict(case.environment))
    (run,) = out.glob(f"*/{name}")
    return {
        "lines": [normalise(line) for line in read_metrics(run)],
        "tensors": hash_tensors(run),
    }


def call(tree: Path, words: list[str], environment: dict[str, str] | None = None) -> None:
    """Run Python in a tree; its last lines are shown where it fails."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        capture_output=True,
        text=True,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(tree), **(environment or {})},
    )
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-12:])
        raise UserError(f"{' '.join(words)} ended with {done.returncode} in {tree}:\n{end}")


def normalise(line: JsonObject) -> JsonObject:
    """Return what equal runs share at a line, in today's form, and its graphs.

    Graphs are compared here because both trees make their runs in the same way.
    """
    line = modernise(line)
    graphs = {
        name: value
        for name, value in get_numbers(line).items()
        if (metric := METRICS.find(name)) and metric.unit == "graphs"
    }
    return keep_deterministic(line) | graphs


def hash_tensors(run: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a run's checkpoints and of its export."""
    from safetensors.numpy import load_file

    hashes = {}
    for path in sorted(run.rglob("*.safetensors")):
        for name, value in load_file(path).items():
            key = f"{path.relative_to(run)}:{name}"
            hashes[key] = hashlib.sha256(value.tobytes()).hexdigest()
    return hashes


def compare(before: JsonObject, now: JsonObject) -> list[str]:
    """List what differs, one line each."""
    faults = []
    if len(before["lines"]) != len(now["lines"]):
        faults.append(f"{len(before['lines'])} lines before, {len(now['lines'])} now")
    for old, new in zip(before["lines"], now["lines"], strict=False):
        faults += [
            f"step {old['step']}: {name} was {old.get(name)}, is {new.get(name)}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
    for name in sorted({*before["tensors"], *now["tensors"]}):
        if before["tensors"].get(name) != now["tensors"].get(name):
            faults.append(f"{name} differs")
    return faults


if __name__ == "__main__":
    sys.exit(main())
