"""A copy of the tree in which faults are planted, one at a time, and the tests that meet them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proofs.mutants.operators import Mutant, list_mutants
from utils.errors import UserError
from utils.json_types import JsonObject

if TYPE_CHECKING:
    from proofs.mutants.server import Answer, Request

SERVER = Path(__file__).resolve().with_name("server.py")
# What tests/conftest.py sets, which is too late where torch_xla is there already.
_ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "MPLBACKEND": "Agg",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}
_NOT_COPIED = (".*", "__pycache__", "runs", "data")
# By pytest's exit code; any other: caught.
_VERDICTS = {0: "survived", 5: "survived", -1: "crashed"}
_RAN = (0, 1, 5)  # well, with failures, nothing there
_LEAST_LIMIT_S = 60.0
_SLACK = 4.0


@dataclass(frozen=True)
class Room:
    """Files of code and files of tests, as patterns from the root."""

    name: str
    code: tuple[str, ...]
    tests: tuple[str, ...]

    def list_code(self, root: Path) -> list[str]:
        """List its files of code, relative to the root."""
        return _expand(root, self.code)

    def list_tests(self, root: Path) -> list[str]:
        """List its files of tests, relative to the root."""
        return _expand(root, self.tests)


@dataclass
class Coverage:
    """What was seen while a room's tests ran without a fault.

    Args:
      lines: file -> test or shared fixture -> lines that it runs; "" while files are imported.
      seconds: test or shared fixture -> time.
      uses: test -> shared fixtures.
      failed: tests that fail without a fault: they tell nothing.
    """

    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    uses: dict[str, list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Coverage) -> None:
        """Add what was measured of further tests."""
        for file, by_context in other.lines.items():
            own = self.lines.setdefault(file, {})
            for context, lines in by_context.items():
                own[context] = sorted({*own.get(context, ()), *lines})
        self.seconds.update(other.seconds)
        self.uses.update(other.uses)
        self.failed += other.failed

    def find_tests(self, mutant: Mutant) -> list[str]:
        """Tests that run a fault's line, themselves or by a fixture; cheapest first."""
        by_context = self.lines.get(mutant.file, {})
        first, last = mutant.lines or (1, 0)
        hit = {c for c, lines in by_context.items() if any(first <= n <= last for n in lines)}
        if mutant.lines is None or "" in hit:
            # A value may be read where no line of its file runs: all tests beside one that does.
            files = {_get_file(context) for context in by_context}
            hit = {test for test in self.uses if _get_file(test) in files}
        tests = [test for test, fixtures in self.uses.items() if test in hit or hit & {*fixtures}]
        return sorted((t for t in tests if t not in self.failed), key=self.get_cost)

    def get_cost(self, test: str) -> float:
        """Seconds of a test that runs alone."""
        return sum(self.seconds.get(name, 0.0) for name in (test, *self.uses[test]))

    def choose(self, tests: Sequence[str], budget_s: float) -> tuple[list[str], float]:
        """As many as fit, at least one, file by file; and their seconds."""
        chosen: list[str] = []
        ready: set[str] = set()
        total = 0.0
        for test in tests:
            needed = {test, *self.uses[test]} - ready
            cost = sum(self.seconds.get(name, 0.0) for name in needed)
            if chosen and total + cost > budget_s:
                break
            chosen.append(test)
            total, ready = total + cost, ready | needed
        by_file: dict[str, float] = defaultdict(float)
        for test in chosen:
            by_file[_get_file(test)] += self.get_cost(test)
        return sorted(chosen, key=lambda test: (by_file[_get_file(test)], _get_file(test))), total


