"""Prepares a Google Cloud project: the TPU service, and a bucket for datasets and runs.

    python -m train.project PROJECT --bucket gs://BUCKET --location us-west4

Existing services and buckets stay as they are. Log in before, by `gcloud auth login`; request quota
for TPUs on the console's page of quotas.
"""

from __future__ import annotations

import argparse
import sys

from train import commands
from train.execute import Executor
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = create_program_parser(__doc__, prog="python -m train.project")
    add = parser.add_argument
    add("project", help="id of the project")
    add("--bucket", required=True, help="gs://NAME, in the region of the TPUs")
    add("--location", required=True, help="the region, such as us-west4")
    add("--dry-run", action="store_true", help="print the commands instead of running them")
    return parser


def prepare(arguments: argparse.Namespace) -> None:
    """Enable the services, create the bucket; a UserError if its name is bad, or on refusal."""
    executor = Executor(dry_run=arguments.dry_run)
    project, bucket = arguments.project, arguments.bucket.rstrip("/")
    name = bucket.removeprefix("gs://")
    if not bucket.startswith("gs://") or "/" in name or not name:
        raise UserError(f"--bucket ({arguments.bucket}) is not gs://NAME; write one bucket's URL")
    executor.require(commands.enable_services(project))
    answer = executor.ask(commands.describe_bucket(project, bucket))
    if answer.code and "not found" not in answer.error.lower():
        raise UserError(f"Google Cloud returned no state of {bucket}: {answer.reason}; see gcloud")
    if answer.code or executor.dry_run:
        executor.require(commands.create_bucket(project, bucket, location=arguments.location))
    if not executor.dry_run:
        print(f"{project}: services are on, {bucket} {'is created' if answer.code else 'exists'}")


main = CommandLine(create_parser, prepare)

if __name__ == "__main__":
    sys.exit(main())
