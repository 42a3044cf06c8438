"""Restarts a run whose machines were taken away, and stops where a restart would not help."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from train.commands import DEFAULT_STACK, CreateOptions, RemoteCommand, Tpu
from train.execute import Executor
from train.experiments import check_hosts
from train.fanout import EXIT_LOST, FanoutOptions, Outcome, fan_out
from train.lifecycle import POLL_S, Facts, describe, recreate, require_ready, wait_until_ready
from train.provision import set_up, sync
from train.worker import EXIT_TWICE
from utils.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TERMINATED, UserError

LONGEST_PAUSE_S = 600.0


@dataclass(frozen=True)
class RecoverOptions:
    """Rules for restarts."""

    max_restarts: int = 10  # in a row, each after a start that did not last `soon_s`
    # Pause before the first of them; doubled by each further one, up to 600 s
    backoff_s: float = 30.0
    soon_s: float = 600.0  # a start that lasts so long resets the count
    # how to request a TPU VM that does not exist; None if it must exist
    create: CreateOptions | None = None
    provision: bool = True  # ship the tree and set up before each start
    dirty: bool = False
    stack: str = DEFAULT_STACK


class Recovery:
    """One run on one TPU VM, over all its starts."""

    def __init__(
        self, tpu: Tpu, executor: Executor, *, options: RecoverOptions, fanout: FanoutOptions
    ) -> None:
        self._tpu, self._executor = tpu, executor
        self._options, self._fanout = options, fanout
        self._lasted_s = 0.0  # of the last start, the command alone

    def run(self, remote: RemoteCommand) -> int:
        """Run to the end over preemptions; return the exit code of the last attempt.

        Raises:
          UserError: the TPU VM cannot be created, shipped to or set up at the first start.
        """
        options = self._options
        remote = name_run(remote, self._fanout.run_id)
        if options.max_restarts < 0:
            raise UserError(f"--max-restarts ({options.max_restarts}) is negative; use 0 or more")
        attempt = soon = 0  # starts so far; restarts in a row
        while True:
            outcome = self._attempt(remote, attempt)
            attempt += 1
            if self._executor.dry_run or outcome.code == 0:
                return outcome.code
            _log(f"attempt {attempt}: {outcome.cause}")
            reason = self._get_restart_reason(outcome)
            if reason is None:
                _log(f"not started again: exit code {outcome.code} is no preemption")
                return outcome.code
            if self._lasted_s >= options.soon_s:
                soon = 0
            if soon == options.max_restarts:
                _log(f"{reason}; gave up after {soon} restarts")
                return outcome.code
            pause_s = min(options.backoff_s * 2**soon, max(options.backoff_s, LONGEST_PAUSE_S))
            soon += 1
            _log(f"{reason}; restart {soon} of {options.max_restarts} in {pause_s:g} s")
            time.sleep(pause_s)
            remote = replace(add_resume(remote), end_others=True)

    def _attempt(self, remote: RemoteCommand, attempt: int) -> Outcome:
        """Prepare machine, tree and environment, and run the command once."""
        tpu, executor = self._tpu, self._executor
        self._lasted_s = 0.0
        try:
            check_hosts(remote.words, len(self._ensure_machine().hosts))
            if self._options.provision:
                sync(tpu, executor, workdir=remote.workdir, dirty=self._options.dirty)
                if not set_up(tpu, executor, workdir=remote.workdir, stack=self._options.stack):
                    raise UserError("the workers' versions differ from the pinned ones; see above")
            facts = require_ready(tpu, executor)
            # Every start is a launch of its own.
            name = f"{self._fanout.run_id}.{attempt}" if attempt else self._fanout.run_id
            fanout = replace(self._fanout, run_id=name)
            began = time.monotonic()
            outcome = fan_out(
                tpu, remote, hosts=len(facts.hosts), options=fanout, executor=executor
            )
            self._lasted_s = time.monotonic() - began
            return outcome
        except UserError as error:
            # A machine may be taken away again during its setup.
            if attempt == 0:
                raise
            return Outcome(EXIT_LOST, str(error))

    def _ensure_machine(self) -> Facts:
        tpu, executor = self._tpu, self._executor
        poll_s = min(POLL_S, self._options.backoff_s)
        if facts := wait_until_ready(tpu, executor, poll_s=poll_s):
            return facts
        if self._options.create is None:
            raise UserError(
                f"{tpu.name!r} does not exist and cannot be created again; add --accelerator-type "
                "and the other flags of create"
            )
        _log(recreate(tpu, executor, options=self._options.create))
        if facts := wait_until_ready(tpu, executor, poll_s=poll_s):
            return facts
        raise UserError(f"{tpu.name!r} was created and is not READY; see describe")

    def _get_restart_reason(self, outcome: Outcome) -> str | None:
        """Explain a restart; None after the program's own failure or a user's interrupt."""
        if outcome.code == EXIT_PREEMPTED:
            return "preempted (exit code 75)"
        if outcome.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            return None
        is_lost = outcome.code in (EXIT_LOST, EXIT_TWICE)
        try:
            facts = describe(self._tpu, self._executor)
        except UserError as error:
            return f"lost ({error})" if is_lost else None
        if facts is None:
            return "the TPU VM is gone"
        if facts.state != "READY":
            return f"the TPU VM is {facts.state}"
        return "the connection was lost" if is_lost else None


def name_run(remote: RemoteCommand, name: str) -> RemoteCommand:
    """Give a command of main.py a run of its own.

    Without a name, `--resume auto` would continue the newest run of the directory.
    """
    return _add(remote, ("--run.run_id", "--resume", "--run.resume"), f"--run.run_id={name}")


def add_resume(remote: RemoteCommand) -> RemoteCommand:
    """Let a command of main.py continue from its last checkpoint."""
    return _add(remote, ("--resume", "--run.resume"), "--resume=auto")


def _add(remote: RemoteCommand, unless: tuple[str, ...], word: str) -> RemoteCommand:
    is_ours = any(word.endswith("main.py") for word in remote.words)
    given = [word for word in remote.words if word.partition("=")[0] in unless]
    return remote if given or not is_ours else replace(remote, words=(*remote.words, word))


def _log(text: str) -> None:
    print(f"[run] {text}", flush=True)
