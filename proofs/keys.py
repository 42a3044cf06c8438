"""Writes docs/keys.md: every key of the configuration as its field declares it.

`python -m proofs.keys` prints the page, `--write` writes it. A test holds the page against the
fields, so that an added key, another default or another rule shows in review.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from utils.config.data import EvalSection
from utils.config.distill import LossTerm, TeacherSection
from utils.config.keys import get_neutral_keys, get_resume_rules
from utils.config.metadata import ConfigSection, read_key_info
from utils.config.sections import RunConfig
from utils.programs import create_program_parser, run_program

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"
# Sections whose elements stand in a list, by the list's key.
ELEMENTS = {
    "data.evals[]": EvalSection,
    "distill.losses[]": LossTerm,
    "distill.teachers[]": TeacherSection,
}
_HEAD = """\
# Keys of the configuration

Written by `python -m proofs.keys --write` from the fields in `utils/config/`; a flag is
`--KEY=VALUE`.

- **resume**: what another value means to a run that continues. *free*: nothing. *warns*: it is
  reported, because bits may differ. *between epochs*: nothing at the end of an epoch, refused
  within one. Empty: refused with both values; `--run.allow_changes='["optim.lr"]'` allows it.
- **only**: devices and tasks that support the key, or its value; empty: all.
- **notes**: short flags; *path*: a file or directory, or a URL of one; *neutral*: no value of it
  changes what is learnt or measured; *stream*: it decides which examples come when and how they
  look, so that a cache of teachers depends on it; *needs*, *excludes*: keys that must or cannot be
  set together with it.
"""


def main(argv: list[str] | None = None) -> int:
    """Print or write the page."""
    options = _create_parser().parse_args(argv)
    page = format_page()
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)
    return 0


def format_page() -> str:
    """Return the page as Markdown."""
    annotations = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    sections = {
        name: section
        for name, section in annotations.items()
        if isinstance(section, type) and issubclass(section, ConfigSection)
    }
    rules: dict[str, str] = {
        name: rule for name, rule in get_resume_rules().items() if rule != "refused"
    }
    parts = [_HEAD]
    for prefix, section in (*sections.items(), *ELEMENTS.items()):
        title = (section.__doc__ or "").partition("\n")[0]
        parts.append(f"\n## {prefix}\n\n{title}\n\n")
        parts.append("| key | type | default | what | resume | only | notes |\n")
        parts.append("|---|---|---|---|---|---|---|\n")
        parts += _format_rows(prefix, section, rules)
    return "".join(parts)


def _format_rows(prefix: str, section: type[ConfigSection], rules: dict[str, str]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        info = read_key_info(field)
        key = f"{prefix}.{name}"
        only = []
        if info.devices:
            value = f"`{info.devices.value}`: " if info.devices.value else ""
            only.append(value + ", ".join(info.devices.names))
        only += [", ".join(info.tasks)] if info.tasks else []
        notes = [f"`--{flag}`" for flag in info.aliases]
        notes += ["path"] * info.is_path + ["neutral"] * (key in get_neutral_keys())
        notes += [f"stream: {info.stream}"] if info.stream else []
        notes += ["or of run.imports"] if info.known else []
        notes += [f"needs {' or '.join(info.needs)}"] if info.needs else []
        notes += [f"excludes {' and '.join(info.excludes)}"] if info.excludes else []
        cells = (
            f"`{key}`",
            _format_names(info.known) or _format_type(field.annotation),
            _format_default(field),
            field.description or "",
            rules.get(key, "").replace("_", " "),
            "; ".join(only),
            ", ".join(notes),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _format_names(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _format_type(annotation: object) -> str:
    if get_origin(annotation) is Literal:
        return _format_names(get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(annotation))


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default in ("", (), {}, None):
        return ""
    return f"`{json.dumps(default, default=str)}`"


def _create_parser() -> argparse.ArgumentParser:
    parser = create_program_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/keys.md")
    return parser


if __name__ == "__main__":
    sys.exit(run_program(main))
