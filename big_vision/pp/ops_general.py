"""Ops on labels, keys and tensors of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from big_vision.pp.registry import on_key
from big_vision.tensorflow_setup import tf


def get_onehot(depth, key="labels", key_result=None, multi=True, on=1.0, off=0.0):
    """Convert labels to float32: [depth] for a scalar, one multi-hot [depth] for a list.

    multi=False: [n, depth] for a list. A list's label out of range is an error with multi, and a
    row of `off` without.
    """

    def onehot(data, _randomness):
        labels = tf.cast(data[key], tf.int64)
        if multi and labels.shape.rank > 0:
            hits = tf.scatter_nd(labels[:, None], tf.ones_like(labels, tf.float32), [depth])
            result = tf.where(hits > 0, tf.constant(on, tf.float32), tf.constant(off, tf.float32))
        else:
            result = tf.one_hot(labels, depth, float(on), float(off), dtype=tf.float32)
        data[key_result or key] = result
        return data

    return onehot


def get_keep(*keys):
    """Keep only these keys; absent ones are ignored."""

    def keep(data, _randomness):
        return {key: value for key, value in data.items() if key in keys}

    return keep


def get_drop(*keys):
    """Drop these keys; absent ones are ignored."""

    def drop(data, _randomness):
        return {key: value for key, value in data.items() if key not in keys}

    return drop


def get_copy(inkey, outkey):
    """Copy a value to a second key; nested dicts are copied, tensors shared."""

    def copy(data, _randomness):
        data[outkey] = _copy_containers(data[inkey])
        return data

    return copy


def get_concat(inkeys, outkey=None, axis=-1):
    """Join several tensors along an axis, under `outkey` or the first of `inkeys`."""

    def concat(data, _randomness):
        data[outkey or inkeys[0]] = tf.concat([data[key] for key in inkeys], axis)
        return data

    return concat


def get_flatten(keys=None):
    """Flatten nested dicts to names like `a/b`; `keys` limits which top-level names."""

    def flatten(data, _randomness):
        flat: dict[str, Any] = {}
        for key, value in data.items():
            if keys is None or key in keys:
                _flatten_into(flat, key, value)
            else:
                flat[key] = value
        return flat

    return flatten


def get_setdefault(key, value):
    """Set `value` if the key is missing or its tensor is empty (empty sides become 1)."""

    def setdefault(data, _randomness):
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
def get_lookup(mapping, npzkey="fnames", sep=None):
    """Look up string(s) in a table in a file; -1 for unknown ones.

    The number is the line's (int64); or with `sep` the one after it in lines of `word<sep>number`
    (int32); or the position in the array `npzkey` of an .npz file (int64). The file may be remote.
    """
    words, numbers = _read_table(mapping, npzkey, sep)
    tables: list[Any] = []

    def lookup(text):
        if not tables:
            with tf.init_scope():
                entries = tf.lookup.KeyValueTensorInitializer(
                    tf.constant(words, tf.string), tf.constant(numbers)
                )
                tables.append(tf.lookup.StaticHashTable(entries, default_value=-1))
        return tables[0].lookup(text)

    return lookup


@on_key
def get_squeeze_last_dim():
    """Remove the last axis, which must have length 1."""

    def squeeze_last_dim(value):
        return tf.squeeze(value, axis=-1)

    return squeeze_last_dim


@on_key
def get_reshape(new_shape):
    """Reshape; one side may be -1."""

    def reshape(value):
        return tf.reshape(value, new_shape)

    return reshape


@on_key
def get_pad_to_shape(shape, pad_value=0, where="after"):
    """Pad `before`, `after` or on `both` sides to a shape; None leaves an axis unchanged."""

    def pad_to_shape(value):
        assert len(shape) == value.shape.rank, f"{shape} does not fit rank {value.shape.rank}"
        sides = tf.shape(value)
        goal = tf.stack([sides[i] if side is None else side for i, side in enumerate(shape)])
        missing = goal - sides
        before = {"before": missing, "after": missing * 0, "both": missing // 2}[where]
        paddings = tf.stack([before, missing - before], axis=1)
        padded = tf.pad(value, paddings, constant_values=tf.cast(pad_value, value.dtype))
        static = value.shape.as_list()
        padded.set_shape(
            [s if side is None else side for s, side in zip(static, shape, strict=True)]
        )
        return padded

    return pad_to_shape


@on_key
def get_rag_tensor():
    """Convert to a ragged tensor, so that examples of different length can be batched.

    [...] becomes [1, ...], as in big_vision: the second axis is the ragged one.
    """

    def rag_tensor(value):
        return tf.RaggedTensor.from_tensor(value[None])

    return rag_tensor


def get_choice(n="single", key=None, fewer_ok=False, inkey=None, outkey=None):
    """Choose random entries along the first axis, the same ones for every key.

    Args:
      n: "single": one entry, without the axis; a number: that many different ones, in order;
        [low, high]: a random number of them, both ends included.
      key: a name or list of names, read and written; otherwise inkey and outkey.
      fewer_ok: with [low, high], return all entries if there are fewer.
      outkey: may contain `{key}`, the name that was read.
    """
    names = _pair_keys(key, inkey, outkey)

    def choice(data, randomness):
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


def get_choice_no_replacement(key=None, inkey=None, outkey=None):
    """Choose one entry along the first axis by epoch; each comes once before any repeats.

    For an example (its `_id`, a number or string) every block of n epochs, n its number of
    entries, shows a permutation of them, and each block another one.
    """
    names = _pair_keys(key, inkey, outkey)

    def choice_no_replacement(data, randomness):
        values = {source: tf.convert_to_tensor(data[source]) for source, _ in names}
        length = _get_common_length(values, "choice_no_replacement")
        count = tf.cast(length, tf.int64)
        block, position = tf.unstack([randomness.epoch // count, randomness.epoch % count])
        example = _to_number(tf.convert_to_tensor(data["_id"]))
        draws = randomness.for_example(block, example).uniform(length[None])
        picked = tf.argsort(draws)[position]
        for source, target in names:
            data[target] = tf.gather(values[source], picked)
        return data

    return choice_no_replacement


def _pair_keys(key: Any, inkey: Any, outkey: Any) -> list[tuple[str, str]]:
    """Return (source, target) names; `{key}` in a target stands for the source."""
    sources, targets = _to_names(key or inkey or "image"), _to_names(key or outkey or "image")
    if len(targets) == 1:
        targets = targets * len(sources)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} inkeys but {len(targets)} outkeys")
    return [(s, t.replace("{key}", s)) for s, t in zip(sources, targets, strict=True)]


def _to_names(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _get_common_length(values: dict[str, Any], op: str) -> Any:
    """Return scalar int32: the first side, which must be equal for all."""
    for name, value in values.items():
        assert value.shape.rank != 0, f"{op} needs a list to choose from, but {name!r} is a scalar"
    lengths = [tf.shape(value)[0] for value in values.values()]
    for length in lengths[1:]:
        check = tf.debugging.assert_equal(length, lengths[0], f"{op}: lists of unlike length")
        lengths[0] = _after([check], lengths[0])
    return lengths[0]


def _pick_in_order(n: Any, length: Any, fewer_ok: bool, randomness: Any) -> Any:
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


def _after(checks: Sequence[Any], value: Any) -> Any:
    """Return the value after the checks have passed (eager checks are None and have passed)."""
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(value)


def _to_number(identity: Any) -> Any:
    """Convert an example's id, a number or a string, to scalar int64."""
    if identity.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(identity, tf.int64.max)
    return tf.cast(identity, tf.int64)


def _copy_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_containers(inner) for key, inner in value.items()}
    return value


def _flatten_into(flat: dict[str, Any], name: str, value: Any) -> None:
    if not isinstance(value, dict):
        flat[name] = value
        return
    for key, inner in value.items():
        _flatten_into(flat, f"{name}/{key}", inner)


def _read_table(mapping: str, npzkey: str, sep: str | None) -> tuple[list[str], Any]:
    """Read words and their numbers, an int32 or int64 array."""
    import fsspec
    import numpy as np

    opened: Any = fsspec.open(mapping, "rb")
    with opened as file:
        if mapping.endswith(".npz"):
            words = [str(word) for word in np.load(file, allow_pickle=False)[npzkey]]
            return words, np.arange(len(words), dtype=np.int64)
        lines = file.read().decode().splitlines()
    if sep is None:
        return lines, np.arange(len(lines), dtype=np.int64)
    pairs = [line.split(sep) for line in lines]
    return [word for word, _ in pairs], np.array([int(number) for _, number in pairs], np.int32)
