"""scikit-learn's California housing, fetched by scikit-learn if a download is allowed."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.prepare_dataset import write
from tools.prepare_dataset.tfds import ALLOW, add_allow_flag, is_download_allowed
from utils.errors import UserError

_NAME = "california_housing"


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `california_housing`."""
    housing = commands.add_parser(_NAME, help="rows of numbers for data.source=sklearn")
    housing.add_argument("--root", default="data", help="data.root of the runs (data)")
    add_allow_flag(housing)
    housing.set_defaults(prepare=prepare_housing)


def prepare_housing(arguments: argparse.Namespace) -> Path:
    """Fetch the table by scikit-learn, unless it exists; a UserError if that cannot be done."""
    from sklearn.datasets import fetch_california_housing

    root = write.get_root(arguments.root, "--root")
    is_allowed = is_download_allowed(arguments)
    if not is_allowed and not list(root.glob("cal_housing*.pkz")):
        raise UserError(
            f"{_NAME}: a download would fetch 1 file of about 0.4 MB and write it below {root}; "
            f"allow it by --allow-download or {ALLOW}=1"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        fetch_california_housing(data_home=str(root), download_if_missing=is_allowed)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{_NAME} could not be fetched: {type(error).__name__}: {reason[:300]}; mend that and "
            "run the same command again"
        ) from error
    return root
