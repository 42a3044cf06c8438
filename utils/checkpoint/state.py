"""Converts a train state to plain host tensors and facts, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from utils.checkpoint.files import Location, StateFacts, Tensors
from utils.checkpoint.fit import compare_tensors
from utils.endings import Stagnation
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.runtime.processes.shards import copy_whole


class TrainStateLike(Protocol):
    """The state in a checkpoint; `engine.TrainState`, which this room must not import."""

    model: nn.Module
    loss_modules: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    step: int
    best_score: float | None
    waited: Stagnation
    input_processes: int
    skipped_steps: tuple[int, ...]
    averages: dict[str, nn.Module]


def collect_state(
    state: TrainStateLike, fetch_all: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> tuple[Tensors, StateFacts]:
    """Return host tensors by part and name, and facts; `fetch_all` reads all tensors at once."""
    flat = {f"model/{k}": v for k, v in state.model.state_dict().items()}
    flat |= {f"extra/{k}": v for k, v in state.loss_modules.state_dict().items()}
    for part, average in state.averages.items():
        flat |= {f"{part}/{k}": v for k, v in average.state_dict().items()}
    tensors, scalars = _flatten_optimizer(state)
    flat |= {f"optimizer/{k}": v for k, v in tensors.items()}
    parts: Tensors = {}
    for key, value in fetch_all(flat).items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = value
    return parts, StateFacts(
        step=state.step,
        best_metric=state.best_score,
        waited=state.waited,
        input_processes=state.input_processes,
        skipped_steps=state.skipped_steps,
        optimizer=scalars,
        scaler=None if state.scaler is None else state.scaler.state_dict(),
    )


def restore_state(
    state: TrainStateLike, parts: Tensors, facts: StateFacts, location: Location
) -> None:
    """Copy a checkpoint into a train state, all or nothing; a UserError if it does not fit."""
    modules = {"model": state.model, "extra": state.loss_modules, **state.averages}
    own: Tensors = {part: module.state_dict() for part, module in modules.items()}
    own |= {part: {} for part in parts if part.startswith("ema") and part not in own}
    own["optimizer"], _ = _flatten_optimizer(state)
    diffs = {part: compare_tensors(own[part], parts.get(part, {})) for part in own}
    if wrong := {part: diff for part, diff in diffs.items() if len(diff)}:
        faults = "; ".join(f"{part}: {diff.summary()}" for part, diff in wrong.items())
        raise UserError(
            f"checkpoint {location} does not fit this run's {' and '.join(wrong)}: {faults}; "
            "resume with the configuration that wrote it"
        )
    # XLA shares one scalar among equal ones and compiles 0 and 1 as constants; an element of a
    # vector is separate data, as it will be after the next step.
    with torch.no_grad():
        for part, tensors in own.items():
            for name, value in tensors.items():
                host = parts[part][name]
                copy_whole(value, host.reshape(1).to(value.device)[0] if value.ndim == 0 else host)
    parameters = {name: p for p, name in _names_of(state).items()}
    for name, value in facts.optimizer.items():
        owner, _, key = name.partition("|")
        if owner in parameters:
            state.optimizer.state[parameters[owner]][key] = value
        else:
            state.optimizer.param_groups[int(owner.removeprefix("group"))][key] = value
    if state.scaler is not None and facts.scaler:
        state.scaler.load_state_dict(facts.scaler)
    state.step, state.best_score, state.waited = facts.step, facts.best_metric, facts.waited
    state.input_processes, state.skipped_steps = facts.input_processes, facts.skipped_steps


def _names_of(state: TrainStateLike) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {p: name for name, p in state.model.named_parameters()}
    return names | {p: f"extra.{name}" for name, p in state.loss_modules.named_parameters()}


def _flatten_optimizer(state: TrainStateLike) -> tuple[dict[str, Tensor], JsonObject]:
    """Return an optimizer's state as tensors by name, and its plain numbers."""
    tensors: dict[str, Tensor] = {}
    scalars: JsonObject = {}
    names = _names_of(state)
    modules = [*state.model.named_modules(), *state.loss_modules.named_modules(prefix="extra")]
    # Axes of parameters that are stored in another order on the device than in a file.
    orders: dict[str, Sequence[int]] = {
        f"{n}.weight": order for n, m in modules if (order := getattr(m, "file_order", None))
    }
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            name = f"{names[parameter]}|{key}"
            if isinstance(value, Tensor):
                order = orders.get(names[parameter]) if value.shape == parameter.shape else None
                tensors[name] = value if order is None else value.permute(*order)
            elif value is None or isinstance(value, int | float | bool):
                scalars[name] = value
    for index, group in enumerate(state.optimizer.param_groups):
        if isinstance(group.get("step"), Tensor):
            tensors[f"group{index}|step"] = group["step"]
        elif "step" in group:
            scalars[f"group{index}|step"] = group["step"]
    return tensors, scalars
