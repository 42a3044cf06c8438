"""Creates models by name, timm's and own, and suggests near names for unknown ones."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING

import timm
import torch
from timm.layers import get_act_layer
from torch import Tensor, nn

from models.drop_path import set_drop_path
from models.lora import adapt
from models.table import ARGUMENTS, MODELS
from models.widened import widen
from utils.errors import UserError, get_hint, get_near_names
from utils.json_types import JsonMapping, JsonObject, JsonValue
from utils.weights.adapters import merge_adapters
from utils.weights.files import EXPORT_FILE, write_weights
from utils.weights.fitting import FitRules
from utils.weights.hub import is_shared, prefer_hub_cache
from utils.weights.load import load_weights
from utils.weights.meaning import find_meanings
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from utils.config.sections import ModelSection

# Arguments that a task sets, and arguments that have configuration keys of their own.
_OF_TASK = ("num_classes", "vocab_size", "sequence_length", "num_inputs", "statistics")
_KEYS = {"img_size": "image_size", "drop_path_rate": "drop_path_rate", "drop_rate": "drop_rate"}
_UNKNOWN = re.compile(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'")


def find_model_name(name: str, key: str = "model.name") -> str:
    """Return the name if there is such a model, else raise a UserError; builds nothing."""
    base, _, tag = name.partition(".")
    if name in MODELS or (timm.is_model(base) and not tag):
        return name
    if timm.is_model(base):
        # timm's own look-up drops the tag, and so takes any.
        known = [weights.partition(".")[2] for weights in timm.list_pretrained(f"{base}.*")]
        if tag in known:
            return name
        raise UserError(f"{key} {name!r}: {base} has no weights tagged {tag!r}; known: {known}")
    near = get_near_names(name, [*MODELS.names(), *timm.list_models()], limit=5)
    hint = f"did you mean {', '.join(near)}?" if near else "see timm.list_models()"
    raise UserError(f"{key} {name!r} is no model of timm, models/ or run.imports; {hint}")


def resolve_model(section: ModelSection) -> JsonObject:
    """Return the keys that a shared model's name sets; UserError if weights are set twice."""
    if not is_shared(section.name):
        return {}
    facts = open_weights(section.name, "model.name").facts
    if section.pretrained and section.weights:
        raise UserError(
            f"model.weights ({section.weights!r}) and model.pretrained both give weights to "
            f"{section.name!r}; remove one"
        )
    weights = section.name if section.pretrained else section.weights
    args = {**facts["args"], **section.args}
    return {"name": facts["model"], "args": args, "weights": weights, "pretrained": False}


def create_model(
    section: ModelSection,
    *,
    device: str = "cpu",
    class_names: tuple[str, ...] | None = None,
    **of_task: JsonValue,
) -> nn.Module:
    """Create the student of a run, float32.

    Initial values come from PyTorch's generator: seed it first.

    Args:
      class_names: of its classes, which weights must have too; None if unknown.
      of_task: arguments that the task sets: `num_classes` gives logits [B, num_classes].
      device: "cpu", or "meta" to check names, arguments and weights at no cost.

    Raises:
      UserError: unknown model, arguments it does not take, weights that do not fit.
    """
    keys = {argument: getattr(section, key) for argument, key in _KEYS.items()}
    arguments = {**section.args, **{name: value for name, value in keys.items() if value}}
    model = build_model(
        section.name,
        {**arguments, **of_task},
        pretrained=section.pretrained and device != "meta",
        key="model",
        device=device,
    )
    set_drop_path(model, section)
    scale_head(model, section)
    if section.weights:
        rules = FitRules(reset_head=section.reset_head, class_names=class_names)
        load_weights(model, open_weights(section.weights, "model.weights"), rules)
    if section.norm_width is not None:
        widen(model, section.norm_width, section.norm_copies)
    if section.lora:
        adapt(model, section.lora, section.lora_rank, section.lora_alpha)
    return model


