"""Explains why an example cannot be read, without TensorFlow's wording."""

from __future__ import annotations

import re

from big_vision.pp.builder import parse_section, split_sections
from big_vision.pp.registry import Example
from big_vision.pp.shapes import JPEG_OPS
from big_vision.tensorflow_setup import tf
from utils.errors import UserError

# First bytes of files of each kind.
_BEGINNINGS = {
    "JPEG": (b"\xff\xd8",),
    "PNG": (b"\x89PNG",),
    "GIF": (b"GIF8",),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*"),
}
_DECODABLE = ("JPEG", "PNG", "GIF", "BMP", "WebP")
_FILE_WORDS = ("file", "path")
_REASON_CHARS = 200
# TensorFlow's wrapping of the reason: graph nodes, op names, where the error was counted.
_NOISE = re.compile(
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w+\]|name: *$|Error in user-defined function.*?:|"
    r"\d+ root error\(s\) found\.|\(\d+\) \w+( \w+)?:|\d+ (successful|derived) .*$|"
    r"Original stack trace.*$|\(defined at.*?\)|(\d+ )?transformation with iterator: \S+|"
    r"for '\{\{node.*$",
    flags=re.DOTALL,
)


def create_record_error(
    record: str, error: Exception, raw: Example | None, spec: tuple[str, str]
) -> UserError:
    """Create the error that names an unreadable record, the reason, and the way out.

    Args:
      record: its file and position.
      raw: its features as they are stored; None if even these cannot be read.
      spec: the preprocessing string's key and text.
    """
    key, text = spec
    restore = "restore the file, or let a few bad records pass with data.skip_corrupt"
    if raw is None:
        return UserError(f"{record} cannot be read ({get_reason(error)}); {restore}")
    image = _get_bytes(raw.get("image"))
    image_format = None if image is None else find_format(image)
    name = _find_file_name(raw)
    jpeg_ops = [s.text for s in split_sections(text) if parse_section(s).name in JPEG_OPS]
    if jpeg_ops and image_format in _DECODABLE and image_format != "JPEG":
        op = jpeg_ops[0].partition("(")[0].strip()
        general = jpeg_ops[0].replace(op, "decode|inception_crop")
        return UserError(
            f"{record} cannot be read ({name}it is a {image_format}, but {op} of {key} reads only "
            f"JPEGs); write {general} instead"
        )
    if image_format is not None and image_format not in _DECODABLE:
        return UserError(
            f"{record} cannot be read ({name}it is a {image_format}, which decode does not "
            f"support; it reads {', '.join(_DECODABLE)}); convert the file, or leave it out"
        )
    reason = get_reason(error)
    if image is not None and image_format is None:
        reason = f"{len(image)} bytes that are no image; {reason}" if image else "it is empty"
    op = get_failed_op(error)
    if op and not op.startswith("decode"):
        restore = f"change {key}, or let a few such records pass with data.skip_corrupt"
        reason = f"{key} fails in {op}: {reason}"
    return UserError(f"{record} cannot be read ({name}{reason}); {restore}")


def create_string_error(pp_key: str, error: Exception) -> UserError:
    """Create the error of a string that cannot run on any of the dataset's examples."""
    op = get_failed_op(error)
    if isinstance(error, KeyError):
        return UserError(
            f"{pp_key} cannot run {op}: the example has no {error} there; the image is 'image' "
            "under any data.image_key, other features keep their names"
        )
    if "of type string" in op and not op.startswith("decode"):
        return UserError(
            f"{pp_key} cannot run {op}: it is still encoded; begin the string with decode"
        )
    way_out = "correct the string"
    if re.search(r"of type uint8 and shape \(\w+, \w+\)", op):
        way_out = "give it a channel first, with reshape((height, width, 1))"
    return UserError(f"{pp_key} cannot run {op}: {get_reason(error)}; {way_out}")


def get_failed_op(error: BaseException) -> str:
    """Return the op that raised an error, as `get_preprocess_fn` notes it; empty if not noted."""
    return next(iter(getattr(error, "__notes__", ())), "")


def find_format(image: bytes) -> str | None:
    """Return the format of an encoded image by its first bytes; None if unknown."""
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        return "WebP"
    return next((name for name, first in _BEGINNINGS.items() if image.startswith(first)), None)


def get_reason(error: BaseException) -> str:
    """Return the message of TensorFlow or a file system in one line, without graph nodes."""
    if "Dataset was empty" in str(error):
        return "the file ends before it"
    if "No such file or directory" in str(error):
        # The path, which may be longer than a line, is in the record's name.
        return "No such file or directory"
    text = " ".join(_NOISE.sub(" ", str(error)).split()).strip(" :;")
    return text[:_REASON_CHARS] or type(error).__name__


def _get_bytes(value: tf.Tensor | bytes | None) -> bytes | None:
    content = value.numpy() if hasattr(value, "numpy") else value
    return content if isinstance(content, bytes) else None


def _find_file_name(raw: Example) -> str:
    """Return `cat/1.jpg: ` if a feature holds the example's file name, else nothing."""
    for key, value in raw.items():
        if any(word in key for word in _FILE_WORDS):
            text = _get_bytes(value)
            if text:
                return f"{text.decode(errors='replace')}: "
    return ""
