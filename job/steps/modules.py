"""Names of the modules that a step calls, for what is measured or found in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from job.build import Parts

STUDENT = "student"


def list_models(parts: Parts) -> dict[str, nn.Module]:
    """Return the models of a step by role: student, teacher, teacher1 and so on."""
    models = {STUDENT: parts.state.model}
    for number, teacher in enumerate(getattr(parts.task, "teachers", ())):
        models[f"teacher{number or ''}"] = getattr(teacher, "model", teacher)
    return models


def name_modules(parts: Parts) -> dict[nn.Module, str]:
    """Return the name of each module: a path for the student's, `teacher:PATH` for others."""
    names: dict[nn.Module, str] = {}
    roots = {**list_models(parts), "loss": parts.state.loss_modules}
    for role, root in roots.items():
        for path, module in root.named_modules():
            names.setdefault(module, path if path and role == STUDENT else f"{role}:{path}")
    return names
