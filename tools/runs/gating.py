"""`gate`: whether new runs are worse than others by more than is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from store.compare import Side
from store.compare.sides import find_entry
from store.gates import Gate, check_sides, get_code, settle_direction
from tools.runs.comparing import read_side
from tools.runs.findings import print_findings, publish_findings, read_gates
from tools.runs.printing import print_json
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


def check_known(gates: Sequence[Gate], sides: Sequence[Side]) -> None:
    """A number of the catalogue may be missing, which is a finding; what nobody knows is a typo."""
    from store.filters import check_keys

    known = {name for side in sides for one in side.records for name in one.values}
    check_keys([g.metric for g in gates if find_entry(g.metric) is None], known, "--gate")
