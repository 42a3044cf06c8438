"""The table of preprocessing ops, and the grammar of one op in a preprocessing string."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from big_vision.tensorflow_setup import tf
from utils.registry import Registry

PREFIX = "preprocess_ops."
OPS = Registry(
    "preprocessing op",
    {
        "autoaugment": "big_vision.pp.ops_augment:get_autoaugment",
        "color_jitter": "big_vision.pp.ops_augment:get_color_jitter",
        "gray_blur_solarize": "big_vision.pp.ops_augment:get_gray_blur_solarize",
        "randaug": "big_vision.pp.ops_augment:get_randaug",
        "three_augment": "big_vision.pp.ops_augment:get_three_augment",
        "center_crop_pct": "big_vision.pp.ops_crops:get_center_crop_pct",
        "random_resized_crop": "big_vision.pp.ops_crops:get_random_resized_crop",
        "choice": "big_vision.pp.ops_general:get_choice",
        "choice_no_replacement": "big_vision.pp.ops_general:get_choice_no_replacement",
        "concat": "big_vision.pp.ops_general:get_concat",
        "copy": "big_vision.pp.ops_general:get_copy",
        "drop": "big_vision.pp.ops_general:get_drop",
        "flatten": "big_vision.pp.ops_general:get_flatten",
        "keep": "big_vision.pp.ops_general:get_keep",
        "lookup": "big_vision.pp.ops_general:get_lookup",
        "onehot": "big_vision.pp.ops_general:get_onehot",
        "pad_to_shape": "big_vision.pp.ops_general:get_pad_to_shape",
        "rag_tensor": "big_vision.pp.ops_general:get_rag_tensor",
        "reshape": "big_vision.pp.ops_general:get_reshape",
        "setdefault": "big_vision.pp.ops_general:get_setdefault",
        "squeeze_last_dim": "big_vision.pp.ops_general:get_squeeze_last_dim",
        "central_crop": "big_vision.pp.ops_image:get_central_crop",
        "clip_value_range": "big_vision.pp.ops_image:get_clip_value_range",
        "convert_to_video": "big_vision.pp.ops_image:get_convert_to_video",
        "decode": "big_vision.pp.ops_image:get_decode",
        "decode_jpeg_and_inception_crop": (
            "big_vision.pp.ops_image:get_decode_jpeg_and_inception_crop"
        ),
        "decode_jpeg_scaled_and_inception_crop": (
            "big_vision.pp.ops_image:get_decode_jpeg_scaled_and_inception_crop"
        ),
        "flip_lr": "big_vision.pp.ops_image:get_flip_lr",
        "inception_crop": "big_vision.pp.ops_image:get_inception_crop",
        "random_crop": "big_vision.pp.ops_image:get_random_crop",
        "resize": "big_vision.pp.ops_image:get_resize",
        "resize_long": "big_vision.pp.ops_image:get_resize_long",
        "resize_small": "big_vision.pp.ops_image:get_resize_small",
        "upright": "big_vision.pp.ops_image:get_upright",
        "value_range": "big_vision.pp.ops_image:get_value_range",
        "vgg_value_range": "big_vision.pp.ops_image:get_vgg_value_range",
        "augmix": "big_vision.pp.ops_policies:get_augmix",
        "timm_randaug": "big_vision.pp.ops_policies:get_timm_randaug",
        "trivial_augment": "big_vision.pp.ops_policies:get_trivial_augment",
        "stored_view": "big_vision.pp.ops_stored:get_stored_view",
    },
)

# A factory's result: takes the example (a dict that it may change) and the op's Randomness.
Apply = Callable[[dict[str, Any], Any], dict[str, Any]]


class OpCall(NamedTuple):
    """One op as written: its name and its literal arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


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


def get_op(name: str) -> Callable[..., Apply]:
    """Return the factory of an op.

    Raises:
      KeyError: unknown op; the message is the published `preprocess_ops.NAME`.
    """
    if name not in OPS:
        raise KeyError(PREFIX + name)
    return OPS.get(name)


def on_key(factory: Callable[..., Callable[[Any], Any]]) -> Callable[..., Apply]:
    """Let a factory of `transform(tensor)` read one key of the example and write one.

    Adds the keyword-only arguments `key`, `inkey` and `outkey`; `key` overrides the other two.
    """
    return _wrap(factory, lambda transform, value, _randomness: transform(value))


def on_key_at_random(factory: Callable[..., Callable[[Any, Any], Any]]) -> Callable[..., Apply]:
    """Do as `on_key`, for a factory of `transform(tensor, randomness)`."""
    return _wrap(factory, lambda transform, value, randomness: transform(value, randomness))


def _wrap(
    factory: Callable[..., Any], call: Callable[[Any, Any, Any], Any]
) -> Callable[..., Apply]:
    def build(*args, key=None, inkey="image", outkey="image", **kwargs) -> Apply:
        transform = factory(*args, **kwargs)
        source, target = key or inkey, key or outkey

        def apply(data: dict[str, Any], randomness: Any) -> dict[str, Any]:
            data[target] = call(transform, _to_tensor(data[source]), randomness)
            return data

        return apply

    word = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.signature(factory)
    built: Any = functools.wraps(factory)(build)
    built.__signature__ = signature.replace(
        parameters=[
            *signature.parameters.values(),
            word("key", default=None),
            word("inkey", default="image"),
            word("outkey", default="image"),
        ],
        return_annotation=inspect.Signature.empty,
    )
    return built


def _get_dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_get_dotted_name(node.value)}.{node.attr}"
    raise ValueError(f"only a name can be called, not {ast.unparse(node)!r}")


def _to_tensor(value: Any) -> Any:
    return value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
