"""Reads what Cloud TPU says of a TPU VM."""

from __future__ import annotations

import json
from dataclasses import dataclass

from train import commands
from train.commands import Tpu
from train.execute import Executor
from utils.errors import UserError
from utils.json_types import JsonObject

# States in which a TPU VM has gone and only its name is left.
GONE = ("PREEMPTED", "TERMINATED")
# States that lead to READY without anybody's help.
COMING = ("CREATING", "STARTING", "REPAIRING", "RESTARTING")
# States of a queued resource that still waits.
WAITING = ("ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES")
_ASSUMED = json.dumps({"state": "READY", "networkEndpoints": [{"ipAddress": "10.0.0.2"}]})


@dataclass(frozen=True)
class Facts:
    """A TPU VM as it stands.

    Attributes:
      hosts: internal addresses, in the order of the workers.
    """

    state: str
    health: str
    accelerator_type: str
    runtime_version: str
    hosts: tuple[str, ...]


def describe(tpu: Tpu, executor: Executor) -> Facts | None:
    """What there is of this name; none: nothing.

    Raises:
      UserError: Cloud TPU could not be asked.
    """
    answer = executor.ask(commands.describe(tpu), assume=_ASSUMED)
    if answer.code:
        _require_not_found(tpu, reason=answer.reason, error=answer.error)
        return None
    found = read_json(answer.output, f"describe {tpu.name}")
    # A host in several networks has an endpoint in each.
    networks = max(1, len(found.get("networkConfigs", [])))
    endpoints = found.get("networkEndpoints", [])[::networks]
    return Facts(
        state=str(found.get("state", "UNKNOWN")),
        health=str(found.get("health", "")),
        accelerator_type=str(found.get("acceleratorType", "")),
        runtime_version=str(found.get("runtimeVersion", "")),
        hosts=tuple(str(endpoint.get("ipAddress", "?")) for endpoint in endpoints),
    )


def require_ready(tpu: Tpu, executor: Executor) -> Facts:
    """The facts of a TPU VM that can be used now.

    Raises:
      UserError: there is none, or it is in another state.
    """
    facts = describe(tpu, executor)
    if facts is None:
        raise UserError(
            f"--tpu {tpu.name!r} does not exist{_get_where(tpu)}; `python -m train.tpu_vm create "
            f"{tpu.name} ...` makes it"
        )
    if facts.state != "READY":
        way = "delete and create it again" if facts.state in GONE else "wait, or create starts it"
        raise UserError(f"--tpu {tpu.name!r} is {facts.state}, not READY; {way}")
    return facts


def read_queued_state(tpu: Tpu, executor: Executor) -> str | None:
    """State of the queued resource of the same name; none: there is none."""
    answer = executor.ask(commands.describe_queued(tpu), assume='{"state": {"state": "ACTIVE"}}')
    if answer.code:
        _require_not_found(tpu, reason=answer.reason, error=answer.error)
        return None
    state = read_json(answer.output, f"describe {tpu.name}").get("state", {})
    return str(state.get("state", "UNKNOWN") if isinstance(state, dict) else state)


def read_json(text: str, what: str) -> JsonObject:
    """An answer of gcloud.

    Raises:
      UserError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"gcloud's answer to {what} is no JSON object: {text[:80]!r}")
    return found


def _require_not_found(tpu: Tpu, *, reason: str, error: str) -> None:
    """An error other than "there is no such thing" must never pass for it."""
    if "NOT_FOUND" not in error and "was not found" not in error:
        raise UserError(f"Cloud TPU could not be asked about {tpu.name!r}: {reason}")


def _get_where(tpu: Tpu) -> str:
    return f" in zone {tpu.zone}" if tpu.zone else " in gcloud's default zone"
