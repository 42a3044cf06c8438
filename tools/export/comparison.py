"""Answers to the same images here and from what was handed over: how far are they apart?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from utils.errors import UserError
from utils.json_types import JsonObject


def compare(
    wanted: np.ndarray, parts: Sequence[np.ndarray], bound: float, *, are_classes: bool = True
) -> JsonObject:
    """How far answers are from those that are wanted, [N, K]; null: they are not finite.

    Args:
      are_classes: one of the answers to an image is its top-1; features have none.
    """
    found = np.concatenate(parts)[: len(wanted)]
    if found.shape != wanted.shape:
        raise UserError(f"--to gives answers of shape {found.shape}, not {wanted.shape}")
    distance = np.abs(found.astype(np.float64) - wanted)
    is_finite = bool(np.isfinite(distance).all())
    return {
        "max_difference": float(distance.max()) if is_finite else None,
        "mean_difference": float(distance.mean()) if is_finite else None,
        **({"top1_agreement": _agree(found, wanted)} if are_classes else {}),
        "within": is_finite and float(distance.max()) <= bound,
    }


def _agree(found: np.ndarray, wanted: np.ndarray) -> float:
    return float((found.argmax(axis=1) == wanted.argmax(axis=1)).mean())


def show(found: JsonObject, bound: float) -> str:
    """The same for a person."""
    if found["max_difference"] is None:
        return "answers that are not finite: BEYOND every bound"
    verdict = "within" if found["within"] else "BEYOND"
    same = f", top-1 agrees on {found['top1_agreement']:.1%}" if "top1_agreement" in found else ""
    return (
        f"max difference {found['max_difference']:.2e}, mean {found['mean_difference']:.2e}"
        f"{same}: {verdict} {bound:g}"
    )
