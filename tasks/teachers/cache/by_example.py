"""Answers that belong to an example and an epoch, whatever batch it comes in.

What others have published says of each image which part of it the teacher saw. The op `stored_view`
shows a student that part, so nothing of the run's stream decides the answers but the dataset and
those views: order, seed and batch size are the run's own.
"""

from __future__ import annotations

from big_vision.pp.builder import parse_section, split_sections
from big_vision.pp.stored_views import read_view_facts
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject

OP = "stored_view"
# Of a stream's description, what such answers depend on beside the views.
_KEPT = (
    "dataset", "dataset_files", "image_key", "mixing", "random_erasing", "erasing_mode",
    "num_classes",
)  # fmt: skip
# What may stand beside the op: it changes no pixel before, and is undone by nobody after.
_BEFORE = ("decode",)
_AFTER = ("value_range", "vgg_value_range", "clip_value_range", "keep", "drop", "onehot")


def find_views(stream: JsonMapping, place: object) -> str:
    """The folder of the views that a run shows.

    Args:
      stream: the run's description of it.
      place: of the cache, for messages.

    Raises:
      UserError: it shows something else.
    """
    train_pp = stream["train_pp"]
    if stream.get("repeats", 1) != 1:
        raise UserError(
            f"data.repeats ({stream['repeats']}) shows an example several times an epoch, of which "
            f"{str(place)!r} has one answer; let it be 1"
        )
    calls = [parse_section(section) for section in split_sections(train_pp)]
    names = [call.name for call in calls]
    number = names.index(OP) if OP in names else -1
    before, after = names[: max(number, 0)], names[number + 1 :]
    if number < 0 or set(before) - set(_BEFORE) or set(after) - set(_AFTER):
        raise UserError(
            f"data.train_pp ({train_pp!r}) shows other images than the stored answers of "
            f"{str(place)!r} are to; let it be decode(precise=True)|{OP}(FOLDER OF THE VIEWS, "
            "SIZE)|VALUE RANGE and nothing else"
        )
    call = calls[number]
    return str(call.args[0] if call.args else call.kwargs["place"])


def describe_images(stream: JsonMapping, place: object) -> JsonObject:
    """What of a run's stream such answers depend on; `views` stands for data.train_pp.

    Raises:
      UserError: the run shows other images, or the views are not there.
    """
    views = read_view_facts(find_views(stream, place))
    kept = {name: stream[name] for name in _KEPT if stream.get(name) is not None}
    return {**kept, "views": views.digest}
