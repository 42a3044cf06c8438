"""`Stopping`: requests to stop, and the watch for a stalled loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from job.metric_writer import LostRunError
from utils.log import get_logger
from utils.stopping import StallWatch, StopRequest

if TYPE_CHECKING:
    from job.recording import Replica
    from job.step_timer import StepTimer

# Steps between two agreements of all ranks on whether one was asked to stop.
AGREE_EVERY = 8


class Stopping:
    """Decides whether a replica should stop, was taken over, or is stalled."""

    def __init__(self, replica: Replica, recorder: StepTimer) -> None:
        self._replica, self._recorder = replica, recorder
        self.request = StopRequest()
        self.watch = StallWatch(
            replica.job.config.train.stall_timeout_s,
            lambda: replica.runtime.instruments.current_span,
            self._report_stall,
        )
        self.listening = self.request.listen()

    def require_run(self) -> None:
        """Raise LostRunError if another program has taken over the run."""
        session = self._replica.session
        if session is not None and session.is_lost:
            raise LostRunError(
                f"another program has taken over {self._replica.job.run.place} after this one was "
                "silent for too long; let the other one continue"
            )

    def is_due(self, step: int) -> bool:
        """Return whether all ranks agree on stopping after this step."""
        return self._replica.runtime.ranks.size == 1 or step % AGREE_EVERY == 0

    def is_asked(self, step: int) -> bool:
        """Return whether any rank was asked to stop; the same on all, called by all alike."""
        asked = self._replica.runtime.ranks.any(bool(self.request.reason))
        if asked:
            reason = self.request.reason or "by another rank"
            get_logger().warning("stop requested (%s): saving step %d", reason, step)
        return asked

    def _report_stall(self, reason: str) -> None:
        replica = self._replica
        if replica.session is not None:
            replica.session.end(replica.parts.state.step, "failed", reason)
        self._recorder.note_stall(replica.job.config.train.stall_timeout_s)
