"""Any dataset of TFDS, fetched and prepared by TFDS if a download is allowed."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from tools.prepare_dataset import write
from utils.errors import UserError, get_near_names

if TYPE_CHECKING:
    from tensorflow_datasets.core import DatasetBuilder

ALLOW = "ALLOW_DOWNLOAD"
_NAME = re.compile(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `tfds`."""
    tfds = commands.add_parser("tfds", help="a dataset of TFDS, such as mnist or cifar10")
    text = "its name in TFDS: cifar10, glue/cola, mnist:3.0.1"
    tfds.add_argument("name", metavar="NAME", help=text)
    add_allow_flag(tfds)
    tfds.set_defaults(prepare=prepare_tfds)
    write.add_root_flags(tfds)


def add_allow_flag(command: argparse.ArgumentParser) -> None:
    """Add --allow-download."""
    allow = f"fetch it from the network; {ALLOW}=1 in the environment does the same"
    command.add_argument("--allow-download", action="store_true", help=allow)


def is_download_allowed(arguments: argparse.Namespace) -> bool:
    """Return whether the flag or the environment allows a download."""
    return arguments.allow_download or os.environ.get(ALLOW, "0") not in ("", "0")


def prepare_tfds(arguments: argparse.Namespace) -> Path:
    """Fetch and write a dataset by TFDS; a UserError if it is unknown, or cannot be fetched."""
    root = write.get_root(arguments.out)
    builder = create_builder(arguments.name, root, arguments.format)
    target = Path(builder.data_dir)
    if write.is_complete(target):
        write.refuse_other_format(target, arguments.format, "choose another root")
        print("is there already; nothing is fetched", file=sys.stderr)
        return target
    write.check_target(target, "--out")
    plan = describe_plan(builder, root)
    if not is_download_allowed(arguments):
        raise UserError(
            f"{arguments.name}: a download would {plan}; allow it by --allow-download or {ALLOW}=1"
        )
    print(plan, file=sys.stderr)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout gets the path alone
            builder.download_and_prepare(download_dir=get_downloads(root))
    except (OSError, AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{arguments.name} could not be fetched and prepared: {type(error).__name__}: "
            f"{reason[:300]}; mend that and run the same command again"
        ) from error
    return target


def create_builder(name: str, root: Path, file_format: str | None) -> DatasetBuilder:
    """Create TFDS's builder of a dataset, without fetching; a UserError if it is unknown."""
    import tensorflow_datasets as tfds

    if not _NAME.fullmatch(name):
        raise UserError(f"NAME ({name!r}) is no name of TFDS; write it as cifar10 or cifar10:3.0.2")
    try:
        return tfds.builder(name, data_dir=str(root), file_format=file_format)
    except tfds.core.registered.DatasetNotFoundError as error:
        near = get_near_names(name, tfds.list_builders(with_community_datasets=False))
        hint = f"did you mean {' or '.join(near)}?" if near else "its catalogue lists them"
        raise UserError(f"NAME ({name!r}) is no dataset of TFDS; {hint}") from error
    except ImportError as error:
        raise UserError(f"NAME ({name!r}): {error}; pip install that module") from error
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"NAME ({name!r}) is not in TFDS: {reason[:300]}") from error


def describe_plan(builder: DatasetBuilder, root: Path) -> str:
    """Describe what a download fetches, its size and target, from the metadata in TFDS."""
    files = builder.url_infos or {}
    what = "fetch files of unknown number and size"
    if files:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        size = _show_bytes(sum(info.size for info in files.values()))
        hosts = ", ".join(sorted({urlparse(url).hostname or url for url in files}))
        what = f"fetch {count} of {size} in all from {hosts}"
    plan = f"{what} and write {builder.info.full_name} below {root}"
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        plan += f" (files that need a login go into {get_downloads(root)}/manual first)"
    return plan


def get_downloads(root: Path) -> Path:
    """Return the directory of fetched files; TFDS reads manual downloads in `manual` below it."""
    return root / "downloads"


def _show_bytes(size: int) -> str:
    power = min((max(size, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"
