"""What a person sees of a run: a bar on a terminal, a line at each log point elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from utils.log import get_logger

_BEFORE_TERMS, _AFTER_TERMS = ("total", "task"), ("lr", "grad_norm", "img_per_s")


class Progress:
    """Shows log points and evaluations; silent when not enabled (other ranks).

    Args:
      terms: names of the distillation terms, which stand between the task's loss and the rest.
    """

    def __init__(
        self, step: int, total_steps: int, *, enabled: bool, terms: Sequence[str] = ()
    ) -> None:
        self._shown = (*_BEFORE_TERMS, *terms, *_AFTER_TERMS)
        self._enabled = enabled
        self._total_steps = total_steps
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def show(self, step: int, scalars: dict[str, float]) -> None:
        """A log point's or an evaluation's numbers."""
        if not self._enabled:
            return
        if "eval_top1" in scalars:
            text = f"step {step}: eval top-1 {scalars['eval_top1']:.2f}, "
            text += f"loss {scalars['eval_loss']:.4f}"
        else:
            shown = [f"{name} {scalars[name]:.4g}" for name in self._shown if name in scalars]
            text = f"step {step}/{self._total_steps}: {', '.join(shown)}"
        if self._bar is None:
            get_logger().info("%s", text)
            return
        self._bar.update(step - self._bar.n)
        if "eval_top1" in scalars:
            self._bar.write(text, file=sys.stderr)
        else:
            self._bar.set_postfix_str(", ".join(shown))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.close()
