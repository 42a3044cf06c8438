"""Compiles one StableHLO artifact with libtpu: `python compile_child.py REQUEST.json`.

A process of its own, because libtpu may abort it. Needs jax and libtpu and neither PyTorch nor any
other file of this project. Writes `program.hlo` and `facts.json` beside the request, and where it
names a folder `bundles`, a listing of each operation's there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# What makes libtpu write the bundles of every operation, as it issues them.
DUMP = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
)
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
}


def main(argv: list[str]) -> int:
    """Compile what the request names."""
    path = Path(argv[0])
    request = json.loads(path.read_text(encoding="utf-8"))
    os.environ.update(SETTINGS)
    os.environ.pop("PJRT_DEVICE", None)
    if request.get("bundles"):
        os.environ["LIBTPU_INIT_ARGS"] = DUMP.format(request["bundles"])
    began = time.perf_counter()
    facts = compile_artifact(request, path.parent)
    facts["compile_s"] = time.perf_counter() - began
    (path.parent / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return 0


def compile_artifact(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile for a topology that is not there.

    Args:
      request: `artifact` (a file), `donations` (argument -> result), `topology` (v5e:2x2x1),
        `devices` (that the program is partitioned over).
    """
    import jax
    import jaxlib
    from jax.experimental import topologies
    from jaxlib import _jax

    topology = topologies.get_topology_desc(platform="tpu", topology_name=request["topology"])
    devices = topology.devices[: request["devices"]]
    bytecode = _add_donations(Path(request["artifact"]).read_bytes(), request["donations"])
    client = topology.devices[0].client
    options = create_options([device.id for device in devices])
    executable = client.compile(bytecode, _jax.DeviceList(tuple(devices)), options)
    (folder / "program.hlo").write_text(executable.hlo_modules()[0].to_string(), encoding="utf-8")
    memory = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "topology_devices": len(topology.devices),
        "device_kind": topology.devices[0].device_kind,
        "memory": {
            name: getattr(memory, name)
            for name in dir(memory)
            if name.endswith("_in_bytes") or name == "peak_memory_in_bytes"
        },
        "cost": {key: float(cost[key]) for key in ("flops", "bytes accessed") if key in cost},
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
    }


def _add_donations(artifact: bytes, donations: dict[str, int]) -> bytes:
    """The module's bytecode with its arguments' aliases set."""
    from jax.extend.mlir import deserialize_portable_artifact
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        module = ir.Module.parse(deserialize_portable_artifact(artifact))
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
        return mlir.module_to_bytecode(module)


def create_options(device_ids: list[int]) -> Any:
    """One program for one device, or one program partitioned over several."""
    import numpy as np
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(device_ids)
    build = options.executable_build_options
    build.use_spmd_partitioning = len(device_ids) > 1
    build.use_shardy_partitioner = False
    assignment = np.array([device_ids], dtype=np.int64)
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
