"""Describes, creates, stops and deletes TPU VMs; repeating a step changes nothing.

Each function raises a UserError if Cloud TPU refuses, or returns no state.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from train import commands
from train.commands import CreateOptions, Tpu
from train.execute import Executor
from utils.errors import UserError
from utils.json_types import JsonObject

POLL_S = 15.0
# States of a TPU VM of which only the name is left.
_GONE = ("PREEMPTED", "TERMINATED")
# States that lead to READY without help.
_COMING = ("CREATING", "STARTING", "REPAIRING", "RESTARTING")
# States of a queued resource that still waits.
_WAITING = ("ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES")
_ASSUMED = json.dumps({"state": "READY", "networkEndpoints": [{"ipAddress": "10.0.0.2"}]})


@dataclass(frozen=True)
class Facts:
    """The present state of a TPU VM."""

    state: str
    health: str
    accelerator_type: str
    runtime_version: str
    hosts: tuple[str, ...]  # internal addresses, in the order of the workers


def describe(tpu: Tpu, executor: Executor) -> Facts | None:
    """Read the state of a TPU VM; None if it does not exist."""
    text = _ask(commands.describe(tpu), tpu, executor, assume=_ASSUMED)
    if text is None:
        return None
    record = _read_json(text, tpu)
    # A host in several networks has an endpoint in each.
    networks = max(1, len(record.get("networkConfigs", [])))
    endpoints = record.get("networkEndpoints", [])[::networks]
    return Facts(
        state=str(record.get("state", "UNKNOWN")),
        health=str(record.get("health", "")),
        accelerator_type=str(record.get("acceleratorType", "")),
        runtime_version=str(record.get("runtimeVersion", "")),
        hosts=tuple(str(endpoint.get("ipAddress", "?")) for endpoint in endpoints),
    )


def require_ready(tpu: Tpu, executor: Executor) -> Facts:
    """Return the facts of a TPU VM; a UserError if it does not exist or is not READY."""
    facts = describe(tpu, executor)
    if facts is None:
        zone = f" in zone {tpu.zone}" if tpu.zone else " in gcloud's default zone"
        raise UserError(
            f"--tpu {tpu.name!r} does not exist{zone}; `python -m train.tpu_vm create "
            f"{tpu.name} ...` creates it"
        )
    if facts.state != "READY":
        way = "delete and create it again" if facts.state in _GONE else "wait, or create starts it"
        raise UserError(f"--tpu {tpu.name!r} is {facts.state}, not READY; {way}")
    return facts


def read_queued_state(tpu: Tpu, executor: Executor) -> str | None:
    """Read the state of the queued resource of the same name; None if it does not exist."""
    assumed = '{"state": {"state": "ACTIVE"}}'
    text = _ask(commands.describe_queued(tpu), tpu, executor, assume=assumed)
    if text is None:
        return None
    state = _read_json(text, tpu).get("state", {})
    return str(state.get("state", "UNKNOWN") if isinstance(state, dict) else state)


def create(tpu: Tpu, executor: Executor, *, options: CreateOptions) -> str:
    """Make sure that the TPU VM exists; return what was done.

    A UserError if a TPU VM of another type has the name, or it is gone but not deleted.
    """
    facts = describe(tpu, executor)
    if facts is None or executor.dry_run:
        return _request(tpu, executor, options=options)
    if facts.accelerator_type and facts.accelerator_type != options.accelerator_type:
        raise UserError(
            f"{tpu.name!r} exists already as {facts.accelerator_type}, not "
            f"{options.accelerator_type}; choose another name, or delete it"
        )
    if facts.state in _GONE:
        raise UserError(f"{tpu.name!r} is {facts.state}: delete it, then create it again")
    if facts.state == "STOPPED":
        executor.require(commands.start(tpu))
        return f"{tpu.name} was stopped and has been started"
    return f"{tpu.name} exists already: {facts.accelerator_type}, {facts.state}"


def recreate(tpu: Tpu, executor: Executor, *, options: CreateOptions) -> str:
    """Remove what is left of a TPU VM that was taken away, and request a new one."""
    delete(tpu, executor)
    return _request(tpu, executor, options=options)


def stop(tpu: Tpu, executor: Executor) -> str:
    """Stop a TPU VM, which Cloud TPU refuses for pods; return what was done."""
    facts = describe(tpu, executor)
    if facts is None:
        raise UserError(f"{tpu.name!r} does not exist; there is nothing to stop")
    if facts.state in ("STOPPED", "STOPPING"):
        return f"{tpu.name} is {facts.state} already"
    executor.require(commands.stop(tpu))
    return f"{tpu.name} is stopped; its disk is kept and billed, create starts it again"


def delete(tpu: Tpu, executor: Executor) -> str:
    """Delete a TPU VM and its queued resource; return what was done."""
    if read_queued_state(tpu, executor) is not None:
        executor.require(commands.delete_queued(tpu))
        return f"{tpu.name} and its queued resource are deleted"
    if describe(tpu, executor) is None:
        return f"{tpu.name} does not exist; nothing to delete"
    executor.require(commands.delete(tpu))
    return f"{tpu.name} is deleted"


def wait_until_ready(tpu: Tpu, executor: Executor, *, poll_s: float = POLL_S) -> Facts | None:
    """Wait while a TPU VM is on its way; None if it does not exist and none is coming."""
    shown = None
    while True:
        facts = describe(tpu, executor)
        state = facts.state if facts else read_queued_state(tpu, executor)
        if facts is not None and state == "READY":
            return facts
        if state not in (_COMING if facts else (*_WAITING, "ACTIVE")):
            return None
        if state != shown:
            print(f"{tpu.name} is {state}: waiting", flush=True)
            shown = state
        time.sleep(poll_s)


def _request(tpu: Tpu, executor: Executor, *, options: CreateOptions) -> str:
    if options.queued and not executor.dry_run:
        state = read_queued_state(tpu, executor)
        if state in _WAITING:
            return f"{tpu.name} is queued already: {state}"
        if state is not None:
            executor.require(commands.delete_queued(tpu))
    executor.require(commands.create(tpu, options))
    verb = "is requested in the queue" if options.queued else "is created"
    return f"{tpu.name} {verb}: {options.accelerator_type}"


def _ask(command: list[str], tpu: Tpu, executor: Executor, *, assume: str) -> str | None:
    """Run a command of gcloud; None if the TPU VM does not exist.

    No other error may pass for that one: the caller would create a second machine.
    """
    answer = executor.ask(command, assume=assume)
    if not answer.code:
        return answer.output
    if "NOT_FOUND" not in answer.error and "was not found" not in answer.error:
        raise UserError(f"Cloud TPU returned no state of {tpu.name!r}: {answer.reason}")
    return None


def _read_json(text: str, tpu: Tpu) -> JsonObject:
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"gcloud returned no JSON object for {tpu.name}: {text[:80]!r}")
    return record
