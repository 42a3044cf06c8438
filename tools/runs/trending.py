"""`trend`: benchmark reports over time."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.text import Text

from store.trends import FOLDER, keep_report, read_trends
from store.wording import format_value
from tools.runs.places import check_store
from tools.runs.printing import create_console, create_table, draw_line, print_json
from utils.errors import EXIT_FAILED, UserError
from utils.storage import to_path

_STYLES = {"worse": "bold red", "much worse": "bold red", "better": "green", "too few": "dim"}


def show_trends(options: argparse.Namespace) -> int:
    """Keep reports that are given, print each figure's trend; exit code 1 where one is worse.

    Raises:
      UserError: a file that is no report, or no reports at all.
    """
    check_store(options.store)
    store = to_path(options.store)
    reports = []
    for path in options.add:
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"--add {path} cannot be read: {error}; give a JSON report") from error
    try:
        kept = [str(keep_report(store, report)) for report in reports]
    except OSError as error:
        raise UserError(
            f"--store {options.store!r} cannot be written: {error.strerror}; mend its rights"
        ) from error
    trends = read_trends(store)
    if not trends:
        raise UserError(f"trend: {store / FOLDER} holds no reports; give some by --add FILE")
    is_worse = any(one.verdict in ("worse", "much worse") for one in trends)
    if options.json:
        print_json({"kept": kept, "trends": [asdict(one) for one in trends]})
        return EXIT_FAILED if is_worse else 0
    table = create_table(
        "identity", "figure", "reports>", "median>", "newest>", "worse by>", "", "verdict"
    )
    for one in trends:
        table.add_row(
            one.identity, one.figure, str(len(one.values)), format_value(one.median),
            format_value(one.values[-1]), f"{one.worse:+.1%}", draw_line(one.values[-23:]),
            Text(one.verdict, style=_STYLES.get(one.verdict, "")),
        )  # fmt: skip
    create_console().print(table)
    return EXIT_FAILED if is_worse else 0
