"""A compiler of a test's own: it executes each graph node by node, and counts what it meets."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import register_backend
from torch.fx import GraphModule, Interpreter, Node

COUNTS = "COUNTING_BACKEND"  # environment: the file of the counts
COUNTED: Counter[str] = Counter()  # over all graphs of the process


class _Counting(Interpreter):
    """Runs the nodes in order; counts operations, and results by their layout."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module"):
            COUNTED[f"op {n.target if isinstance(n.target, str) else n.target.__name__}"] += 1
        if isinstance(result, Tensor) and result.ndim == 4:
            last = torch.channels_last
            is_last = result.is_contiguous(memory_format=last) and not result.is_contiguous()
            COUNTED["layout channels_last" if is_last else "layout contiguous"] += 1
        return result


@register_backend(name="counting")
def compile_counting(
    graph: GraphModule, inputs: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    COUNTED["graphs"] += 1
    interpreter = _Counting(graph)

    def run(*values: Tensor) -> Sequence[Tensor]:
        COUNTED["calls"] += 1
        result = interpreter.run(*values)
        if path := os.environ.get(COUNTS):
            Path(path).write_text(json.dumps(COUNTED))
        return result

    return run
