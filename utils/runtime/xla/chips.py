"""Starts a process for each chip of this host by torch_xla."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from utils.runtime.processes.children import (
    RECORDS,
    ReplicaWork,
    pass_on_sigterm,
    raise_cause,
    read_failures,
    record_failure,
    run_on,
    watch_records,
)
from utils.runtime.xla.runtime import XlaRuntime


def launch_on_chips(work: ReplicaWork) -> int:
    """Run the work on each chip; a failed one ends the others and is named in the error."""
    import torch_xla

    with tempfile.TemporaryDirectory(prefix="run-group-") as name:
        folder = Path(name)
        os.environ[RECORDS] = name
        try:
            with watch_records(folder), pass_on_sigterm():
                torch_xla.launch(_run_on_chip, args=(work,))
        except Exception as error:
            failures = read_failures(folder)
            if not failures:
                raise
            try:
                raise_cause(failures)
            except RuntimeError as cause:
                raise cause from error
        finally:
            del os.environ[RECORDS]
        return max((int(path.read_text()) for path in folder.glob("code_*")), default=0)


def _run_on_chip(rank: int, work: ReplicaWork) -> None:
    """Run the work in a chip's process, and write its exit code or failure to a file."""
    try:
        code = run_on(XlaRuntime, work)
        if code and RECORDS in os.environ:
            Path(os.environ[RECORDS], f"code_{rank}").write_text(str(code))
    except BaseException as error:
        record_failure(rank, error)
        raise
