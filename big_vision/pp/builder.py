"""Builds one function on an example from a preprocessing string.

`decode|resize(224)|flip_lr`: ops from left to right, separated by `|`, each a name or a call with
literal arguments. docs/preprocessing.md describes the strings, the ops and their randomness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import PREFIX, Example, Op, OpCall, get_op, parse_call
from big_vision.tensorflow_setup import tf


class Section(NamedTuple):
    """One op of a string, as text, and where it starts (0: the first character)."""

    text: str
    start: int


def get_preprocess_fn(spec: str | None, *, seed: int = 0) -> Callable[..., Example]:
    """Return `fn(data, *, epoch=0, index=0)`, which maps an example (a dict) to a new dict.

    Works eagerly and inside `tf.data.Dataset.map`, with epoch and index as Python numbers or
    scalar int64 tensors. A random op depends only on seed, epoch, index and the op's position. Only
    keys that the string names are added.

    Args:
      spec: ops separated by `|`; empty or None is the identity.
      seed: the run's seed.

    Raises:
      KeyError: unknown op.
      ValueError: not an op, or broken syntax.
      TypeError: wrong or missing arguments.
    """
    sections = split_sections(spec)
    ops = [build_op(section) for section in sections]

    def preprocess(
        data: Example, *, epoch: tf.Tensor | int = 0, index: tf.Tensor | int = 0
    ) -> Example:
        data = dict(data)
        example = tf.stack([_to_int64(epoch), _to_int64(index)])
        for position, op in enumerate(ops):
            try:
                data = op(data, Randomness(seed, position, example))
            except Exception as error:
                error.add_note(_describe_op(sections[position], data))
                raise
        return data

    return preprocess


def split_sections(spec: str | None) -> list[Section]:
    """Return the non-empty sections of a string. Every `|` separates, also inside quotes."""
    sections: list[Section] = []
    start = 0
    for text in (spec or "").split("|"):
        if text:
            sections.append(Section(text, start))
        start += len(text) + 1
    return sections


def parse_section(section: Section) -> OpCall:
    """Parse the section's op and arguments; its name is not checked.

    Raises:
      ValueError: not a name or call with literal arguments.
    """
    try:
        call = parse_call(PREFIX + section.text)
    except SyntaxError as error:
        raise ValueError(f"Syntax error on: {section.text}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"Error parsing:\n{PREFIX}{section.text}") from error
    return call._replace(name=call.name.removeprefix(PREFIX))


def build_op(section: Section) -> Op:
    """Create the op of one section.

    Raises:
      KeyError, ValueError, TypeError: as in `get_preprocess_fn`.
    """
    call = parse_section(section)
    op = get_op(call.name)(*call.args, **call.kwargs)
    if section.text[0].isspace():
        raise ValueError(f"Syntax error on: {section.text}")
    return op


def _describe_op(section: Section, data: Example) -> str:
    """Describe which op failed, and on what kind of image."""
    kind = "without an image"
    if hasattr(data.get("image"), "dtype"):
        image = data["image"]
        kind = f"on an image of type {image.dtype.name} and shape {image.shape}"
    return f"{section.text.strip()} at character {section.start + 1} {kind}"


def _to_int64(number: tf.Tensor | int) -> tf.Tensor:
    return tf.cast(number, tf.int64) if tf.is_tensor(number) else tf.constant(number, tf.int64)
