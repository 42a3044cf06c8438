"""Compiles single matrix products with libtpu: `python matmul_child.py REQUEST.json`.

A process of its own, as `compile_child.py`. Writes `facts.json`: estimated cycles of each product.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

# pyrefly: ignore[missing-import]  # a script's own folder is on its path
from compile_child import SETTINGS, create_options

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def main(argv: list[str]) -> int:
    """Compile every product that the request names."""
    path = Path(argv[0])
    request = json.loads(path.read_text(encoding="utf-8"))
    os.environ.update(SETTINGS)
    os.environ.pop("PJRT_DEVICE", None)
    cycles = compile_products(request["topology"], request["products"])
    (path.parent / "facts.json").write_text(json.dumps({"cycles": cycles}), encoding="utf-8")
    return 0


def compile_products(name: str, products: list[list[int]]) -> list[int]:
    """Estimated cycles of bfloat16 products given as [batch, M, K, N]."""
    from jax.experimental import topologies
    from jax.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir import ir

    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    device = topology.devices[0]
    cycles: list[int] = []
    for sizes in products:
        with mlir.make_ir_context():
            bytecode = mlir.module_to_bytecode(ir.Module.parse(write_product(*sizes)))
        executable: Any = device.client.compile(
            bytecode, _jax.DeviceList((device,)), create_options([device.id])
        )
        text = executable.hlo_modules()[0].to_string()
        cycles.append(sum(int(n) for n in _CYCLES.findall(text[text.index("\nENTRY ") :])))
    return cycles


def write_product(batch: int, rows: int, inner: int, columns: int) -> str:
    """StableHLO of [batch, rows, inner] x [batch, inner, columns]."""
    left, right = f"{batch}x{rows}x{inner}xbf16", f"{batch}x{inner}x{columns}xbf16"
    result = f"{batch}x{rows}x{columns}xbf16"
    return f"""
module @product {{
  func.func public @main(%a: tensor<{left}>, %b: tensor<{right}>) -> tensor<{result}> {{
    %0 = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [2] x [1]
      : (tensor<{left}>, tensor<{right}>) -> tensor<{result}>
    return %0 : tensor<{result}>
  }}
}}
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
