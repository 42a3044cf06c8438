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
    compile_child._add_donations = read_module
    return compile_child.main(argv)


def read_module(artifact: bytes, donations: dict[str, int]) -> Any:
    """Read the module and set its arguments' aliases."""
    from jax.extend.mlir import deserialize_portable_artifact
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        module = deserialize_portable_artifact(artifact)
        main = next(op for op in module.body.operations if op.name.value == "main")
        integer = ir.IntegerType.get_signless(32)
        attributes = []
        for index, old in enumerate(main.arg_attrs):
            entries = {named.name: named.attr for named in old}
            if str(index) in donations:
                result = ir.IntegerAttr.get(integer, donations[str(index)])
                entries["tf.aliasing_output"] = result
            attributes.append(ir.DictAttr.get(entries))
        main.arg_attrs = ir.ArrayAttr.get(attributes)
        return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
