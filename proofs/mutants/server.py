"""Forks a process for each run of tests, so that frameworks are imported once for all of them.

Started with `python -P server.py FRAMEWORK...` in the root of a tree whose code it never imports
itself: each process that it forks does, with whatever fault stands there at that moment. A request
is a line of JSON on stdin, the answer one on stdout:

    {"tests": [FILE...], "mark": EXPRESSION, "gather": {"include": [FILE...], "folder": FOLDER}}
    {"tests": [FILE...], "mark": EXPRESSION, "chosen": [NODE ID...], "limit_s": SECONDS}

`gather` runs all tests under coverage and tells which lines each of them runs; `chosen` runs these
in this order up to the first that fails.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

import coverage
import pytest

_DATA = "lines"
_Fixture = pytest.FixtureDef[object]  # of whatever value


class Gather(TypedDict):
    """Files whose lines are noted, and the directory that takes them."""

    include: list[str]
    folder: str


class Request(TypedDict):
    """A line on stdin."""

    tests: list[str]
    mark: NotRequired[str]
    gather: NotRequired[Gather]
    chosen: NotRequired[list[str]]
    limit_s: NotRequired[float]


class Answer(TypedDict):
    """A line on stdout."""

    code: int  # of pytest, -1 if its process ended without an answer
    failed: list[str]
    is_late: bool
    status: NotRequired[int]  # how such a process ended, as `os.waitpid` gives it


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # what is there already is no rubbish: forked processes need not look at it
    for line in sys.stdin:
        answers.write(json.dumps(_run_apart(json.loads(line))) + "\n")
        answers.flush()


def _run_apart(request: Request) -> Answer:
    """Return the result of a forked process; kill it and its children if it takes too long."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(mine)
        os.setsid()
        answer = _run_tests(request)
        os.write(theirs, json.dumps(answer).encode())
        os._exit(0)
    os.close(theirs)
    text, end = b"", time.monotonic() + request.get("limit_s", 1e9)
    while (left := end - time.monotonic()) > 0:
        if select.select([mine], [], [], min(left, 3600.0))[0]:
            part = os.read(mine, 1 << 16)
            text += part
            if not part:
                break
    os.close(mine)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if text:
        return json.loads(text)
    return {"code": -1, "failed": [], "is_late": left <= 0, "status": status}


def _run_tests(request: Request) -> Answer:
    """Run pytest in this process."""
    sys.path.insert(0, str(Path.cwd()))
    _keep_lines_of_graphs()
    observer = _Observer(request.get("chosen"))
    # A place of its own for temporary files: they go with the next run.
    flags = [*request["tests"], "--rootdir=.", "--basetemp=../scratch", "--tb=line"]
    flags += ["-m", request["mark"]] if request.get("mark") else []
    if importlib.util.find_spec("hypothesis") is not None:
        flags += ["--hypothesis-seed=0"]
        _find_without_shrinking()
    if "gather" not in request:
        code = pytest.main([*flags, "-x"], plugins=[observer])
        return {"code": int(code), "failed": observer.failed, "is_late": False}
    lines = _Lines(request["gather"]["include"], request["gather"]["folder"])
    observer.lines = lines
    with lines.record():
        code = pytest.main(flags, plugins=[observer])
    facts = {
        "seconds": observer.seconds,
        "uses": observer.uses,
        "lines": lines.read(),
        "failed": observer.failed,
    }
    (lines.folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return {"code": int(code), "failed": observer.failed, "is_late": False}


def _keep_lines_of_graphs() -> None:
    """AutoGraph runs a translation of the code in whose file no line is found again."""
    if "tensorflow" in sys.modules:
        from tensorflow.python.autograph.core import ag_ctx

        ag_ctx.ControlStatusCtx(status=ag_ctx.Status.DISABLED).__enter__()


def _find_without_shrinking() -> None:
    """Stop at the first failing example: finding the smallest takes time."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", phases=phases, database=None, deadline=None)
    settings.load_profile("mutants")


class _Observer:
    """A pytest plugin: chooses and orders tests, notes failures, times and shared fixtures."""

    def __init__(self, chosen: list[str] | None) -> None:
        self.chosen = chosen
        self.lines: _Lines | None = None
        self.failed: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.uses: dict[str, list[str]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen ones, in their order."""
        if self.chosen is not None:
            by_name = {item.nodeid: item for item in items}
            items[:] = [by_name[name] for name in self.chosen if name in by_name]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which shared fixtures a test uses."""
        for item in session.items:
            assert isinstance(item, pytest.Function)
            known = item._fixtureinfo.name2fixturedefs.values()
            shared = [
                _name_fixture(definitions[-1])
                for definitions in known
                if _is_shared(definitions[-1])
            ]
            self.uses[item.nodeid] = shared

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """From here on lines belong to this test."""
        if self.lines is not None:
            self.lines.switch(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a phase up."""
        self.seconds[report.nodeid] += report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be read as failed."""
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: _Fixture) -> Iterator[None]:
        """Lines and time of a shared fixture belong to all tests that use it."""
        if self.lines is None or not _is_shared(fixturedef):
            return (yield)
        name, before, start = _name_fixture(fixturedef), self.lines.context, time.monotonic()
        self.lines.switch(name)
        try:
            return (yield)
        finally:
            self.lines.switch(before)
            self.seconds[name] += time.monotonic() - start
            self.seconds[before] -= time.monotonic() - start


class _Lines:
    """Which lines run while a context is set, in this process and in those that it starts."""

    def __init__(self, include: list[str], folder: str) -> None:
        self.folder, self.context = Path(folder), ""
        rules = self.folder / "coverage.ini"
        files = "".join(f"\n  {Path(name).absolute()}" for name in include)
        rules.write_text(
            f"[run]\ndata_file = {self.folder / _DATA}\nparallel = true\nsigterm = true\n"
            f"context = ${{MUTANTS_CONTEXT-}}\ninclude ={files}\n"
        )
        self.coverage = coverage.Coverage(config_file=str(rules))
        os.environ["COVERAGE_PROCESS_START"] = str(rules)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record within the block."""
        self.coverage.start()
        try:
            yield
        finally:
            self.coverage.stop()
            self.coverage.save()

    def switch(self, context: str) -> None:
        """From here on it is this test or fixture."""
        self.context = os.environ["MUTANTS_CONTEXT"] = context
        self.coverage.switch_context(context)

    def read(self) -> dict[str, dict[str, list[int]]]:
        """File -> test or fixture -> lines."""
        lines_by_file: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for path in self.folder.glob(f"{_DATA}.*"):
            data = coverage.CoverageData(str(path))
            try:
                data.read()
            except coverage.CoverageException:
                continue  # of a process that was killed while it wrote
            for file in data.measured_files():
                by_line = data.contexts_by_lineno(file).items()
                name = Path(file).relative_to(Path.cwd()).as_posix()
                for line, context in ((n, c) for n, contexts in by_line for c in contexts):
                    lines_by_file[name][context].add(line)
        return {f: {c: sorted(n) for c, n in by.items()} for f, by in lines_by_file.items()}


def _is_shared(definition: _Fixture) -> bool:
    return definition.scope != "function"


def _name_fixture(definition: _Fixture) -> str:
    return f"{definition.baseid}::{definition.argname}"


if __name__ == "__main__":
    main()
