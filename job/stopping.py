"""`Stopping`: requests to end, and the watch over a loop that stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from job.metric_writer import LostRunError
from utils.log import get_logger
from utils.stopping import StallWatch, StopRequest

if TYPE_CHECKING:
    from job.recorder import LoopRecorder
    from job.recording import Replica

# Steps between two questions to all ranks whether one was asked to end.
AGREE_EVERY = 8


class Stopping:
    """Whether a replica should end, was taken over, or stands still.

    Args:
      recorder: takes note of a stall.
    """

    def __init__(self, replica: Replica, recorder: LoopRecorder) -> None:
        self._replica, self._recorder = replica, recorder
        self.request = StopRequest()
        self.watch = StallWatch(
            replica.job.config.train.stall_timeout_s,
            lambda: replica.runtime.instruments.current_span,
            self._report_stall,
        )
        self.listening = self.request.listen()

    def require_run(self) -> None:
        """Refuse to go on with a run that another program has taken over.

        Raises:
          LostRunError: it has.
        """
        session = self._replica.session
        if session is not None and session.is_lost:
            raise LostRunError(
                f"another program has taken over {self._replica.job.run.place}: this one had been "
                "silent for too long; let the other go on"
            )

    def is_due(self, step: int) -> bool:
        """Whether all ranks ask each other after this step."""
        return self._replica.runtime.ranks.size == 1 or step % AGREE_EVERY == 0

    def is_asked(self, step: int) -> bool:
        """Whether any rank was asked to end; alike on all of them, called by all of them alike."""
        asked = self._replica.runtime.ranks.any(bool(self.request.reason))
        if asked:
            reason = self.request.reason or "by another rank"
            get_logger().warning("asked to end (%s): saving step %d", reason, step)
        return asked

    def _report_stall(self, reason: str) -> None:
        replica = self._replica
        if replica.session is not None:
            replica.session.end(replica.parts.state.step, "failed", reason)
        self._recorder.note_stall(replica.job.config.train.stall_timeout_s)
