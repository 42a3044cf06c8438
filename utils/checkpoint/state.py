"""A train state as plain host tensors and facts, and back; weights alone into a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from utils.checkpoint.files import Location, Tensors
from utils.errors import UserError
from utils.log import get_logger

_NAMED = 8  # names in an error's one line; the log has them all


@dataclass(frozen=True)
class TensorDiff:
    """What keeps tensors by name from fitting a model's own.

    Attributes:
      missing: names that the model has and the checkpoint has not.
      unexpected: names that only the checkpoint has.
      different: name -> shape and dtype found, and those wanted.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: dict[str, str]

    def __len__(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.different)

    def lines(self) -> list[str]:
        """One line for each tensor."""
        out = [f"missing: {name}" for name in self.missing]
        out += [f"unexpected: {name}" for name in self.unexpected]
        return out + [f"different: {name} {words}" for name, words in self.different.items()]

    def summary(self) -> str:
        """Counts, and the first names of each kind."""
        different = [f"{name} {words}" for name, words in self.different.items()]
        kinds = (
            ("missing", self.missing), ("unexpected", self.unexpected), ("different", different),
        )  # fmt: skip
        out = []
        for word, names in kinds:
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                out.append(f"{len(names)} {word}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(out)


def compare_tensors(own: Mapping[str, Any], found: Mapping[str, Any]) -> TensorDiff:
    """How tensors, or [shape, dtype, ...] entries of a table, by name differ from a model's own."""
    own_kinds = {name: _get_kind(value) for name, value in own.items()}
    found_kinds = {name: _get_kind(value) for name, value in found.items()}
    return TensorDiff(
        missing=tuple(name for name in own_kinds if name not in found_kinds),
        unexpected=tuple(name for name in found_kinds if name not in own_kinds),
        different={
            name: "{} {} instead of {} {}".format(*found_kinds[name], *kind)
            for name, kind in own_kinds.items()
            if name in found_kinds and found_kinds[name] != kind
        },
    )


def collect_state(
    state: Any, fetch_all: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by part and name, and facts, of a train state, as host tensors.

    Args:
      state: has model, ema, loss_modules, optimizer, scaler, step, best_score and the like.
      fetch_all: dict of device tensors -> dict of host tensors, in one read.
    """
    flat = {f"model/{k}": v for k, v in state.model.state_dict().items()}
    flat |= {f"extra/{k}": v for k, v in state.loss_modules.state_dict().items()}
    if state.ema is not None:
        flat |= {f"ema/{k}": v for k, v in state.ema.state_dict().items()}
    tensors, scalars = _flatten_optimizer(state)
    flat |= {f"optimizer/{k}": v for k, v in tensors.items()}
    parts: Tensors = {}
    for key, value in fetch_all(flat).items():
        part, _, name = key.partition("/")
        parts.setdefault(part, {})[name] = value
    facts = {
        "step": state.step,
        "best_metric": state.best_score,
        "input_processes": state.input_processes,
        "skipped_steps": list(state.skipped_steps),
        "optimizer": scalars,
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
    }
    return parts, facts


@torch.no_grad()
def copy_tensors(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Host tensors into those of a state, by name and in place."""
    for name, value in own.items():
        value.copy_(found[name])


def restore_state(
    state: Any,
    parts: Tensors,
    facts: Mapping[str, Any],
    location: Location,
    load: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None] = copy_tensors,
) -> None:
    """Copy a checkpoint into a train state in place: all of it or nothing.

    Args:
      load: copies host tensors into placed ones by name, as the device wants it.

    Raises:
      UserError: the checkpoint is of another model, optimizer or EMA setting; names what differs.
    """
    modules = {"model": state.model, "extra": state.loss_modules, "ema": state.ema}
    own: Tensors = {
        part: {} if module is None else module.state_dict() for part, module in modules.items()
    }
    own["optimizer"], _ = _flatten_optimizer(state)
    _check_fit(own, parts, location)
    for part, tensors in own.items():
        load(tensors, parts.get(part, {}))
    _restore_scalars(state, facts["optimizer"])
    if state.scaler is not None and facts.get("scaler"):
        state.scaler.load_state_dict(facts["scaler"])
    state.step, state.best_score = facts["step"], facts["best_metric"]
    state.input_processes = facts.get("input_processes", 0)
    state.skipped_steps = tuple(facts.get("skipped_steps", ()))


def init_weights(model: nn.Module, weights: Mapping[str, Tensor], location: Location) -> TensorDiff:
    """Copy the weights that fit into a model; what does not keeps its start, and is logged."""
    own = model.state_dict()
    diff = compare_tensors(own, weights)
    for line in diff.lines():
        get_logger().info("run.init_from: %s", line)
    fitting = [n for n in own if n in weights and n not in diff.different]
    copy_tensors({name: own[name] for name in fitting}, weights)
    get_logger().info("%d of %d tensors start from %s", len(fitting), len(own), location)
    return diff


def check_init(
    own: Mapping[str, Tensor], found: Mapping[str, Any], location: Location, tolerance: float
) -> None:
    """Refuse weights of which too large a share does not fit.

    Raises:
      UserError: what does not fit exceeds `tolerance` times the model's tensors.
    """
    diff = compare_tensors(own, found)
    if len(diff) > tolerance * len(own):
        for line in diff.lines():
            get_logger().error("run.init_from: %s", line)
        raise UserError(
            f"run.init_from ({str(location)!r}) does not fit the model: {diff.summary()}; that is "
            f"more than run.init_tolerance ({tolerance:g}) of its {len(own)} tensors: choose "
            "weights of this model, or raise run.init_tolerance"
        )


def _get_kind(value: Any) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a tensor or of a table's entry."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype).removeprefix("torch.")
    return tuple(value[0]), value[1]


def _check_fit(own: Tensors, found: Tensors, location: Location) -> None:
    diffs = {part: compare_tensors(own[part], found.get(part, {})) for part in own}
    wrong = {part: diff for part, diff in diffs.items() if len(diff)}
    if not wrong:
        return
    for part, diff in wrong.items():
        for line in diff.lines():
            get_logger().error("%s: %s", part, line)
    faults = "; ".join(f"{part}: {diff.summary()}" for part, diff in wrong.items())
    raise UserError(
        f"checkpoint {location} does not fit this run's {' and '.join(wrong)}: {faults}; resume "
        "with the configuration that wrote it"
    )


def _names_of(state: Any) -> dict[nn.Parameter, str]:
    names = {p: name for name, p in state.model.named_parameters()}
    return names | {p: f"extra.{name}" for name, p in state.loss_modules.named_parameters()}


def _file_orders_of(state: Any) -> dict[str, tuple[int, ...]]:
    """Axes of the parameters that lie in another order on the device than in a file."""
    modules = state.model.named_modules()
    return {f"{n}.weight": m.file_order for n, m in modules if hasattr(m, "file_order")}


def _flatten_optimizer(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name, and its plain numbers."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    names, orders = _names_of(state), _file_orders_of(state)
    for parameter, values in state.optimizer.state.items():
        for key, value in values.items():
            name = f"{names[parameter]}|{key}"
            if isinstance(value, Tensor):
                order = orders.get(names[parameter]) if value.shape == parameter.shape else None
                tensors[name] = value if order is None else value.permute(order)
            elif value is None or isinstance(value, int | float | bool):
                scalars[name] = value
    for index, group in enumerate(state.optimizer.param_groups):
        if isinstance(group.get("step"), Tensor):
            tensors[f"group{index}|step"] = group["step"]
        elif "step" in group:
            scalars[f"group{index}|step"] = group["step"]
    return tensors, scalars


def _restore_scalars(state: Any, scalars: Mapping[str, Any]) -> None:
    parameters = {name: p for p, name in _names_of(state).items()}
    for name, value in scalars.items():
        owner, _, key = name.partition("|")
        if owner in parameters:
            state.optimizer.state[parameters[owner]][key] = value
        else:
            state.optimizer.param_groups[int(owner.removeprefix("group"))][key] = value
