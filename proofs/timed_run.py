"""A run that is ready to step, for programs that time its loop from outside."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from job.build import build_parts
from job.callbacks import RunCallbacks
from job.check import check
from store.record.session import RunSession
from utils.runtime.launcher import create_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from job.callbacks import RunCallbacks
    from utils.config.load import RunConfig


@contextlib.contextmanager
def open_run(config: RunConfig) -> Iterator[RunCallbacks]:
    """Open a new run in its directory, before its first step; close it afterwards."""
    runtime = create_runtime(config.runtime)
    job = check(config)
    session = RunSession(job.run)
    session.take_new(overwrite=False)
    with contextlib.closing(session), contextlib.closing(build_parts(runtime, job)) as parts:
        session.begin("", {}, from_step=0)
        with RunCallbacks(runtime, job, parts, session) as callbacks:
            yield callbacks
