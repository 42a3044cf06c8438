"""Whether what is read of a run that has ended is what its commit record says it left behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from store.quality.validation import check_bytes
from store.query.record import RunRecord
from store.record.history import METRICS_FILE
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.spans import SPANS_FILE
from store.record.summary import SUMMARY_FILE, read_summary

# What comparisons, gates, traces and costs read.
READ_FILES = (RUN_FILE, METRICS_FILE, SPANS_FILE, CONFIG_FILE)


def find_unfit(record: RunRecord, files: Collection[str] = READ_FILES) -> Iterator[tuple[str, str]]:
    """Files of a complete run that do not fit its summary, and why; none of one without a summary.

    A run that still goes on, and one of an earlier program, have no commit record.
    """
    if not record.is_complete:
        return
    text = record.folder.read_texts([SUMMARY_FILE]).get(SUMMARY_FILE)
    if text is None:
        if record.facts.get("summary") == SUMMARY_FILE:
            yield SUMMARY_FILE, f"is not there, but {RUN_FILE} names it"
        return
    told = read_summary(text)
    if told is None:
        yield SUMMARY_FILE, "has other bytes than its checksum says"
        return
    for one in told.get("files", []):
        if one["path"] in files:
            yield from ((fault.file, fault.text) for fault in check_bytes(record.folder, one))
