"""`python -m service.checker_child`: reads configurations, one a line, and checks each.

It imports what trains, so it is a program of its own. An answer is a JSON object in a line: `lines`
for people, or `error`.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout

from utils.error_codes import find_code
from utils.errors import UserError
from utils.json_types import JsonObject


def main() -> int:
    """Answer until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    with redirect_stdout(sys.stderr):
        for line in sys.stdin:
            answers.write(json.dumps(_check(json.loads(line))) + "\n")
            answers.flush()
    return 0


def _check(values: JsonObject) -> JsonObject:
    from job.check import check
    from job.summary import describe_bill, describe_job, find_bill, plan_job
    from utils.config.load import validate_config
    from utils.runtime.choice import choose_device

    try:
        config = validate_config(values)
        job = check(config, choose_device(config.runtime))
        plans = plan_job(job)
        return {"lines": describe_job(job) + describe_bill(plans), "bill": find_bill(plans)}
    except UserError as error:
        return {"error": " ".join(str(error).split()), "code": find_code(error)}
    except Exception as error:  # a model's own code may raise anything; `main.py` would end with it
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"error": f"main.py would end with {text[:500]}"}


if __name__ == "__main__":
    sys.exit(main())
