"""A device that the project does not know: PyTorch's PrivateUse1, added by `run.imports`."""

from __future__ import annotations

from utils.config.devices import DEVICES, DeviceInfo

NAME = "private"
DEVICES[NAME] = DeviceInfo(
    runtime="tests.support.private_device.runtime:PrivateRuntime",
    start="tests.support.private_device.runtime:PrivateStart",
    compilers=("eager",),
    modes=("native", "dynamo"),
)
