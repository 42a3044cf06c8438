"""The table of preprocessing ops, and the grammar of one op in a preprocessing string."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from utils.registry import Registry

PREFIX = "preprocess_ops."
OPS = Registry("preprocessing op")

# What a factory returns: takes the example (a dict that it may change) and the op's Randomness.
Apply = Callable[[dict[str, Any], Any], dict[str, Any]]


class OpCall(NamedTuple):
    """One op as written: its name and its literal arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str | None, Any]


def parse_call(text: str) -> OpCall:
    """The name and literal arguments of `name`, `dotted.name` or `name(...)`.

    A bare name is given back as it was written, blanks and all.

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
    kwargs = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
    return OpCall(_get_dotted_name(node.func), args, kwargs)


def get_op(name: str) -> Callable[..., Apply]:
    """The factory of that op.

    Raises:
      KeyError: no op has this name; the message is the published `preprocess_ops.NAME`.
    """
    if name not in OPS:
        raise KeyError(PREFIX + name)
    return OPS.get(name)


def on_key(factory: Callable[..., Callable[[Any], Any]]) -> Callable[..., Apply]:
    """Let a factory of `transform(tensor)` read one key of the example and write one.

    Adds the keyword-only arguments `key`, `inkey` and `outkey`; `key` overrides the other two.
    """

    @functools.wraps(factory)
    def build(*args, key=None, inkey="image", outkey="image", **kwargs) -> Apply:
        transform = factory(*args, **kwargs)
        source, target = key or inkey, key or outkey

        def apply(data: dict[str, Any], randomness: Any) -> dict[str, Any]:
            data[target] = transform(_to_tensor(data[source]))
            return data

        return apply

    return _add_key_words(build, factory)


def on_key_at_random(factory: Callable[..., Callable[[Any, Any], Any]]) -> Callable[..., Apply]:
    """As `on_key`, for a factory of `transform(tensor, randomness)`."""

    @functools.wraps(factory)
    def build(*args, key=None, inkey="image", outkey="image", **kwargs) -> Apply:
        transform = factory(*args, **kwargs)
        source, target = key or inkey, key or outkey

        def apply(data: dict[str, Any], randomness: Any) -> dict[str, Any]:
            data[target] = transform(_to_tensor(data[source]), randomness)
            return data

        return apply

    return _add_key_words(build, factory)


def _get_dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_get_dotted_name(node.value)}.{node.attr}"
    raise ValueError(f"only a name can be called, not {ast.unparse(node)!r}")


def _add_key_words(
    build: Callable[..., Apply], factory: Callable[..., Any]
) -> Callable[..., Apply]:
    word = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    signature = inspect.signature(factory)
    build.__signature__ = signature.replace(
        parameters=[
            *signature.parameters.values(),
            word("key", default=None),
            word("inkey", default="image"),
            word("outkey", default="image"),
        ],
        return_annotation=inspect.Signature.empty,
    )
    return build


def _to_tensor(value: Any) -> Any:
    import tensorflow as tf

    return value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
