"""`gate`: whether new runs are worse than others by more than is allowed."""

from __future__ import annotations

import argparse

from store.quality.findings import print_findings, publish_findings, read_gates
from store.quality.gates import get_code, judge_sides
from store.terminal import print_json
from tools.runs.find_runs import find_damage, read_side
from utils.errors import UserError


def gate_runs(options: argparse.Namespace) -> int:
    """Print the result of each gate; return 0, 1 for a regression or 3 for undecided.

    Raises:
      UserError: a fault of a gate, a file or a run.
    """
    gates, undecided = read_gates(options)
    if not gates:
        raise UserError("gate needs at least one gate; give --gate or --gates FILE")
    base, new = (read_side(options, text) for text in (options.base, options.new))
    if damage := find_damage(record for side in (base, new) for record in side.records):
        raise UserError(
            f"gate: {'; '.join(damage)}: gates need undamaged runs; take the files from a copy, or "
            "name other runs"
        )
    findings = judge_sides(gates, base, new, unfinished=options.unfinished)
    code = get_code(findings, undecided)
    if options.json:
        rows = publish_findings(findings)
        print_json({"base": base.name, "new": new.name, "findings": rows, "exit_code": code})
    else:
        print_findings(findings, (base.name, new.name), code)
    return code
