"""Where the program's files lie, where it works, and how its commands are called.

The wheel holds the tree of a checkout in one package. Nothing is written into its folder: an
installed program works in the current directory, a checkout's in its root.
"""

from __future__ import annotations

import re
from pathlib import Path

PRODUCT = "tpudistil"  # the package, and the program that it installs
ROOT = Path(__file__).resolve().parents[2]  # holds main.py, configs/ and prices/
# What the texts of a checkout say -> what an installed program is called.
_COMMANDS = (
    (r"(?<![\w/.-])(python )?main\.py\b", f"{PRODUCT} train"),
    (r"\bdocs/(\w+)\.md\b", r"page \1 of the documents"),
    (r"(python -m )?\b(bill|tools)\.compile_for_tpu\b", f"{PRODUCT} compile"),
    (r"(python -m )?\btools\.([a-z]\w*)", rf"{PRODUCT} \2"),
    (r"\bpython -m tools\b", PRODUCT),
    (r"\bbash run_commands\.sh setup --([a-z-]+)", rf"pip install '{PRODUCT}[\1]'"),
    (r"\bbash run_commands\.sh (export|service|mirrors)\b", rf"pip install '{PRODUCT}[\1]'"),
    (r"\bbash run_commands\.sh setup\b", f"pip install '{PRODUCT}[xla]'"),
    (r"\bpip install -r requirements\.txt", f"pip install '{PRODUCT}[xla]'"),
    (
        r"(')(, and this program by \S+| installs requirements-\S+\.txt( and (runs|starts)( it)?)?"
        r"| and runs( it)?)",
        r"\1",
    ),
)


def is_installed() -> bool:
    """Return whether this is the package of a wheel, whose face a checkout's root does not have."""
    return (ROOT / "__init__.py").is_file()


def get_workplace() -> Path:
    """Return the directory of relative paths that children start in."""
    return Path.cwd() if is_installed() else ROOT


def find_bundled(path: str) -> str:
    """Return a path; if nothing is there, that of the program's own file of this name, if any."""
    own = ROOT / path
    return str(own) if not Path(path).exists() and own.is_file() else path


def name_commands(text: str) -> str:
    """Replace a checkout's commands in a text by the installed program's, where it is one."""
    if is_installed():
        for pattern, command in _COMMANDS:
            text = re.sub(pattern, command, text)
    return text
