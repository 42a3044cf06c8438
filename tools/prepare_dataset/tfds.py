"""Any dataset of TFDS, fetched and prepared by TFDS itself, if a download is allowed."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tools.prepare_dataset import write
from utils.errors import UserError, get_near_names

ALLOW = "ALLOW_DOWNLOAD"
_NAME = re.compile(r"\w+(/[\w.+-]+)?(:\d+\.\d+\.\d+)?")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand `tfds`."""
    tfds = commands.add_parser("tfds", help="a dataset that TFDS knows, such as mnist or cifar10")
    add = tfds.add_argument
    add("name", metavar="NAME", help="as TFDS has it: cifar10, glue/cola, mnist:3.0.1")
    allow = f"fetch it from the network; {ALLOW}=1 in the environment does the same"
    add("--allow-download", action="store_true", help=allow)
    tfds.set_defaults(prepare=prepare_tfds)
    write.add_place_flags(tfds)


def prepare_tfds(arguments: argparse.Namespace) -> Path:
    """Have TFDS fetch and write a dataset below the root.

    Raises:
      UserError: TFDS does not know it, nobody has allowed a download, or it failed.
    """
    root = write.get_root(arguments.out)
    builder = create_builder(arguments.name, root, arguments.format)
    target = Path(builder.data_dir)
    if write.is_complete(target):
        write.refuse_other_format(target, arguments.format, "choose another root")
        print("is there already; nothing is fetched", file=sys.stderr)
        return target
    write.check_target(target, "--out")
    plan = describe_plan(builder, root)
    if not (arguments.allow_download or os.environ.get(ALLOW, "0") not in ("", "0")):
        raise UserError(
            f"{arguments.name}: a download would {plan}; allow it by --allow-download or {ALLOW}=1"
        )
    print(plan, file=sys.stderr)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the place alone is this program's answer
            builder.download_and_prepare(download_dir=get_downloads(root))
    except (OSError, AssertionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{arguments.name} could not be fetched and prepared: {type(error).__name__}: "
            f"{reason[:300]}; mend that and run the same command again"
        ) from error
    return target


def create_builder(name: str, root: Path, file_format: str | None) -> Any:
    """TFDS's builder of a dataset; nothing is fetched.

    Raises:
      UserError: no such dataset, version or configuration of one.
    """
    import tensorflow_datasets as tfds

    if not _NAME.fullmatch(name):
        raise UserError(f"NAME ({name!r}) is none of TFDS; write it as cifar10 or cifar10:3.0.2")
    try:
        return tfds.builder(name, data_dir=str(root), file_format=file_format)
    except tfds.core.registered.DatasetNotFoundError as error:
        near = get_near_names(name, tfds.list_builders(with_community_datasets=False))
        hint = f"did you mean {' or '.join(near)}?" if near else "its catalogue lists them"
        raise UserError(f"NAME ({name!r}) is no dataset of TFDS; {hint}") from error
    except ImportError as error:
        raise UserError(f"NAME ({name!r}): TFDS says {error}; pip install that module") from error
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"NAME ({name!r}) is not what TFDS has: {reason[:300]}") from error


def describe_plan(builder: Any, root: Path) -> str:
    """What a download would fetch, how large it is and where to, from what TFDS ships of it."""
    files = builder.url_infos or {}
    what = "fetch files whose number and size TFDS does not tell"
    if files:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        size = _show_bytes(sum(info.size for info in files.values()))
        hosts = ", ".join(sorted({urlparse(url).hostname or url for url in files}))
        what = f"fetch {count} of {size} in all from {hosts}"
    plan = f"{what} and write {builder.info.full_name} below {root}"
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        plan += f" (what needs a login of yours belongs into {get_downloads(root)}/manual first)"
    return plan


def get_downloads(root: Path) -> Path:
    """Where fetched files are kept; TFDS looks for those fetched by hand in `manual` below it."""
    return root / "downloads"


def _show_bytes(size: int) -> str:
    number, place = float(size), 0
    while number >= 1024 and place < len(_UNITS) - 1:
        number, place = number / 1024, place + 1
    return f"{number:.{1 if place else 0}f} {_UNITS[place]}"
