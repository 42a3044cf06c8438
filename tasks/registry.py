"""The names that `train.task` may have."""

from __future__ import annotations

from utils.registry import Registry

TASKS = Registry("train.task")