def scale_head(model: nn.Module, section: ModelSection) -> None:
    """Scale initial weights and set the initial bias of the classifier, or raise a UserError."""
    scale, bias = section.head_init_scale, section.head_init_bias
    if scale is None and bias is None:
        return
    key = "head_init_scale" if bias is None else "head_init_bias"
    heads = getattr(model, "get_classifier", lambda: None)()
    for head in heads if isinstance(heads, tuple) else (heads,):
        weight, offset = getattr(head, "weight", None), getattr(head, "bias", None)
        if weight is None or (bias is not None and offset is None):
            raise UserError(
                f"model.{key} ({getattr(section, key):g}) needs a classifier with weights and a "
                f"bias, which {section.name} does not have; remove it"
            )
        with torch.no_grad():
            for parameter in (weight, offset):
                if scale is not None and parameter is not None:
                    parameter.mul_(scale)
            if bias is not None and offset is not None:
                offset.fill_(bias)


def build_model(
    name: str,
    arguments: JsonObject,
    *,
    pretrained: bool = False,
    key: str = "model",
    device: str = "cpu",
) -> nn.Module:
    """Create a module by name on a device; errors name the key that gave the name."""
    find_model_name(name, f"{key}.name" if key == "model" else key)
    try:
        with torch.device(device):
            arguments = _resolve_layers(arguments)
            if name in MODELS:
                model = MODELS.get(name)(**arguments)
                vars(model)["meanings"] = find_meanings(ARGUMENTS, name, arguments)
                return model
            with prefer_hub_cache() if pretrained else nullcontext():
                return timm.create_model(name, pretrained=pretrained, **arguments)
    except (TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        _refuse_unknown(error, name, arguments, key)
        # Statistics of the data are many numbers, and never what is wrong.
        shown = {name: value for name, value in arguments.items() if name != "statistics"}
        raise UserError(
            f"{key} {name!r} refuses its arguments {shown}: {reason}; change {key}.args, "
            "model.image_size or the rates"
        ) from error
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise UserError(
            f"{key} {name!r}: its weights cannot be fetched ({type(error).__name__}); give a local "
            "file by model.weights or distill.teacher_weights, or to a program by its path and "
            "--model NAME"
        ) from error


def export_model(tensors: dict[str, Tensor], facts: JsonMapping, folder: Path) -> Path:
    """Write weights, adapters merged, for a plain `timm.create_model`, and its arguments."""
    path = folder / EXPORT_FILE
    write_weights(path, merge_adapters(tensors), facts)
    return path


def _resolve_layers(arguments: JsonObject) -> JsonObject:
    """Replace the name of an activation by its class, which some models of timm need."""
    name = arguments.get("act_layer")
    if not isinstance(name, str):
        return arguments
    try:
        return {**arguments, "act_layer": get_act_layer(name)}
    except KeyError:
        raise UserError(
            f"model.args.act_layer: unknown activation {name!r}; use one of timm's, such as gelu, "
            "gelu_tanh, relu or silu"
        ) from None


def _refuse_unknown(error: Exception, name: str, arguments: JsonObject, key: str) -> None:
    """Raise a UserError that names the key of an unknown argument, and the known arguments."""
    match = _UNKNOWN.match(str(error))
    if match is None or match[2] not in arguments or match[2] in _OF_TASK:
        return
    wrong, own = match[2], _KEYS.get(match[2], f"args.{match[2]}")
    trace = error.__traceback__
    known = list[str]() if wrong in _KEYS else _list_arguments(trace, match[1])
    source = f"model.{own}" if key == "model" else f"{key}: its argument {wrong}"
    hint = f"; {get_hint(wrong, known)}" if known else "; leave it out"
    raise UserError(f"{source} ({arguments[wrong]!r}) is no argument of {name!r}{hint}") from error


def _list_arguments(trace: TracebackType | None, refused: str) -> list[str]:
    """List the arguments of the class or function that refused, found where it was called."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return []
    refused = refused.removesuffix(".__init__")
    for value in (trace.tb_frame.f_globals | trace.tb_frame.f_locals).values():
        if isinstance(value, type | FunctionType) and value.__qualname__ == refused:
            takes = inspect.signature(value).parameters.values()
            variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            return [p.name for p in takes if p.kind not in variadic and p.name not in _OF_TASK]
    return []
