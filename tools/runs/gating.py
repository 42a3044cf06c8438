"""`gate`: whether new runs are worse than others by more than is allowed."""

from __future__ import annotations

import argparse

from store.quality.findings import print_findings, publish_findings, read_gates
from store.quality.gates import (
    check_finished,
    check_known,
    check_sides,
    get_code,
    settle_direction,
)
from store.terminal import print_json
from tools.runs.comparing import read_side
from tools.runs.places import find_damage
from utils.errors import UserError


def gate_runs(options: argparse.Namespace) -> int:
    """Print what each gate says; gives the exit code: 0, 1 for a regression, 3 for undecided.

    Raises:
      UserError: a gate, a file or a run with a fault.
    """
    gates, undecided = read_gates(options)
    if not gates:
        raise UserError("gate: nothing to hold the runs against; give --gate or --gates FILE")
    base, new = (read_side(options, text) for text in (options.base, options.new))
    if not options.unfinished:
        check_finished((base, new))
    if damage := find_damage(record for side in (base, new) for record in side.records):
        raise UserError(
            f"gate: {'; '.join(damage)}: a verdict on it would be worth nothing; take the files "
            "from a copy, or name other runs"
        )
    check_known(gates, (base, new))
    gates = [settle_direction(gate) for gate in gates]
    findings = [check_sides(gate, base, new) for gate in gates]
    code = get_code(findings, undecided)
    if options.json:
        rows = publish_findings(findings)
        print_json({"base": base.name, "new": new.name, "findings": rows, "exit_code": code})
    else:
        print_findings(findings, (base.name, new.name), code)
    return code
