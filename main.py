"""Train, distil or evaluate: `python main.py --config configs/x.yaml [--key value ...]`.

Flags become a `RunConfig`, and `job` runs it: it is checked without a device, the runtime starts
its replicas, and each of them builds its parts and hands them to the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import job
from utils.config.load import load_config
from utils.log import setup_logging
from utils.programs import choose_error_form, run_program
from utils.runtime.choice import is_silent_rank

_INTERRUPTED = "interrupted; --resume auto goes on from the last checkpoint, if there is one"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    setup_logging()
    words = sys.argv[1:] if argv is None else argv
    with choose_error_form(words) as rest:
        return run_program(
            lambda: job.start(load_config(rest)),
            is_silent=is_silent_rank(),
            interrupted=_INTERRUPTED,
        )


if __name__ == "__main__":
    sys.exit(main())
