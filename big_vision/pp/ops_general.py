"""Ops on labels, keys and tensors of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from big_vision.pp.randomness import Randomness
from big_vision.pp.registry import Argument, Example, Op, Transform, list_values, on_key
from big_vision.tensorflow_setup import tf

Names = str | Sequence[str] | None


def get_onehot(
    depth: int,
    key: str = "labels",
    key_result: str | None = None,
    multi: bool = True,
    on: float = 1.0,
    off: float = 0.0,
) -> Op:
    """Convert labels to float32: [depth] for a scalar, one multi-hot [depth] for a list.

    multi=False: [n, depth] for a list. A list's label out of range is an error with multi, and a
    row of `off` without.
    """

    def onehot(data: Example, _randomness: Randomness) -> Example:
        labels = tf.cast(data[key], tf.int64)
        if multi and labels.shape.rank > 0:
            hits = tf.scatter_nd(labels[:, None], tf.ones_like(labels, tf.float32), [depth])
            result = tf.where(hits > 0, tf.constant(on, tf.float32), tf.constant(off, tf.float32))
        else:
            result = tf.one_hot(labels, depth, float(on), float(off), dtype=tf.float32)
        data[key_result or key] = result
        return data

    return onehot


def get_keep(*keys: str) -> Op:
    """Keep only these keys; absent ones are ignored."""
    return lambda data, _randomness: {key: value for key, value in data.items() if key in keys}


def get_drop(*keys: str) -> Op:
    """Drop these keys; absent ones are ignored."""
    return lambda data, _randomness: {key: value for key, value in data.items() if key not in keys}


def get_copy(inkey: str, outkey: str) -> Op:
    """Copy a value to a second key; nested dicts are copied, tensors shared."""
    return lambda data, _randomness: {**data, outkey: _copy_containers(data[inkey])}


def get_concat(inkeys: Sequence[str], outkey: str | None = None, axis: int = -1) -> Op:
    """Join several tensors along an axis, under `outkey` or the first of `inkeys`."""
    return lambda data, _randomness: {
        **data,
        outkey or inkeys[0]: tf.concat([data[key] for key in inkeys], axis),
    }


def get_flatten(keys: Sequence[str] | None = None) -> Op:
    """Flatten nested dicts to names like `a/b`; `keys` limits which top-level names."""

    def flatten(data: Example, _randomness: Randomness) -> Example:
        flat: Example = {}
        for key, value in data.items():
            flat |= _flatten(key, value) if keys is None or key in keys else {key: value}
        return flat

    return flatten


def get_setdefault(key: str, value: Argument) -> Op:
    """Set `value` if the key is missing or its tensor is empty (empty sides become 1)."""

    def setdefault(data: Example, _randomness: Randomness) -> Example:
        if key not in data:
            data[key] = tf.constant(value)
            return data
        present = tf.convert_to_tensor(data[key])
        sides = tf.maximum(tf.shape(present), 1)
        default = tf.broadcast_to(tf.constant(value, present.dtype), sides)
        data[key] = tf.cond(tf.size(present) > 0, lambda: present, lambda: default)
        return data

    return setdefault


@on_key
def get_lookup(mapping: str, npzkey: str = "fnames", sep: str | None = None) -> Transform:
    """Look up string(s) in a table in a file; -1 for unknown ones.

    The number is the line's (int64); or with `sep` the one after it in lines of `word<sep>number`
    (int32); or the position in the array `npzkey` of an .npz file (int64). The file may be remote.
    """
    words, numbers = _read_table(mapping, npzkey, sep)
    tables: list[tf.Tensor] = []

    def lookup(text: tf.Tensor) -> tf.Tensor:
        if not tables:
            with tf.init_scope():
                entries = tf.lookup.KeyValueTensorInitializer(
                    tf.constant(words, tf.string), tf.constant(numbers)
                )
                tables.append(tf.lookup.StaticHashTable(entries, default_value=-1))
        return tables[0].lookup(text)

    return lookup


@on_key
def get_squeeze_last_dim() -> Transform:
    """Remove the last axis, which must have length 1."""
    return lambda value: tf.squeeze(value, axis=-1)


@on_key
def get_reshape(new_shape: Sequence[int]) -> Transform:
    """Reshape; one side may be -1."""
    return lambda value: tf.reshape(value, new_shape)


@on_key
def get_pad_to_shape(
    shape: Sequence[int | None], pad_value: float = 0, where: str = "after"
) -> Transform:
    """Pad `before`, `after` or on `both` sides to a shape; None leaves an axis unchanged."""

    def pad_to_shape(value: tf.Tensor) -> tf.Tensor:
        assert len(shape) == value.shape.rank, f"{shape} does not fit rank {value.shape.rank}"
        sides = tf.shape(value)
        goal = tf.stack([sides[i] if side is None else side for i, side in enumerate(shape)])
        missing = goal - sides
        before = {"before": missing, "after": missing * 0, "both": missing // 2}[where]
        paddings = tf.stack([before, missing - before], axis=1)
        padded = tf.pad(value, paddings, constant_values=tf.cast(pad_value, value.dtype))
        pairs = zip(value.shape.as_list(), shape, strict=True)
        padded.set_shape([known if side is None else side for known, side in pairs])
        return padded

    return pad_to_shape


@on_key
def get_rag_tensor() -> Transform:
    """Convert to a ragged tensor, so that examples of different length can be batched.

    [...] becomes [1, ...], as in big_vision: the second axis is the ragged one.
    """

    def rag_tensor(value: tf.Tensor) -> tf.Tensor:
        # pyrefly: ignore[missing-attribute]  # the stub leaves it out
        return tf.RaggedTensor.from_tensor(value[None])

    return rag_tensor


def get_choice(
    n: int | Literal["single"] | Sequence[int] = "single",
    key: Names = None,
    fewer_ok: bool = False,
    inkey: Names = None,
    outkey: Names = None,
) -> Op:
    """Choose random entries along the first axis, the same ones for every key.

    Args:
      n: "single": one entry, without the axis; a number: that many different ones, in order;
        [low, high]: a random number of them, both ends included.
      key: a name or list of names, read and written; otherwise inkey and outkey.
      fewer_ok: with [low, high], return all entries if there are fewer.
      outkey: may contain `{key}`, the name that was read.
    """
    names = _pair_keys(key, inkey, outkey)

    def choice(data: Example, randomness: Randomness) -> Example:
        values = {source: tf.convert_to_tensor(data[source]) for source, _ in names}
        length = _get_common_length(values, "choice")
        if n == "single":
            picked = randomness.integers(length[None])[0]
        else:
            picked = _pick_in_order(n, length, fewer_ok, randomness)
        for source, target in names:
            data[target] = tf.gather(values[source], picked)
            if isinstance(n, int):
                data[target] = tf.ensure_shape(data[target], [n, *values[source].shape[1:]])
        return data

    return choice


def get_choice_no_replacement(key: Names = None, inkey: Names = None, outkey: Names = None) -> Op:
    """Choose one entry along the first axis by epoch; each comes once before any repeats.

    For an example (its `_id`, a number or string) every block of n epochs, n its number of
    entries, shows a permutation of them, and each block another one.
    """
    names = _pair_keys(key, inkey, outkey)

    def choice_no_replacement(data: Example, randomness: Randomness) -> Example:
        values = {source: tf.convert_to_tensor(data[source]) for source, _ in names}
        length = _get_common_length(values, "choice_no_replacement")
        count = tf.cast(length, tf.int64)
        epoch = randomness.epoch
        block, position = tf.unstack([epoch // count, tf.math.floormod(epoch, count)])
        example = _to_number(tf.convert_to_tensor(data["_id"]))
        draws = randomness.for_example(block, example).uniform(length[None])
        picked = tf.argsort(draws)[position]
        for source, target in names:
            data[target] = tf.gather(values[source], picked)
        return data

    return choice_no_replacement


def _pair_keys(key: Names, inkey: Names, outkey: Names) -> list[tuple[str, str]]:
    """Return (source, target) names; `{key}` in a target stands for the source."""
    sources, targets = list_values(key or inkey or "image"), list_values(key or outkey or "image")
    if len(targets) == 1:
        targets = targets * len(sources)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} inkeys but {len(targets)} outkeys")
    return [(s, t.replace("{key}", s)) for s, t in zip(sources, targets, strict=True)]


def _get_common_length(values: dict[str, tf.Tensor], op: str) -> tf.Tensor:
    """Return scalar int32: the first side, which must be equal for all."""
    for name, value in values.items():
        assert value.shape.rank != 0, f"{op} needs a list to choose from, but {name!r} is a scalar"
    lengths = [tf.shape(value)[0] for value in values.values()]
    for length in lengths[1:]:
        check = tf.debugging.assert_equal(length, lengths[0], f"{op}: lists of unlike length")
        lengths[0] = _after([check], lengths[0])
    return lengths[0]


def _pick_in_order(
    n: int | Sequence[int], length: tf.Tensor, fewer_ok: bool, randomness: Randomness
) -> tf.Tensor:
    """Draw different int32 positions in ascending order."""
    if isinstance(n, int):
        count = tf.constant(n)
    else:
        low, high = n
        count = randomness.child(1).integers(tf.constant([high - low + 1]))[0] + low
    if not fewer_ok:
        check = tf.debugging.assert_greater_equal(length, count, "choice: fewer entries than n")
        count = _after([check], count)
    order = tf.argsort(randomness.child(2).uniform(length[None]))
    return tf.sort(order[:count])


def _after(checks: Sequence[tf.Operation | None], value: tf.Tensor) -> tf.Tensor:
    """Return the value after the checks have passed (eager checks are None and have passed)."""
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(value)


def _to_number(identity: tf.Tensor) -> tf.Tensor:
    """Convert an example's id, a number or a string, to scalar int64."""
    if identity.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(identity, tf.int64.max)
    return tf.cast(identity, tf.int64)


def _copy_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_containers(inner) for key, inner in value.items()}
    return value


def _flatten(name: str, value: Any) -> Example:
    if not isinstance(value, dict):
        return {name: value}
    groups = (_flatten(f"{name}/{key}", inner) for key, inner in value.items())
    return {key: inner for group in groups for key, inner in group.items()}


def _read_table(mapping: str, npzkey: str, sep: str | None) -> tuple[list[str], np.ndarray]:
    """Read words and their numbers, an int32 or int64 array."""
    import fsspec

    system, inner = fsspec.core.url_to_fs(mapping)
    with system.open(inner, "rb") as file:
        if mapping.endswith(".npz"):
            words = [str(word) for word in np.load(file, allow_pickle=False)[npzkey]]
            return words, np.arange(len(words), dtype=np.int64)
        lines = file.read().decode().splitlines()
    if sep is None:
        return lines, np.arange(len(lines), dtype=np.int64)
    pairs = [line.split(sep) for line in lines]
    return [word for word, _ in pairs], np.array([int(number) for _, number in pairs], np.int32)
