"""Shows a person how a run gets on: a bar on a terminal, a line at each log point elsewhere."""

from __future__ import annotations

import fnmatch
import sys

from tqdm import tqdm

from store.record.catalogue import LOSS
from utils.log import get_logger

# Names and patterns of the catalogue that are shown, in this order.
_SHOWN = ("loss/total", "loss/*", "lr", "grad_norm", "*_per_s")


class Progress:
    """Shows log points and evaluations; silent when not enabled (other ranks)."""

    def __init__(self, step: int, total_steps: int, *, enabled: bool) -> None:
        self._enabled = enabled
        self._total_steps = total_steps
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """A log point's numbers."""
        if not self._enabled:
            return
        names = dict.fromkeys(name for one in _SHOWN for name in fnmatch.filter(scalars, one))
        shown = ", ".join(f"{name.removeprefix(LOSS)} {scalars[name]:.4g}" for name in names)
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
