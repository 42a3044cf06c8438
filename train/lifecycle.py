"""Creating, stopping and deleting TPU VMs so that doing it twice changes nothing."""

from __future__ import annotations

import time

from train import commands
from train.commands import CreateOptions, Tpu
from train.describe import COMING, GONE, WAITING, describe, read_queued_state
from train.execute import Executor
from utils.errors import UserError

POLL_S = 15.0


def create(tpu: Tpu, executor: Executor, *, options: CreateOptions) -> str:
    """Make sure that the TPU VM is there; says what was done.

    Raises:
      UserError: one of another type bears the name, it is gone but not deleted, or Cloud TPU
        refuses.
    """
    facts = describe(tpu, executor)
    if executor.dry_run:
        facts = None
    if facts is None:
        return _ask_for(tpu, executor, options=options)
    if facts.accelerator_type and facts.accelerator_type != options.accelerator_type:
        raise UserError(
            f"{tpu.name!r} is there already as {facts.accelerator_type}, not "
            f"{options.accelerator_type}; choose another name, or delete it"
        )
    if facts.state in GONE:
        raise UserError(f"{tpu.name!r} is {facts.state}: delete it, then create it again")
    if facts.state == "STOPPED":
        executor.require(commands.start(tpu))
        return f"{tpu.name} was stopped and has been started"
    return f"{tpu.name} is there already: {facts.accelerator_type}, {facts.state}"


def recreate(tpu: Tpu, executor: Executor, *, options: CreateOptions) -> str:
    """Remove what is left of a TPU VM that was taken away, and ask for a new one.

    Raises:
      UserError: Cloud TPU refuses.
    """
    delete(tpu, executor)
    return _ask_for(tpu, executor, options=options)


def stop(tpu: Tpu, executor: Executor) -> str:
    """Stop a TPU VM; says what was done.

    Raises:
      UserError: there is none, or Cloud TPU refuses: pods and queued resources cannot be stopped.
    """
    facts = describe(tpu, executor)
    if facts is None:
        raise UserError(f"{tpu.name!r} does not exist; there is nothing to stop")
    if facts.state in ("STOPPED", "STOPPING"):
        return f"{tpu.name} is {facts.state} already"
    executor.require(commands.stop(tpu))
    return f"{tpu.name} is stopped; its disk is kept and paid for, create starts it again"


def delete(tpu: Tpu, executor: Executor) -> str:
    """Delete a TPU VM and its queued resource; says what was done.

    Raises:
      UserError: Cloud TPU refuses.
    """
    if read_queued_state(tpu, executor) is not None:
        executor.require(commands.delete_queued(tpu))
        return f"{tpu.name} and its queued resource are deleted"
    if describe(tpu, executor) is None:
        return f"{tpu.name} does not exist; nothing to delete"
    executor.require(commands.delete(tpu))
    return f"{tpu.name} is deleted"


def wait_until_ready(tpu: Tpu, executor: Executor, *, poll_s: float = POLL_S) -> bool:
    """Wait while a TPU VM is on its way; False when it is not there and none is coming.

    Raises:
      UserError: Cloud TPU could not be asked.
    """
    told = None
    while True:
        facts = describe(tpu, executor)
        state = facts.state if facts else read_queued_state(tpu, executor)
        if facts is not None and state == "READY":
            return True
        if state not in (COMING if facts else (*WAITING, "ACTIVE")):
            return False
        if state != told:
            print(f"{tpu.name} is {state}: waiting", flush=True)
            told = state
        time.sleep(poll_s)


def _ask_for(tpu: Tpu, executor: Executor, *, options: CreateOptions) -> str:
    if options.queued and not executor.dry_run:
        state = read_queued_state(tpu, executor)
        if state in WAITING:
            return f"{tpu.name} is queued already: {state}"
        if state is not None:
            executor.require(commands.delete_queued(tpu))
    executor.require(commands.create(tpu, options))
    what = "is asked for in the queue" if options.queued else "is created"
    return f"{tpu.name} {what}: {options.accelerator_type}"
