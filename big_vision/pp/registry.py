"""The table of preprocessing ops, and the grammar of one op in a preprocessing string."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from big_vision.pp.randomness import Randomness
from big_vision.tensorflow_setup import tf
from utils.registry import Registry

PREFIX = "preprocess_ops."
# Names of ops by the module that holds their factories, `get_NAME`.
_NAMES = {
    "ops_augment": "autoaugment color_jitter gray_blur_solarize randaug three_augment",
    "ops_crops": "center_crop_pct random_resized_crop",
    "ops_general": (
        "choice choice_no_replacement concat copy drop flatten keep lookup onehot pad_to_shape "
        "rag_tensor reshape setdefault squeeze_last_dim"
    ),
    "ops_image": (
        "central_crop clip_value_range convert_to_video decode decode_jpeg_and_inception_crop "
        "decode_jpeg_scaled_and_inception_crop flip_lr inception_crop random_crop resize "
        "resize_long resize_small upright value_range vgg_value_range"
    ),
    "ops_policies": "augmix timm_randaug trivial_augment",
    "ops_stored": "stored_view",
}
OPS = Registry(
    "preprocessing op",
    {op: f"big_vision.pp.{room}:get_{op}" for room, ops in _NAMES.items() for op in ops.split()},
)

# An example on its way through tf.data and the ops: tensors by the names of the features, and
# dicts of them for groups of features.
Example = dict[str, Any]
# A factory's result: takes the example, which it may change, and its random numbers.
Op = Callable[[Example, Randomness], Example]
Transform: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"
RandomTransform: TypeAlias = "Callable[[tf.Tensor, Randomness], tf.Tensor]"
T = TypeVar("T")
# An argument as it may be written in a string, and an op's arguments by their names.
Argument: TypeAlias = "int | float | str | bytes | Sequence[Argument] | None"
Arguments = dict[str, Any]


class OpCall(NamedTuple):
    """One op as written: its name and its literal arguments."""

    name: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]

    def bind(self) -> Arguments:
        """Return all arguments by name, defaults included; KeyError for an unknown op."""
        bound = inspect.signature(get_op(self.name)).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound.arguments


def parse_call(text: str) -> OpCall:
    """Parse the name and literal arguments of `name`, `dotted.name` or `name(...)`.

    A bare name is returned as it was written, blanks and all.

    Raises:
      SyntaxError: the text is no Python expression (IndentationError: it starts with a blank).
      ValueError: it is neither a name nor a call of one, or an argument is no literal.
    """
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Name | ast.Attribute):
        return OpCall(text, (), {})
    if not isinstance(node, ast.Call):
        raise ValueError(f"{text!r} is neither a name nor a call")
    args = tuple(ast.literal_eval(argument) for argument in node.args)
    kwargs: dict[Any, Any] = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
    return OpCall(_get_dotted_name(node.func), args, kwargs)


def get_op(name: str) -> Callable[..., Op]:
    """Return the factory of an op.

    Raises:
      KeyError: unknown op; the message is the published `preprocess_ops.NAME`.
    """
    if name not in OPS:
        raise KeyError(PREFIX + name)
    return OPS.get(name)


def on_key(factory: Callable[..., Transform]) -> Callable[..., Op]:
    """Let a factory of `transform(tensor)` read one key of the example and write one.

    Adds the keyword-only arguments `key`, `inkey` and `outkey`; `key` overrides the other two.
    """
    return _wrap(factory, lambda transform, value, _randomness: transform(value))


def on_key_at_random(factory: Callable[..., RandomTransform]) -> Callable[..., Op]:
    """Do as `on_key`, for a factory of `transform(tensor, randomness)`."""
    return _wrap(factory, lambda transform, value, randomness: transform(value, randomness))


def _wrap(
    factory: Callable[..., T], call: Callable[[T, tf.Tensor, Randomness], tf.Tensor]
) -> Callable[..., Op]:
    def build(
        *args: Argument,
        key: str | None = None,
        inkey: str = "image",
        outkey: str = "image",
        **kwargs: Argument,
    ) -> Op:
        transform = factory(*args, **kwargs)
        source, target = key or inkey, key or outkey

        def apply(data: Example, randomness: Randomness) -> Example:
            is_ragged = isinstance(data[source], tf.RaggedTensor)
            value = data[source] if is_ragged else tf.convert_to_tensor(data[source])
            data[target] = call(transform, value, randomness)
            return data

        return apply

    names = [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    built: Any = functools.wraps(factory)(build)
    parameters = inspect.signature(factory).parameters.values()
    built.__signature__ = inspect.Signature([*parameters, *names])
    return built


def list_values(value: Any) -> list[Any]:
    """Return the values of a list or tuple; another value alone."""
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _get_dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_get_dotted_name(node.value)}.{node.attr}"
    raise ValueError(f"only a name can be called, not {ast.unparse(node)!r}")
