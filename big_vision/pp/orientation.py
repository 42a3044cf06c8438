"""Reads the EXIF orientation of a JPEG from its bytes in the graph, and turns images by it."""

from __future__ import annotations

import functools

from big_vision.tensorflow_setup import tf

UPRIGHT = 1
_TAG, _TYPE_SHORT = 0x0112, 3
# Bytes of an entry in a directory of TIFF, and the most entries to read.
_ENTRY_BYTES, _MOST_ENTRIES = 12, 128
# Of JPEG: first byte of every marker, segment of EXIF, end of the segments that can hold one.
_MARKER, _APP1, _ENDS = 0xFF, 0xE1, (0xD9, 0xDA)
_EXIF = b"Exif\0\0"


def read_orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Read the orientation, int32 of 1 to 8; 1 if the bytes have none or are no JPEG."""
    begin = _find_exif(encoded)
    header = _read(encoded, begin, 8)
    is_little = header[0] == ord("I")
    directory = begin + _join(header[4:], is_little)
    count = _join(_read(encoded, directory, 2), is_little)
    table = _read(encoded, directory + 2, _MOST_ENTRIES * _ENTRY_BYTES)
    table = tf.reshape(table, [_MOST_ENTRIES, _ENTRY_BYTES])
    is_tag = (_join(table[:, :2], is_little) == _TAG) & (tf.range(_MOST_ENTRIES) < count)
    is_tag &= _join(table[:, 2:4], is_little) == _TYPE_SHORT
    number = tf.reduce_max(tf.where(is_tag, _join(table[:, 8:10], is_little), 0))
    return tf.where((begin > 0) & (number >= 1) & (number <= 8), number, UPRIGHT)


def turn_upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turn and mirror [H, W, C], so that the image is upright."""
    turned = tf.cond(orientation >= 5, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)
    turned.set_shape([None, None, image.shape[-1]])
    for axis, numbers in ((1, (2, 3, 6, 7)), (0, (3, 4, 7, 8))):
        is_mirrored = tf.reduce_any(orientation == tf.constant(numbers))
        mirror = functools.partial(tf.reverse, turned, [axis])
        turned = tf.cond(is_mirrored, mirror, functools.partial(tf.identity, turned))
    return turned


def _find_exif(encoded: tf.Tensor) -> tf.Tensor:
    """Find the offset of the TIFF header in the first segment of EXIF; 0 if it does not exist."""

    def look(
        offset: tf.Tensor, _begin: tf.Tensor, _is_open: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        head = _read(encoded, offset, 4 + len(_EXIF))
        length = head[2] * 256 + head[3]
        is_exif = (head[1] == _APP1) & tf.reduce_all(head[4:] == tf.constant(list(_EXIF)))
        is_segment = (head[0] == _MARKER) & ~tf.reduce_any(head[1] == tf.constant(_ENDS))
        begin = tf.where(is_segment & is_exif, offset + 4 + len(_EXIF), 0)
        # Markers may be preceded by any number of bytes 0xFF.
        step = tf.where(head[1] == _MARKER, 1, 2 + length)
        return offset + step, begin, is_segment & ~is_exif

    def goes_on(_offset: tf.Tensor, _begin: tf.Tensor, is_open: tf.Tensor) -> tf.Tensor:
        return is_open

    start = tf.constant(2), tf.constant(0), tf.io.is_jpeg(encoded)
    return tf.while_loop(goes_on, look, start)[1]


def _read(encoded: tf.Tensor, begin: tf.Tensor, count: int) -> tf.Tensor:
    """Return int32 [count], zeros after the end of the bytes."""
    begin = tf.clip_by_value(begin, 0, tf.strings.length(encoded))
    taken = tf.strings.substr(encoded, begin, count)
    return tf.cast(tf.io.decode_raw(taken, tf.uint8, fixed_length=count), tf.int32)


def _join(parts: tf.Tensor, is_little: tf.Tensor) -> tf.Tensor:
    """Combine bytes [..., n] to numbers, in either order."""
    parts = tf.where(is_little, tf.reverse(parts, [-1]), parts)
    weights = [256**power for power in reversed(range(parts.shape[-1] or 0))]
    return tf.reduce_sum(parts * tf.constant(weights), axis=-1)
