"""Properties of a recipe's built parts: model, optimizer, schedule and ops, not the YAML.

`MEASURES` maps a name of `source.values` to a function of a `Recipe`. A name that is none of them
is a dotted key of the configuration.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from bill.plan_load import CLASSES
from bill.plan_load import EXAMPLES as SPLITS
from models.factory import create_model
from optim_factory import Schedule, create_optimizer, create_schedule, get_warmup_steps, scale_lr
from tests.support.drop_path_rates import get_drop_path_rates
from tests.support.recipe_ops import Op, describe_pixels, read_augmentation, read_crop, read_view
from utils.config.load import RunConfig
from utils.ema import Averaging

EXAMPLES = {(n, split): count for n, splits in SPLITS.items() for split, count in splits.items()}
_TOKENS = re.compile(r"(^|\.)(pos_embed|cls_token|dist_token|reg_token)$")


@dataclass(frozen=True)
class Recipe:
    """A configuration with its parts, each built once."""

    config: RunConfig

    @cached_property
    def model(self) -> nn.Module:
        """The student on the meta device."""
        return self.build("meta")

    def build(self, device: str) -> nn.Module:
        """Build the student without weights of a hub; on the CPU a ViT's first block is enough."""
        classes = CLASSES[self.config.data.name] if self.config.train.task == "classify" else 0
        torch.manual_seed(0)
        section = self.config.model.model_copy(update={"pretrained": False})
        if device == "cpu" and isinstance(self.model, VisionTransformer):
            section = section.model_copy(update={"args": {**section.args, "depth": 1}})
        return create_model(section, num_classes=classes, device=device)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return create_optimizer(scale_lr(self.config), self.model)

    @cached_property
    def epoch(self) -> int:
        """Steps of an epoch."""
        data = self.config.data
        name, _, part = data.train_split.partition("[")
        examples = EXAMPLES[data.name, name]
        if part:
            examples = round(examples * float(re.fullmatch(r":(\d+)%\]", part)[1]) / 100)
        return examples // data.global_batch_size

    @cached_property
    def steps(self) -> int:
        return self.config.train.steps or self.config.train.epochs * self.epoch

    @cached_property
    def schedule(self) -> Schedule:
        section = scale_lr(self.config)
        return create_schedule(section, total_steps=self.steps, steps_per_epoch=self.epoch)

    @property
    def train_ops(self) -> list[Op]:
        return Op.read(self.config.data.train_pp)

    @property
    def eval_ops(self) -> list[Op]:
        return Op.read(self.config.data.eval_pp)


def measure(recipe: Recipe, name: str) -> Any:
    """The value that the run has for a name of `source.values`."""
    if name in MEASURES:
        return MEASURES[name](recipe)
    section, _, key = name.partition(".")
    part = getattr(recipe.config, section)
    if name.startswith("optim."):
        part = scale_lr(recipe.config)
    for word in key.split("."):
        if isinstance(part, tuple):
            part = part[int(word)]
        else:
            part = part[word] if isinstance(part, dict) else getattr(part, word)
    if name == "train.task_loss":
        return part or "softmax"
    return part


def read_decayed(recipe: Recipe) -> set[str]:
    """Names of the parameters that the optimizer decays."""
    names = {parameter: name for name, parameter in recipe.model.named_parameters()}
    return {
        names[parameter]
        for group in recipe.optimizer.param_groups
        if group["decays"]
        for parameter in group["params"]
    }


