"""Words and a note that people give runs, in a file of their own: `run.json` is the trainer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from store.record.ids import check_name
from utils.errors import UserError
from utils.json_types import JsonObject, load_json
from utils.storage.folder import Folder

TAGS_FILE = "tags.json"
# The key of filters.
TAG = "tag"
# The tag of runs that lists leave out unless they are asked for.
ARCHIVED = "archived"
MOST_NOTE = 4000
_TRIES = 100


def parse_tags(text: str) -> list[str]:
    """The tags that a file's text holds; none if it is damaged."""
    try:
        found = load_json(text)["tags"]
    except (ValueError, TypeError, KeyError):
        return []
    return sorted({tag for tag in found if isinstance(tag, str)}) if isinstance(found, list) else []


def parse_note(text: str) -> str:
    """The note that a file's text holds; empty if there is none, or the file is damaged."""
    try:
        note = load_json(text).get("note", "")
    except (ValueError, AttributeError):
        return ""
    return note if isinstance(note, str) else ""


def change_tags(folder: Folder, add: Iterable[str], remove: Iterable[str]) -> list[str]:
    """Give a run tags and take others off; gives what it has then.

    Raises:
      UserError: no word that a filter could name, a tag that is not there, or a file of tags that
        is damaged: a new checksum would hide that.
      OSError: the place cannot be written.
    """
    add, remove = set(add), set(remove)
    for tag in add:
        check_name("TAG", tag)

    def change(tags: set[str], note: str) -> tuple[list[str], str]:
        if missing := sorted(remove - tags):
            raise UserError(
                f"--remove {missing[0]!r}: the run {folder} has no such tag, but "
                f"{', '.join(sorted(tags)) or 'none at all'}; name one of its tags"
            )
        return sorted((tags | add) - remove), note

    return _change(folder, change)[0]


def change_note(folder: Folder, note: str) -> str:
    """Write a person's note on a run in place of the one before; empty removes it.

    Raises:
      UserError: it is too long, or the file of tags is damaged.
      OSError: the place cannot be written.
    """
    note = note.replace("\r\n", "\n").strip()
    if len(note) > MOST_NOTE:
        raise UserError(f"note: {len(note):,} letters are too many; write at most {MOST_NOTE:,}")
    if any(not (letter.isprintable() or letter in "\n\t") for letter in note):
        raise UserError("note: it holds control characters; write plain text")
    return _change(folder, lambda tags, _: (sorted(tags), note))[1]


def _change(
    folder: Folder, change: Callable[[set[str], str], tuple[list[str], str]]
) -> tuple[list[str], str]:
    """Write what `change` makes of tags and note, whoever else writes at the same time."""
    for _ in range(_TRIES):
        known = folder.read_claim(TAGS_FILE)
        _refuse_damage(folder, known[0] if known else None)
        tags, note = (parse_tags(known[0]), parse_note(known[0])) if known else ([], "")
        found = change(set(tags), note)
        if found == (tags, note):
            return found
        text = _format(*found)
        if folder.write_claim(TAGS_FILE, text, known[1] if known else None) is not None:
            return found
    raise OSError(f"{folder}/{TAGS_FILE}: others write it all the time")


def check_tags(folder: Folder) -> None:
    """Refuse a run whose tags are damaged, before anything is written.

    Raises:
      UserError: they are; names the file.
    """
    _refuse_damage(folder, folder.read_texts([TAGS_FILE]).get(TAGS_FILE))


def _refuse_damage(folder: Folder, text: str | None) -> None:
    if text is not None and not is_whole(text):
        raise UserError(
            f"{folder}/{TAGS_FILE} is damaged, so nobody knows which tags it had; delete it to "
            "begin anew, or move the run away by validate --quarantine DIR"
        )


def is_whole(text: str) -> bool:
    """Whether a file of tags is as it was written, to the bit; older ones have no checksum."""
    try:
        told = load_json(text)
        old = json.dumps({"schema_version": 2, "tags": told["tags"]}) + "\n"
        return text in (_format(told["tags"], told.get("note", "")), old)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def _format(tags: list[str], note: str) -> str:
    import google_crc32c

    told: JsonObject = {"schema_version": 2, "tags": tags}
    if note:  # without one it is the file that earlier programs read
        told["note"] = note
    told["crc32c"] = f"{google_crc32c.value(json.dumps(told).encode()):08x}"
    return json.dumps(told) + "\n"
