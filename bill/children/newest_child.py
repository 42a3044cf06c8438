"""Compiles as compile_child.py does, with jax 0.10 or later: `newest_child.py REQUEST.json`.

That jax reads an artifact into a module and compiles a module, not its bytes. Needs no other file
of this project but that one.
"""

from __future__ import annotations

import sys
from typing import Any

from bill.children import compile_child


def main(argv: list[str]) -> int:
    """Compile what the request names."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    ir.Module.parse = mlir.module_to_bytecode = keep_module
    return compile_child.main(argv)


def keep_module(module: Any) -> Any:
    """Return the module that jax 0.7 would have read, or written, as bytes."""
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
