"""Which form has which case: what a form lacks is left out of a grid, or refused before it begins.

A row under a form's name is of that form: what it lacks is never computed by another.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.delta.cases import ATTENTION, LabCase
from models.delta.kernels.backends import BACKENDS
from models.delta.kernels.flash import fits_flash
from utils.errors import UserError

# What the form in JAX is written for.
IN_JAX = ("gdn", "deltanet")
PACKAGES = ("fla", "flash_qla", "flashinfer")
FORMS = ("xla", "pallas", "jax_reference", *PACKAGES)
# Rules -> the name that packages have for their kernel; others have none.
_IN_PACKAGES = {"deltanet": "gdn", "gdn": "gdn", "kda": "kda", "rwkv7": "rwkv7"}


def leave_out(grid: Sequence[tuple[LabCase, str]]) -> tuple[list[tuple[LabCase, str]], str]:
    """Return the cases that their form has, and a line about the others (empty if all are kept).

    Raises:
      UserError: a form has not one of its cases.
    """
    gaps = [find_gap(case, form) for case, form in grid]
    for form in dict.fromkeys(form for _, form in grid):
        own = [gap for gap, (_, other) in zip(gaps, grid, strict=True) if other == form]
        if all(own):
            raise UserError(
                f"--form {form} has none of the cases asked for: {own[0]}; change --variants or "
                "--modes, or leave the form out"
            )
    kept = [case for case, gap in zip(grid, gaps, strict=True) if not gap]
    reasons = dict.fromkeys(
        f"{form}: {gap}" for gap, (_, form) in zip(gaps, grid, strict=True) if gap
    )
    count = len(grid) - len(kept)
    return kept, f"left out {count} of {len(grid)} cases; {'; '.join(reasons)}" if count else ""


def find_gap(case: LabCase, form: str) -> str:
    """Why a form has no such case; empty: it has."""
    is_step, is_attention = case.mode == "decode", case.variant == ATTENTION
    if form == "jax_reference" and (is_step or case.variant not in IN_JAX):
        return f"it knows {' and '.join(IN_JAX)}, forward and both"
    if form == "pallas" and is_attention:
        return _find_gap_of_flash(case)
    if form in PACKAGES:
        return _find_gap_of_package(case, form)
    return ""


def _find_gap_of_flash(case: LabCase) -> str:
    if case.mode == "decode":
        return "it has no kernel for a step of attention"
    if not fits_flash(case.width):
        return f"its attention has heads of up to 128 or of multiples of it, not {case.width}"
    return ""


def _find_gap_of_package(case: LabCase, form: str) -> str:
    if case.mode == "decode":
        return "it has no kernel for a step of decoding here"
    if _IN_PACKAGES.get(case.variant) not in BACKENDS[form].rules:
        known = [package for package, name in _IN_PACKAGES.items() if name in BACKENDS[form].rules]
        return f"it has kernels of {', '.join(known)} here"
    if form == "flashinfer" and case.mode == "both":
        return "it has no gradients"
    return ""