class Bench:
    """The copy, the server that runs tests in it, and what is known from before.

    Args:
      cache: directory of measured lines and verdicts.
      mark: pytest's `-m`.
      frameworks: what the server imports before anything else.
    """

    def __init__(
        self, root: Path, cache: Path, *, mark: str = "", frameworks: Sequence[str] = ()
    ) -> None:
        self.cache, self.mark, self.frameworks = cache, mark, frameworks
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.tree = self.folder / "tree"
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        self.clock = 0
        self._server: subprocess.Popen[str] | None = None
        self._found: Counter[tuple[str, str]] = Counter()
        self._measured: dict[str, Coverage] = {}
        self._keys: dict[tuple[str, ...], str] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            self._server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def list_mutants(self, room: Room) -> list[Mutant]:
        """List all faults of a room."""
        mutants: list[Mutant] = []
        for name in room.list_code(self.tree):
            mutants += list_mutants((self.tree / name).read_text(encoding="utf-8"), name)
        return mutants

    def measure(self, room: Room) -> Coverage:
        """Measure which lines a room's tests run; files measured before are read from the cache.

        Raises:
          UserError: the tests do not run.
        """
        if room.name not in self._measured:
            whole = self._measured[room.name] = Coverage()
            for test_file in room.list_tests(self.tree):
                whole.add(self._measure_file(room, test_file))
        return self._measured[room.name]

    def _measure_file(self, room: Room, test_file: str) -> Coverage:
        folder = self.cache / "lines" / self.get_key(room, [test_file])
        facts = folder / "facts.json"
        if not facts.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a run that did not end
            folder.mkdir(parents=True)
            gather = {"include": room.list_code(self.tree), "folder": str(folder)}
            answer = self._ask({"tests": [test_file], "gather": gather})
            if answer["code"] not in _RAN:
                log = self.cache / "last.log"
                raise UserError(f"--rooms {room.name}: {test_file} does not run, see {log}")
        return Coverage(**json.loads(facts.read_text(encoding="utf-8")))

    def judge(self, room: Room, mutant: Mutant, budget_s: float) -> JsonObject:
        """Plant a fault, run what meets it, take it out again.

        Returns:
          `verdict` (caught, late, crashed, survived; uncovered where no test runs the line), `by`
          the test that failed, `tests` how many were chosen, `left` how many were not.
        """
        coverage = self.measure(room)
        tests = coverage.find_tests(mutant)
        if not tests:
            return {"verdict": "uncovered", "by": "", "tests": 0, "left": 0}
        chosen, seconds = coverage.choose(tests, budget_s)
        # Who found faults of this file before is asked first.
        chosen.sort(key=lambda test: -self._found[mutant.file, test])
        path = self.tree / mutant.file
        source = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutant.apply(source))
            answer = self.run_tests(chosen, _LEAST_LIMIT_S + _SLACK * seconds)
        finally:
            self._write(path, source)
        verdict = "late" if answer["is_late"] else _VERDICTS.get(answer["code"], "caught")
        by = answer["failed"][0] if answer["failed"] else ""
        self._found[mutant.file, by] += 1
        return {
            "verdict": verdict,
            "by": by,
            "tests": len(chosen),
            "left": len(tests) - len(chosen),
        }

    def run_tests(self, chosen: Sequence[str], limit_s: float) -> Answer:
        """Run the chosen tests on the server; return its response."""
        files = sorted({_get_file(test) for test in chosen})
        return self._ask({"tests": files, "chosen": list(chosen), "limit_s": limit_s})

    def get_key(self, room: Room, test_files: Sequence[str]) -> str:
        """Of the contents of a room's code, of test files and of what they import from tests/."""
        asked = (room.name, *test_files)
        if asked not in self._keys:
            support = [path.relative_to(self.tree) for path in self.tree.glob("tests/**/*.py")]
            names = {path.as_posix() for path in support if not path.name.startswith("test_")}
            digest = hashlib.sha256()
            for name in sorted(names | {*room.list_code(self.tree), *test_files}):
                digest.update(name.encode() + (self.tree / name).read_bytes())
            self._keys[asked] = f"{room.name}-{digest.hexdigest()[:16]}"
        return self._keys[asked]

    def get_proof(self, room: Room, row: JsonObject) -> str:
        """Return the key of what a verdict rests on: the file of the test `by`, or all tests."""
        files = room.list_tests(self.tree)
        finder = _get_file(row["by"])
        return self.get_key(room, [finder] if finder in files else files)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own, so that no compiled file of another text is taken for it."""
        self.clock += 10
        path.write_text(text, encoding="utf-8")
        os.utime(path, (self.clock, self.clock))

    def _ask(self, request: Request) -> Answer:
        if self._server is None:
            environment = {**_ENVIRONMENT, **os.environ, "PYTHONPATH": ""}
            with (self.cache / "last.log").open("w") as log:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", str(SERVER), *self.frameworks],
                    cwd=self.tree,
                    text=True,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps({"mark": self.mark, **request}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of tests has ended, see {self.cache / 'last.log'}")
        return json.loads(answer)


def _expand(root: Path, patterns: Sequence[str]) -> list[str]:
    names = {
        path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)
    }
    return sorted(names)


def _get_file(test: str) -> str:
    return test.partition("::")[0]
