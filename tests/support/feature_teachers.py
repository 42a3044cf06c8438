"""Feature teachers of random weights, as a user has them: exports without a classifier."""

from __future__ import annotations

from pathlib import Path

import torch

from models.factory import build_model, export_model


def write_feature_teacher(folder: Path, name: str, args: dict, *, seed: int) -> dict[str, str]:
    """Export a model of timm; gives its section of `distill.teachers`."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    facts = {"model": name, "args": args, "num_classes": 0, "mean": [127.5], "std": [127.5]}
    tensors = build_model(name, {**args, "num_classes": 0}).state_dict()
    export_model(tensors, facts, folder)
    return {"weights": str(folder)}
