"""On a mesh examples and large weights are sharded; per-step values are replicated."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.child_runs import ROOT, get_environment

_PROGRAM = """
import json
from dataclasses import replace

import torch

from tests.support.tiny_parts import (create_batch)
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime

runtime = create_runtime(RuntimeSection(device="xla", parallel="spmd", mesh_fsdp=2))
values = {"scales": torch.tensor([0.5, 2.0, 3.0])}
host = replace(create_batch(16), values=values)
batch = runtime.to_device(replace(host, draws={"box": torch.arange(64.0).view(16, 4)}))
specs = {}
import torch_xla
for name, tensor in {"images": batch.images, **batch.draws, **batch.values}.items():
    specs[name] = torch_xla._XLAC._get_xla_sharding_spec(tensor)
layer = runtime.prepare(torch.nn.Linear(6, 8))
optimizer = torch.optim.AdamW(layer.parameters(), **runtime.updates.get_arguments("adamw"))
runtime.updates.prepare(optimizer)
moments = optimizer.state[layer.weight]
for name, tensor in {**dict(layer.named_parameters()), "moment": moments["exp_avg"]}.items():
    specs[name] = torch_xla._XLAC._get_xla_sharding_spec(tensor)
parts = runtime.split(batch, 2)
found = {
    "specs": specs,
    "mesh": runtime.describe()["mesh"],
    "indices": [part.indices.cpu().tolist() for part in parts],
    "scales": [part.values["scales"].cpu().tolist() for part in parts],
    "is_last": [part.is_last for part in parts],
}
print(json.dumps(found))
"""


@pytest.mark.xla
def test_examples_and_matrices_are_sharded_and_values_replicated():
    environment = get_environment() | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    specs = found["specs"]
    assert specs["scales"] == "{replicated}"
    assert all("devices=[4,1" in specs[name] for name in ("images", "box"))
    assert found["mesh"] == {"data": 2, "fsdp": 2}
    # Largest dimension in two along fsdp, the same again along data; moments as their weights.
    assert specs["weight"] == specs["moment"] == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert specs["bias"] == "{replicated}"
    # Each of the 4 devices holds 4 examples and gives 2 of them to either micro-batch.
    first = [row for block in range(4) for row in (4 * block, 4 * block + 1)]
    assert found["indices"] == [first, [row + 2 for row in first]]
    assert found["scales"] == [[0.5, 2.0, 3.0]] * 2
    assert found["is_last"] == [False, True]
