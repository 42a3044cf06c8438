"""`tag`: words and remarks on runs."""

from __future__ import annotations

import argparse

from store.lineage.ancestors import BAD
from store.query.tags import change_note, change_tags, check_tags
from store.record.ids import check_name
from store.terminal import print_json
from tools.runs.find_runs import choose_records
from tools.runs.lineage import describe_students, find_kin
from utils.errors import UserError


def tag_runs(options: argparse.Namespace) -> None:
    """Change the tags of runs and print all tags that each has then."""
    if not options.add and not options.remove and options.note is None:
        raise UserError("tag: nothing to do; give --add TAG, --remove TAG or --note TEXT")
    for tag in options.add:
        check_name("--add", tag)
    records = choose_records(options, "tag", options.runs)
    for record in records:
        check_tags(record.folder)
        if missing := sorted(set(options.remove) - set(record.tags)):
            raise UserError(
                f"--remove {missing[0]!r}: {record.path} has no such tag, but "
                f"{', '.join(record.tags) or 'none at all'}; use one that it has"
            )
    tags = {}
    for record in records:
        try:
            if options.note is not None:
                change_note(record.folder, options.note)
            tags[record.path] = change_tags(record.folder, options.add, options.remove)
        except OSError as error:
            raise UserError(
                f"{record.folder} cannot be written: {error.strerror or error}; correct its rights"
            ) from error
    if options.json:
        print_json(tags)
        return
    for record in records:
        print(f"{record.path}: {' '.join(tags[record.path]) or 'no tags'}")
        if BAD in options.add and (students := find_kin(options, record).students):
            print(f"{record.path}: {describe_students(students)}")
