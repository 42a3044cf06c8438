"""Outputs that belong to an example and an epoch, whatever its batch.

Published ones say of each image which part of it the teacher saw. The op `stored_view` shows a
student that part, so nothing of the run's stream decides the outputs but the dataset and those
views: order, seed and batch size are the run's own.
"""

from __future__ import annotations

from big_vision.pp.builder import parse_section, split_sections
from big_vision.pp.stored_views import read_view_facts
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject

OP = "stored_view"
# Parts of a stream's description that decide such outputs, beside the views.
_KEPT = ("dataset", "dataset_files", "image_key", "mixing", "random_erasing", "erasing_mode")
_KEPT += ("num_classes",)
# Ops that may stand before and after the op: they select no pixels.
_BEFORE = ("decode",)
_AFTER = ("value_range", "vgg_value_range", "clip_value_range", "keep", "drop", "onehot")


def find_views(stream: JsonMapping, place: object) -> str:
    """Return the folder of the views that a run shows; UserError if it shows something else.

    `stream` is the run's description of it; `place` names the cache in messages.
    """
    train_pp = stream["train_pp"]
    copied = next((name for name in ("repeats", "sample_weights", "mix") if name in stream), None)
    if copied is not None:
        raise UserError(
            f"data.{copied} ({stream[copied]}) is not supported with {str(place)!r}, which has one "
            "output of an example in an epoch of one dataset; remove it"
        )
    calls = [parse_section(section) for section in split_sections(train_pp)]
    names = [call.name for call in calls]
    number = names.index(OP) if OP in names else -1
    before, after = names[: max(number, 0)], names[number + 1 :]
    if number < 0 or set(before) - set(_BEFORE) or set(after) - set(_AFTER):
        raise UserError(
            f"data.train_pp ({train_pp!r}) shows other images than those of {str(place)!r}; set it "
            f"to decode(precise=True)|{OP}(FOLDER OF THE VIEWS, SIZE)|VALUE RANGE"
        )
    call = calls[number]
    return str(call.args[0] if call.args else call.kwargs["place"])


def describe_images(stream: JsonMapping, place: object) -> JsonObject:
    """Return the parts of a run's stream that decide outputs; `views` replaces data.train_pp."""
    views = read_view_facts(find_views(stream, place))
    kept = {name: stream[name] for name in _KEPT if stream.get(name) is not None}
    return {**kept, "views": views.digest}
