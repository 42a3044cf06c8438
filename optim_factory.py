"""Optimizers by timm name with decay and no-decay groups, and the schedules of their values."""

from __future__ import annotations

import contextlib
import inspect
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from timm.optim import (
    create_optimizer_v2,
    get_optimizer_class,
    list_optimizers,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.optim.muon import Muon
from torch import nn

from utils.config.checks import check_warmup
from utils.config.load import change
from utils.config.sections import SCHEDULE_NAMES
from utils.endings import Plateau
from utils.errors import UserError, get_hint
from utils.json_types import JsonMapping, JsonObject
from utils.log import get_logger
from utils.patterns import check_patterns, get_first_match
from utils.registry import Registry
from utils.runtime.axes import mark_file_orders
from utils.runtime.graph_updates import FACTOR_DECAYS, LEAST_PRODUCT

if TYPE_CHECKING:
    from utils.config.sections import OptimSection, RunConfig

# Proven on XLA: one graph from step 0 (lamb and adafactor: from step 1, their first step's numbers
# are special), no host read, and the same values with the state made beforehand as without.
PROVEN = (
    "adamw", "sgd", "lamb", "lion", "adafactor", "nadamw", "cadamw", "cnadamw", "adamc", "nadamc",
    "muon", "nmuon", "adamuon", "nadamuon",
)  # fmt: skip
# State that is zero before step 0, so that it may be made beforehand (compared eagerly over five
# steps with momentum and weight decay).
# Of parameters, as torch and timm have it: `params`, and numbers and switches by name.
Group = dict[str, Any]
PREPARABLE = (
    *PROVEN, "adam", "sgdw", "lars", "adafactorbv", "adabelief", "mars", "adan",
)  # fmt: skip
# Name -> factory of learning rates after the warm-up, with the arguments of `create_shape`.
SCHEDULES: Registry[Callable[[OptimSection, int, int, int], Callable[[int], float]]] = Registry(
    "optim.schedule",
    dict.fromkeys(SCHEDULE_NAMES, "optim_factory:create_shape"),
)
# Optimizers that cannot run on XLA, and why.
REFUSED = {
    "kron": "it compiles its own maths with torch.compile, which has no XLA backend here",
    "lookahead": "it is a wrapper; name the inner optimizer",
}
# Tokens and tables: no matrices of a linear map, whatever their number of dimensions.
_NO_DECAY_PATTERNS = (
    "*pos_embed*", "*cls_token", "*dist_token", "*reg_token", "*mask_token",
    "*relative_position_bias_table", "*.gamma", "*.ls1.*", "*.ls2.*",
)  # fmt: skip


def create_optimizer(
    section: OptimSection,
    model: nn.Module,
    *,
    loss_modules: nn.Module | None = None,
    device_arguments: JsonMapping | None = None,
) -> torch.optim.Optimizer:
    """Create a timm optimizer over decay and no-decay groups.

    Biases, norms, one-dimensional parameters, positional and class tokens have no weight decay.
    Each group carries `lr_scale` (of layer decay and of the parameters' pattern, else 1), `decays`
    and, if it begins to move later, `starts_epoch`. `loss_modules` are trainable modules of the
    losses, such as projections: decay, no layer decay. UserError for an unknown or refused
    optimizer, or arguments that it does not take.
    """
    name = section.name.lower()
    check_optimizer_name(name)
    groups = divide_groups(section, model, get_parameter_groups(section, model))
    if loss_modules is not None and any(p.requires_grad for p in loss_modules.parameters()):
        groups += param_groups_weight_decay(loss_modules, _get_first_decay(section))
    for group in groups:
        group.setdefault("lr_scale", 1.0)
        group["decays"] = group["weight_decay"] > 0
    arguments: JsonObject = {**(device_arguments or {}), **section.args}
    if section.betas is not None:
        arguments["betas"] = tuple(section.betas)
    if section.eps is not None:
        arguments["eps"] = section.eps
    try:
        if section.betas is not None:
            _check_betas(name, section.betas)
        if section.args:
            _try_muon(name, section.args)
        mark_file_orders(model)
        return create_optimizer_v2(
            groups,
            opt=name,
            lr=section.lr,
            weight_decay=section.weight_decay,
            momentum=section.momentum,
            **arguments,
        )
    except (AssertionError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"optim.name {name!r} refuses its arguments: {error}; change optim.args, "
            "optim.momentum, optim.betas or optim.eps"
        ) from error


def scale_lr(config: RunConfig) -> OptimSection:
    """Return the section with the learning rate of this batch, if optim.base_lr is given.

    sqrt suits optimizers that divide by the gradients' size: twice the batch, 1.41 of the rate.
    UserError if optim.lr is given, too, or the resulting rate is below optim.min_lr.
    """
    section, batch = config.optim, config.data.global_batch_size
    if section.base_lr is None:
        return section
    if section.lr != type(section).model_fields["lr"].default:
        raise UserError(
            f"optim.lr ({section.lr:g}) and optim.base_lr ({section.base_lr:g}) are both set; "
            "remove one of them"
        )
    ratio = batch / section.base_batch_size
    rule = section.lr_scaling
    if rule == "auto":
        is_adaptive = any(part in section.name.lower() for part in ("ada", "lamb"))
        rule = "sqrt" if is_adaptive else "linear"
    lr = section.base_lr * (ratio**0.5 if rule == "sqrt" else ratio)
    if section.min_lr > lr:
        raise UserError(
            f"optim.base_lr ({section.base_lr:g}) gives a learning rate of {lr:.4g} for batches of "
            f"{batch}, below optim.min_lr ({section.min_lr:g}); raise it or lower min_lr"
        )
    return change(config, optim={"lr": lr}).optim


def _check_betas(name: str, betas: tuple[float, ...]) -> None:
    """Refuse another number of betas than the optimizer has; it would fail at its first step."""
    kind = get_optimizer_class(name, bind_defaults=False)
    known = inspect.signature(kind).parameters.get("betas")
    if known is None:
        raise UserError(f"optim.betas: {name!r} has no betas; remove the key")
    if known.default is not None and len(betas) != len(known.default):
        raise UserError(
            f"optim.betas ({list(betas)}): {name!r} has {len(known.default)} of them, by default "
            f"{list(known.default)}; give as many"
        )


def _try_muon(name: str, arguments: JsonMapping) -> None:
    """Try a step on a small matrix: the Muon family checks its arguments no sooner."""
    kind = get_optimizer_class(name, bind_defaults=False)
    if isinstance(kind, type) and issubclass(kind, Muon):
        weight = nn.Parameter(torch.eye(8))
        weight.grad = torch.eye(8)
        create_optimizer_v2([{"params": [weight]}], opt=name, lr=0.1, **arguments).step()


def check_optimizer_name(name: str) -> None:
    """Refuse an unknown or unusable optimizer; warn about an unproven one."""
    name = name.lower()
    if name in REFUSED:
        raise UserError(f"optim.name {name!r} is refused: {REFUSED[name]}")
    known = [str(known) for known in list_optimizers()]
    if name not in known:
        raise UserError(f"unknown optim.name {name!r}; {get_hint(name, known)}")
    if name not in PROVEN:
        text = "optim.name %s is not proven on XLA (%s are); the graph budget decides"
        get_logger().warning(text, name, ", ".join(PROVEN))


def list_head(model: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters of a model's classifier; empty unless the model declares one."""
    get_classifier: Any = getattr(model, "get_classifier", tuple)
    head = get_classifier()
    heads = head if isinstance(head, tuple) else (head,)
    return tuple(p for part in heads if isinstance(part, nn.Module) for p in part.parameters())


def get_parameter_groups(section: OptimSection, model: nn.Module) -> list[Group]:
    """Return parameter groups of a model, with layer decay if set."""
    list_own: Any = getattr(model, "no_weight_decay", tuple)
    patterns = (*sorted(set(list_own())), *_NO_DECAY_PATTERNS)
    weight_decay = _get_first_decay(section)
    if section.layer_decay is None:
        return param_groups_weight_decay(model, weight_decay, no_weight_decay_list=patterns)
    if not hasattr(model, "group_matcher"):
        raise UserError(
            f"optim.layer_decay ({section.layer_decay}) needs a model that names its layers "
            f"(group_matcher); {type(model).__name__} does not; set it to none"
        )
    return param_groups_layer_decay(
        model, weight_decay, no_weight_decay_list=patterns, layer_decay=section.layer_decay
    )


def divide_groups(section: OptimSection, model: nn.Module, groups: list[Group]) -> list[Group]:
    """Divide groups by the section's patterns of trained parameters, in the same order."""
    rules = {name: getattr(section, name) for name in ("lr_factors", "decay_factors", "unfreeze")}
    if not any(rules.values()):
        return groups
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    for key, patterns in rules.items():
        check_patterns(f"optim.{key}", tuple(patterns), names.values())
    divided: list[Group] = []
    for group in groups:
        parts: dict[tuple[float, float, float], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            lr, decay, start = (
                get_first_match(names[parameter], patterns, default)
                for patterns, default in zip(rules.values(), (1.0, 1.0, 0.0), strict=True)
            )
            key = lr, decay if group["weight_decay"] else 1.0, start
            parts.setdefault(key, []).append(parameter)
        for (lr, decay, start), parameters in parts.items():
            scale = group.get("lr_scale", 1.0) * lr
            part = {**group, "params": parameters, "lr_scale": scale, "starts_epoch": start}
            part |= {"weight_decay": group["weight_decay"] * decay, "decay_scale": decay}
            divided.append(part)
    return divided


def _get_first_decay(section: OptimSection) -> float:
    """Return a weight decay that shows which groups decay, also if the schedule begins at zero."""
    return section.weight_decay or section.weight_decay_end or 0.0


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay as functions of the step alone."""

    lr_at: Callable[[int], float]  # step -> learning rate of a group with lr_scale 1
    decay_at: Callable[[int], float]  # step -> weight decay of the groups that decay
    total_steps: int
    lr_floor: float = 1e-12  # smallest learning rate handed to the optimizer
    steps_per_epoch: int = 1  # by which groups that begin later count
    cut: float = 1.0  # factor for each time that the score no longer rose
    least: float = 0.0  # learning rate that cuts do not go below

    def get_lr(self, step: int, cuts: int = 0) -> float:
        """Return the learning rate of a step after that many cuts."""
        lr = self.lr_at(step)
        return max(lr * self.cut**cuts, min(lr, self.least)) if cuts else lr

    def values(
        self, step: int, optimizer: torch.optim.Optimizer, cuts: int = 0
    ) -> tuple[list[float], list[float]]:
        """Return learning rates and weight decays of all groups at a step, in group order."""
        lr, decay = self.get_lr(step, cuts), self.decay_at(step)
        groups = optimizer.param_groups
        begun = [step >= g.get("starts_epoch", 0) * self.steps_per_epoch for g in groups]
        scales = [g["lr_scale"] * has_begun for g, has_begun in zip(groups, begun, strict=True)]
        decays = [decay * g.get("decay_scale", 1.0) if g["decays"] else 0.0 for g in groups]
        return [max(lr * scale, self.lr_floor) for scale in scales], decays


def create_schedule(section: OptimSection, *, total_steps: int, steps_per_epoch: int) -> Schedule:
    """Create the schedule of a run; it moves once per optimizer step.

    Warm-up is linear from `warmup_lr` at step 0 to `lr` at the step after it; the shape then runs
    over the remaining steps, or with `warmup_inside` has run over all of them. Its end, `min_lr`,
    and that of the weight decay belong to the step after the last one: n steps are n equal parts of
    the way, and the last one is not wasted. UserError for a warm-up longer than the run, or one
    that leaves the cooldown no room.
    """
    warmup = get_warmup_steps(section, steps_per_epoch)
    check_warmup(warmup, total_steps)
    create = SCHEDULES.get(section.schedule)
    shape = create(section, warmup, total_steps, steps_per_epoch)

    def lr_at(step: int) -> float:
        if step < warmup:
            return section.warmup_lr + (section.lr - section.warmup_lr) * step / warmup
        return shape(step)

    def decay_at(step: int) -> float:
        if section.weight_decay_end is None:
            return section.weight_decay
        progress = min(step / max(total_steps, 1), 1.0)
        return _cosine(section.weight_decay, section.weight_decay_end, progress)

    return Schedule(
        lr_at,
        decay_at,
        total_steps,
        steps_per_epoch=steps_per_epoch,
        cut=section.decay_rate,
        least=section.min_lr,
    )


def check_unfreeze(section: OptimSection) -> None:
    """Refuse `optim.unfreeze` if a step always decays weights, if only by a rounding.

    Only on devices that bake numbers into their graphs: elsewhere a rate of 0 changes nothing.
    """
    name = section.name.lower()
    kind: Any = get_optimizer_class(name, bind_defaults=False)
    if section.unfreeze and _get_first_decay(section) and kind.__name__ in FACTOR_DECAYS:
        raise UserError(
            f"optim.unfreeze needs weights that stay, but on XLA {name}'s weight decay takes "
            f"{LEAST_PRODUCT:g} of them in each step; set optim.weight_decay to 0, or use adamw"
        )


def create_plateau(section: OptimSection, steps_per_epoch: int) -> Plateau:
    """Create the rule that cuts the learning rate; it never cuts unless schedule=plateau."""
    if section.schedule != "plateau":
        return Plateau()
    warmup = get_warmup_steps(section, steps_per_epoch)
    return Plateau(section.plateau_patience, section.plateau_min_delta, warmup)


def get_warmup_steps(section: OptimSection, steps_per_epoch: int) -> int:
    if section.warmup_steps is not None:
        return section.warmup_steps
    return round(section.warmup_epochs * steps_per_epoch)


def create_shape(
    section: OptimSection, warmup: int, total_steps: int, steps_per_epoch: int
) -> Callable[[int], float]:
    """Return the learning rate by step, from the end of `warmup` steps on; UserError if wrong."""
    high, low = section.lr, section.min_lr
    start = 0 if section.warmup_inside else warmup
    length = max(total_steps - start, 1)
    cycles = _Cycles.create(section, length)

    def in_cycles(get_lr: Callable[[float, float], float]) -> Callable[[int], float]:
        """Create a shape from a cycle's peak and the share of it that has passed."""

        def shape(step: int) -> float:
            number, passed = cycles.find(min((step - start) / length, 1.0))
            return get_lr(max(high * section.cycle_decay**number, low), passed)

        return shape

    def decay_in_steps(step: int) -> float:
        passed = sum(step >= epoch * steps_per_epoch for epoch in section.decay_epochs)
        return max(high * section.decay_rate**passed, low)

    cooldown = section.cooldown_fraction * total_steps
    if section.schedule == "wsd" and cooldown > max(total_steps - warmup, 1):
        raise UserError(
            f"optim.cooldown_fraction ({section.cooldown_fraction:g}) of the run's {total_steps} "
            f"steps overlaps the warm-up of {warmup} steps; lower one of them"
        )

    def hold_then_decay(step: int) -> float:
        passed = (step - (total_steps - cooldown)) / cooldown
        return high + (low - high) * min(max(passed, 0.0), 1.0)

    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda step: high,
        "plateau": lambda step: high,
        "cosine": in_cycles(lambda peak, passed: _cosine(peak, low, passed)),
        "linear": in_cycles(lambda peak, passed: peak + (low - peak) * passed),
        "polynomial": in_cycles(
            lambda peak, passed: low + (peak - low) * (1 - passed) ** section.power
        ),
        "step": decay_in_steps,
        "wsd": hold_then_decay,
    }
    return shapes[section.schedule]


@dataclass(frozen=True)
class _Cycles:
    """Cycles of a run after the warm-up, each by a factor longer than the one before."""

    ends: tuple[float, ...]

    @classmethod
    def create(cls, section: OptimSection, steps: int) -> _Cycles:
        """Create cycles over that many steps; UserError if one would be shorter than a step."""
        lengths: list[float] = []
        with contextlib.suppress(OverflowError):
            lengths += [section.cycle_length_factor**n for n in range(section.cycles)]
        has_room = bool(lengths) and steps * min(lengths) >= sum(lengths)
        if section.cycles > 1 and not has_room:
            raise UserError(
                f"optim.cycles ({section.cycles}), each {section.cycle_length_factor:g} times as "
                f"long as the one before, leave the shortest less than one of {steps} steps; lower "
                "optim.cycles, or bring optim.cycle_length_factor nearer to 1"
            )
        return cls(tuple(end / sum(lengths) for end in accumulate(lengths)))

    def find(self, progress: float) -> tuple[int, float]:
        """Return the cycle at a share of the whole way, and the share of it that passed."""
        # The ends are rounded: a step that begins a cycle must not be held for the one before.
        number = bisect_right(self.ends, progress + 1e-9)
        if number == len(self.ends):
            return number - 1, 1.0
        start = self.ends[number - 1] if number else 0.0
        return number, max(progress - start, 0.0) / (self.ends[number] - start)


def _cosine(start: float, end: float, progress: float) -> float:
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))
