"""`Profiler`: traces some steps of a run, and writes where their time went by module."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from job.steps.modules import list_models, name_modules
from store.query.modules import MODULES_FILE, REQUEST_FILE, SCHEMA_VERSION, take_request
from utils.log import get_logger
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from job.build import Parts
    from job.spec import Job
    from utils.runtime.base import Runtime


class Profiler:
    """Traces the steps `first-last` of `profile.steps`, and those that a request asks for.

    The rank that writes, with the number of its `attempt`, leaves `modules.json`, and is the only
    one to follow requests; on others `attempt` is None.
    """

    def __init__(self, runtime: Runtime, job: Job, parts: Parts, attempt: int | None) -> None:
        self._runtime, self._parts, self._attempt = runtime, parts, attempt
        self._run, section = job.run.path, job.config.profile
        is_traced = attempt is not None or section.all_ranks
        steps = section.steps if is_traced else ""
        self._first, self._last = map(int, steps.split("-")) if steps else (-1, -2)
        self._folder = self._run / "profile"
        self._trace: contextlib.AbstractContextManager[None] | None = None
        self._began, self._step = 0.0, -1
        self._names = contextlib.ExitStack()
        if section.steps:
            self._names.enter_context(runtime.name_operations(list_models(parts)))

    def look_for_request(self) -> None:
        """Plan a trace of the next steps if another program has asked for it."""
        if self._attempt is None or self._step < self._last:
            return
        try:
            steps = take_request(self._run)
        except OSError as error:
            get_logger().warning("%s cannot be removed: %s", REQUEST_FILE, error)
            return
        if steps:
            self._first, last = self._step + 1, self._step + steps
            self._last = min(last, self._parts.plan.total_steps - 1)
            get_logger().info("profiling the steps %d-%d on request", self._first, self._last)

    def begin_step(self, step: int) -> None:
        """Start or end a trace before a step."""
        self._step = step
        if step == self._first:
            names = name_modules(self._parts)
            self._trace = self._runtime.trace(self._folder, self._name, names)
            self._trace.__enter__()
            self._began = time.time()
        elif step == self._last + 1:
            self._end_trace()

    def close(self) -> None:
        """End a running trace and the naming of operations, which the next run must not have."""
        with self._names:
            self._end_trace()

    def _end_trace(self) -> None:
        """End a running trace, log its folder, and write the times of modules."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.__exit__(None, None, None)
        steps = f"{self._first}-{self._last}"
        get_logger().info("trace of steps %s in %s", steps, self._folder)
        if self._attempt is None:
            return
        profile = self._runtime.read_profile(self._folder, self._name)
        if profile is None:
            get_logger().warning("the trace names no step, so %s is not written", MODULES_FILE)
        else:
            head = {"schema_version": SCHEMA_VERSION, "from_to": steps, "began": self._began}
            head["attempt"] = self._attempt
            write_json(self._run / MODULES_FILE, head | profile)

    @property
    def _name(self) -> str:
        return f"steps_{self._first}-{self._last}"