def _name_decayed(recipe: Recipe) -> str:
    """The rule that chooses the parameters with decay: all, or matrices but for tokens."""
    parameters = dict(recipe.model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    matrices = {n for n in trained if parameters[n].ndim > 1 and not _TOKENS.search(n)}
    rules = {"all": trained, "matrices": matrices, "none": set()}
    decayed = read_decayed(recipe)
    return next((rule for rule, names in rules.items() if names == decayed), "others")


def _read_decay(recipe: Recipe) -> float:
    """Share of a weight that a step of the peak rate takes: every optimizer here multiplies."""
    return max(group["lr"] * group["weight_decay"] for group in recipe.optimizer.param_groups)


def _read_warmup(recipe: Recipe) -> int:
    return get_warmup_steps(recipe.config.optim, recipe.epoch)


def _read_gelu(recipe: Recipe) -> str:
    """tanh, exact or none, by what the model's activations are."""
    kinds = set()
    for module in recipe.model.modules():
        name = type(module).__name__
        if name in ("GELU", "GELUTanh"):
            kinds.add(getattr(module, "approximate", "tanh" if name == "GELUTanh" else "none"))
    names = {"tanh": "tanh", "none": "exact"}
    return "/".join(sorted(names[kind] for kind in kinds)) or "none"


def _read_layer_scale(recipe: Recipe) -> float | None:
    """First value of the layer scale, from the weights of a model of the same arguments."""
    values = [
        parameter.flatten()[0].item()
        for name, parameter in recipe.build("cpu").named_parameters()
        if name.endswith("gamma")
    ]
    return min(values) if values else None


def _read_head(recipe: Recipe) -> str:
    """Whether the classifier's first weights are all 0, as JAX's models begin."""
    weight = recipe.build("cpu").get_classifier().weight
    return "random" if weight.any() else "zeros"


def _read_positions(recipe: Recipe) -> str:
    """How timm resamples positions of another size."""
    words = inspect.signature(resample_abs_pos_embed).parameters
    return words["interpolation"].default


def _read_moments(recipe: Recipe) -> str:
    """Type of the optimizer's first moment, after a step on one small weight."""
    weight = nn.Module()
    weight.weight = nn.Parameter(torch.ones(2, 2))
    weight.weight.grad = torch.ones(2, 2)
    optimizer = create_optimizer(scale_lr(recipe.config), weight)
    optimizer.step()
    state = next(iter(optimizer.state.values()))
    names = ("exp_avg", "momentum_buffer")
    return str(next(state[name] for name in names if name in state).dtype).removeprefix("torch.")


def _read_convolutions(recipe: Recipe) -> str:
    """Whose variance the first weights of 3x3 convolutions have: fan_in (LeCun) or He's fan_out."""
    for name, parameter in recipe.build("cpu").named_parameters():
        if parameter.ndim == 4 and parameter.shape[2] == 3 and parameter.shape[0] >= 128:
            fan_in = parameter[0].numel()
            fan_out = parameter.shape[0] * parameter[0, 0].numel()
            rules = {"lecun": 1 / fan_in, "he_fan_out": 2 / fan_out, "he_fan_in": 2 / fan_in}
            variance = parameter.var().item()
            near = {rule: abs(variance / wanted - 1) for rule, wanted in rules.items()}
            # A square convolution's two fans are equal: both of He's rules are one there.
            return min(near, key=near.__getitem__) if min(near.values()) < 0.05 else name
    return "none"


def _moves(recipe: Recipe) -> str:
    """Whether the rate changes from step to step or from epoch to epoch."""
    middle = (recipe.steps // 2 // recipe.epoch) * recipe.epoch + 1
    section = recipe.config.optim
    if section.schedule == "step":
        return "epoch"
    lr = recipe.schedule.lr_at
    return "step" if lr(middle) != lr(middle + 1) else "epoch"


def _read_ema_decay(recipe: Recipe) -> float | None:
    """Decay of the average at step 1,000."""
    train = recipe.config.train
    if not train.ema:
        return None
    return 1 - Averaging((train.ema_decay,)).get_weights(1000)[0]


def _default(name: str) -> Callable[[Recipe], Any]:
    """What every group of the built optimizer has under that name."""
    return lambda recipe: recipe.optimizer.param_groups[0].get(name)


def _crop(name: str) -> Callable[[Recipe], Any]:
    return lambda recipe: read_crop(recipe.train_ops)[name]


def _view(name: str) -> Callable[[Recipe], Any]:
    return lambda recipe: read_view(recipe.eval_ops)[name]


def _augmentation(name: str) -> Callable[[Recipe], Any]:
    return lambda recipe: read_augmentation(recipe.train_ops)[name]


def _teacher(recipe: Recipe) -> float:
    """Factor of the distillation terms in the total."""
    distill = recipe.config.distill
    return distill.alpha * (distill.losses[0].weight if distill.losses else 1.0)


MEASURES: dict[str, Callable[[Recipe], Any]] = {
    "model.million_parameters": lambda recipe: round(
        sum(parameter.numel() for parameter in recipe.model.parameters()) / 1e6
    ),
    "model.head": _read_head,
    "model.positions": _read_positions,
    "model.gelu": _read_gelu,
    "model.layer_scale": _read_layer_scale,
    "model.convolutions": _read_convolutions,
    "drop_path.rates": lambda recipe: get_drop_path_rates(recipe.model),
    "schedule.lr": lambda recipe: recipe.schedule.lr_at,
    "schedule.steps": lambda recipe: recipe.steps,
    "schedule.warmup_steps": _read_warmup,
    "schedule.moves": _moves,
    "decay.at_peak": _read_decay,
    "decay.parameters": _name_decayed,
    "optimizer.betas": lambda recipe: list(recipe.optimizer.param_groups[0]["betas"]),
    "optimizer.eps": _default("eps"),
    "optimizer.momentum": _default("momentum"),
    "optimizer.nesterov": _default("nesterov"),
    "optimizer.moments": _read_moments,
    "ema.decay_at_1000": _read_ema_decay,
    "loss.task_share": lambda recipe: 1 - recipe.config.distill.alpha,
    "loss.teacher_share": _teacher,
    "loss.lr": lambda recipe: scale_lr(recipe.config).lr * (1 - recipe.config.distill.alpha),
    **{
        f"crop.{name}": _crop(name)
        for name in ("law", "size", "area", "ratio", "method", "antialias")
    },
    **{
        f"augment.{name}": _augmentation(name)
        for name in ("policy", "fill", "interpolation", "jitter", "flip")
    },
    **{f"evaluate.{name}": _view(name) for name in ("short_side", "size", "method", "antialias")},
    "pixels": lambda recipe: describe_pixels(recipe.train_ops),
}
