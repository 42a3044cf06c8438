"""What a person sees of a run: a bar on a terminal, a line at each log point elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from utils.log import get_logger

_BEFORE_TERMS, _AFTER_TERMS = ("total", "task"), ("lr", "grad_norm")


class Progress:
    """Shows log points and evaluations; silent when not enabled (other ranks).

    Args:
      terms: names of the distillation terms, which stand between the task's loss and the rest.
      unit: what throughput counts.
    """

    def __init__(
        self, step: int, total_steps: int, *, enabled: bool, terms: Sequence[str] = (),
        unit: str = "img",
    ) -> None:  # fmt: skip
        self._shown = (*_BEFORE_TERMS, *terms, *_AFTER_TERMS, f"{unit}_per_s")
        self._enabled = enabled
        self._total_steps = total_steps
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """A log point's numbers."""
        if not self._enabled:
            return
        shown = ", ".join(f"{name} {scalars[name]:.4g}" for name in self._shown if name in scalars)
        if self._bar is None:
            get_logger().info("step %d/%d: %s", step, self._total_steps, shown)
            return
        self._bar.update(step - self._bar.n)
        self._bar.set_postfix_str(shown)

    def tell(self, step: int, text: str) -> None:
        """What an evaluation has found."""
        if not self._enabled:
            return
        if self._bar is None:
            get_logger().info("step %d: %s", step, text)
            return
        self._bar.update(step - self._bar.n)
        self._bar.write(f"step {step}: {text}", file=sys.stderr)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
