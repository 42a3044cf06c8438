"""Ops on labels, keys and other tensors."""

from __future__ import annotations

from big_vision.pp.registry import OPS


@OPS.register("onehot")
def get_onehot(depth, key="labels", key_result=None, multi=True, on=1.0, off=0.0):
    """Labels to float32: [depth] for a scalar, one multi-hot [depth] for a list.

    multi=False: [n, depth] for a list. A list's label out of range is an error with multi, and a
    row of `off` without.
    """

    def onehot(data, _randomness):
        import tensorflow as tf

        labels = tf.cast(data[key], tf.int64)
        if multi and labels.shape.rank > 0:
            hits = tf.scatter_nd(labels[:, None], tf.ones_like(labels, tf.float32), [depth])
            result = tf.where(hits > 0, tf.constant(on, tf.float32), tf.constant(off, tf.float32))
        else:
            result = tf.one_hot(labels, depth, float(on), float(off), dtype=tf.float32)
        data[key_result or key] = result
        return data

    return onehot


@OPS.register("keep")
def get_keep(*keys):
    """Only these keys; absent ones are ignored."""

    def keep(data, _randomness):
        return {key: value for key, value in data.items() if key in keys}

    return keep


@OPS.register("drop")
def get_drop(*keys):
    """All but these keys; absent ones are ignored."""

    def drop(data, _randomness):
        return {key: value for key, value in data.items() if key not in keys}

    return drop
