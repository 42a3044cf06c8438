"""From a configuration to an exit code: check it, start its replicas, report what stopped them."""

from __future__ import annotations

import errno
import logging
import sys
from typing import TYPE_CHECKING

from job.check import check
from job.metric_writer import LostRunError
from job.replica import run
from job.summary import describe_bill, describe_job, plan_job
from utils.checkpoint.files import CheckpointError
from utils.endings import GraphBudgetError, NonFiniteError, NonFiniteEvaluationError
from utils.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError
from utils.runtime.choice import is_silent_rank
from utils.runtime.launcher import launch
from utils.runtime.processes.children import GroupError
from utils.runtime.processes.ranks import ReplicaError
from utils.runtime.start import get_start
from utils.storage.folder import StorageError

if TYPE_CHECKING:
    from utils.config.load import RunConfig

# Errors of a run that was started correctly: reported in one line, without a traceback.
_STOPS = (CheckpointError, GraphBudgetError, GroupError, LostRunError, NonFiniteError)
_STOPS += (NonFiniteEvaluationError, ReplicaError, StorageError)
# A full disk, an exceeded quota, or a limit on file sizes.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def start(config: RunConfig, device: str) -> int:
    """Check a configuration on the host, then run it on a runtime; return the exit code."""
    job = check(config, device)
    if config.run.check_only:
        for line in (*describe_job(job), *job.start, *describe_bill(plan_job(job))):
            sys.stdout.write(f"{line}\n")
        sys.stdout.write("all checks passed; no device was used and nothing was written\n")
        return 0
    logging.captureWarnings(True)
    if config.profile.steps:
        get_start(job.device).prepare_profile()
    try:
        return launch(config.runtime, run, job, device=job.device, own_code=config.run.own_code)
    except _STOPS as error:
        sys.stderr.write(f"the run was stopped: {error}\n")
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        sys.stderr.write(
            f"the run was stopped: {job.run.place} cannot be written to: {error.strerror}; free "
            "the disk and continue with --resume auto\n"
        )
        return EXIT_FAILED
    except UserError as error:
        if not is_silent_rank():
            raise
        # Only this rank found it, on its own device or host, so it reports it.
        sys.stderr.write(f"error on a rank above 0: {error}\n")
        return EXIT_USER_ERROR
