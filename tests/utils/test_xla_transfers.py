"""Batches that a thread moves to the device do not enter the graph of the loop."""

from __future__ import annotations

import collections
import threading

import pytest
import torch

from tests.support.tiny_parts import create_xla_runtime

pytestmark = pytest.mark.xla


def test_transfers_in_a_thread_never_add_a_graph():
    """With `tensor.to` one step in some thousand saw a half-made tensor and compiled again."""
    runtime = create_xla_runtime()
    hosts = [
        torch.ones(64, dtype=torch.bool),
        torch.ones(64, dtype=torch.int32),
        torch.zeros(64, 8, 8, 1, dtype=torch.uint8),
    ]
    stopped = threading.Event()

    def feed() -> None:
        kept: collections.deque = collections.deque(maxlen=4)
        while not stopped.is_set():
            kept.extend(runtime.tensor_to_device(host) for host in hosts)

    weights = runtime.tensor_to_device(torch.randn(64, 64))
    for _ in range(3):
        weights = (weights @ weights).tanh() * 0.1 + 0.3
        runtime.finish_step()
    before = runtime.counters()["graphs"]
    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    for _ in range(2000):
        weights = (weights @ weights).tanh() * 0.1 + 0.3
        runtime.finish_step()
    stopped.set()
    thread.join()
    assert runtime.counters()["graphs"] == before
    assert runtime.tensor_to_device(hosts[2]).cpu().equal(hosts[2])
