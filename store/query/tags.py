"""Tags and a note that users give runs, in a file of their own: `run.json` is the trainer's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from store.record.ids import check_name
from utils.errors import UserError
from utils.json_types import JsonObject, load_json
from utils.storage.folder import Folder

TAGS_FILE = "tags.json"
# The key of filters, and the tag of runs that lists leave out by default.
TAG = "tag"
ARCHIVED = "archived"
MOST_NOTE = 4000
_TRIES = 100


def parse_tags(text: str) -> list[str]:
    """Parse the tags of a file's text; empty if it is damaged."""
    try:
        content: Any = load_json(text)
        tags = content["tags"]
    except (ValueError, TypeError, KeyError):
        return []
    return sorted({tag for tag in tags if isinstance(tag, str)}) if isinstance(tags, list) else []


def parse_note(text: str) -> str:
    """Parse the note of a file's text; empty without one, or if the file is damaged."""
    try:
        content: Any = load_json(text)
        note = content.get("note", "")
    except (ValueError, AttributeError):
        return ""
    return note if isinstance(note, str) else ""


def change_tags(folder: Folder, add: Iterable[str], remove: Iterable[str]) -> list[str]:
    """Add tags to a run and remove others; return those that it has then."""
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
    """Replace a user's note on a run, or remove it if empty; UserError if it is invalid."""
    note = note.replace("\r\n", "\n").strip()
    if len(note) > MOST_NOTE:
        raise UserError(f"note must have at most {MOST_NOTE:,} characters, got {len(note):,}")
    if any(not (letter.isprintable() or letter in "\n\t") for letter in note):
        raise UserError("note must be plain text; remove its control characters")
    return _change(folder, lambda tags, _: (sorted(tags), note))[1]


def _change(
    folder: Folder, change: Callable[[set[str], str], tuple[list[str], str]]
) -> tuple[list[str], str]:
    """Write the result of `change` on tags and note; retry if another program writes meanwhile."""
    for _ in range(_TRIES):
        text, version = folder.read_claim(TAGS_FILE) or (None, None)
        _refuse_damage(folder, text)
        tags, note = parse_tags(text or ""), parse_note(text or "")
        changed = change(set(tags), note)
        if changed == (tags, note):
            return changed
        if folder.write_claim(TAGS_FILE, _format(*changed), version) is not None:
            return changed
    raise OSError(f"{folder}/{TAGS_FILE}: other programs write it all the time")


def check_tags(folder: Folder) -> None:
    """Refuse a run whose tags are damaged, before anything is written."""
    _refuse_damage(folder, folder.read_texts([TAGS_FILE]).get(TAGS_FILE))


def _refuse_damage(folder: Folder, text: str | None) -> None:
    if text is not None and not is_whole(text):
        raise UserError(
            f"{folder}/{TAGS_FILE} is damaged, so its tags are unknown; delete it to begin anew, "
            "or move the run away by validate --quarantine DIR"
        )


def is_whole(text: str) -> bool:
    """Return whether a file of tags has its checksum or, if older, the exact form of then."""
    try:
        content: Any = load_json(text)
        old = json.dumps({"schema_version": 2, "tags": content["tags"]}) + "\n"
        return text in (_format(content["tags"], content.get("note", "")), old)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def _format(tags: list[str], note: str) -> str:
    import google_crc32c

    content: JsonObject = {"schema_version": 2, "tags": tags}
    if note:  # without one it is the file that earlier programs read
        content["note"] = note
    content["crc32c"] = f"{google_crc32c.value(json.dumps(content).encode()):08x}"
    return json.dumps(content) + "\n"
