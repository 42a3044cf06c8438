"""Traces one step: `python trace_child.py REQUEST`, a pickled `TraceRequest`.

A process of its own, see `bill.step.tracing`.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    # It runs by its path; this folder, whose names hide others, makes way.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from bill.step.derive import derive_config, find_stack
from bill.step.export import prepare_tracing, trace_step
from bill.step.export_program import trace_program
from bill.step.tracing import StepExport, TraceRequest
from utils.errors import UserError


def main(argv: list[str]) -> int:
    """Answer the request that the file holds."""
    request: TraceRequest = pickle.loads(Path(argv[0]).read_bytes())
    try:
        answer: StepExport | str = trace(request)
    except UserError as error:
        answer = str(error)
    request.answer.write_bytes(pickle.dumps(answer))
    return 0


def trace(request: TraceRequest) -> StepExport:
    """Trace the step of the synthetic run.

    Raises:
      UserError: it cannot be traced.
    """
    is_tpu = find_stack(request.config) == "tpu"
    if not is_tpu:
        prepare_tracing(request.devices)
        import torch_xla  # noqa: F401  before TensorFlow, which derive_config may need

    with tempfile.TemporaryDirectory() as folder:
        derived = derive_config(
            request.config,
            Path(folder),
            batch=request.batch,
            devices=request.devices,
            given=request.given,
        )
        if is_tpu:
            return trace_program(derived, is_automatic=request.is_automatic)
        return trace_step(derived, request.chip, is_automatic=request.is_automatic)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
