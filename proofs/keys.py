"""Writes docs/keys.md, every key of the configuration, and docs/errors.md, every code of an error.

`python -m proofs.keys` prints the pages, `--write` writes them. Tests hold the pages against the
fields and the codes, so that an added key, another default or another rule shows in review.
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

from utils.config.data import EvalSection, MixSection
from utils.config.distill import LossTerm, TeacherSection
from utils.config.keys import get_neutral_keys, get_resume_rules
from utils.config.metadata import ConfigSection, read_key_info
from utils.config.sections import RunConfig
from utils.error_codes import ERROR_CODES
from utils.programs import create_program_parser, run_program

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, ERROR_PAGE = DOCS / "keys.md", DOCS / "errors.md"
# Sections whose elements stand in a list, by the list's key.
ELEMENTS = {
    "data.evals[]": EvalSection,
    "data.mix[]": MixSection,
    "distill.losses[]": LossTerm,
    "distill.teachers[]": TeacherSection,
}
# Ends of a key's name -> its unit; the first that fits counts.
UNITS = {
    "accumulate_steps": "micro-batches",
    "batch_size": "examples",
    "epochs": "epochs",
    "_gib": "GiB",
    "group_size": "examples",
    "image_size": "pixels",
    "_mib": "MiB",
    "_s": "s",
    "steps": "steps",
}
_HEAD = """\
# Keys of the configuration

Written by `python -m proofs.keys --write` from the fields in `utils/config/`; a flag is
`--KEY=VALUE`.

- **unit**: that of a key whose name says it; others have theirs in the text.
- **resume**: what another value means to a run that continues. *free*: nothing. *warns*: it is
  reported, because bits may differ. *between epochs*: nothing at the end of an epoch, refused
  within one. Empty: refused with both values; `--run.allow_changes='["optim.lr"]'` allows it.
- **only**: devices and tasks that support the key, or its value; empty: all.
- **notes**: short flags; *path*: a file or directory, or a URL of one; *neutral*: no value of it
  changes what is learnt or measured; *stream*: it decides which examples come when and how they
  look, so that a cache of teachers depends on it; *needs*, *excludes*: keys that must or cannot be
  set together with it.
"""


_ERROR_HEAD = """\
# Errors

Written by `python -m proofs.keys --write` from `utils/error_codes.py`.

What a user can mend is one line on stderr, `error: KEY (VALUE) RULE; WAY OUT`, and exit code 2.
With `--errors json` this line is a JSON object, of `main.py` and of every `python -m tools.NAME`:

```text
{"code": "config.invalid_value", "key": "optim.lr", "value": "-3",
 "rule": "it must be greater than 0", "way_out": "see python main.py --help",
 "message": "optim.lr ('-3'): it must be greater than 0; see python main.py --help"}
```

`message` is the whole sentence, from which the other fields are read where the error does not give
them; `key` and `value` are null where it names none. The service's refusals
(`application/problem+json`) have the code as their `type`. An error without a code of its own gets
that of the room that raised it.

| code | what is wrong | rooms |
|---|---|---|
"""


def main(argv: list[str] | None = None) -> int:
    """Print or write the pages."""
    options = _create_parser().parse_args(argv)
    for path, page in {PAGE: format_page(), ERROR_PAGE: format_error_page()}.items():
        if options.write:
            path.write_text(page, encoding="utf-8")
        else:
            sys.stdout.write(page)
    return 0


def format_error_page() -> str:
    """Return the page of codes as Markdown."""
    rows = [
        f"| `{code}` | {entry.text} | {', '.join(f'`{room}`' for room in entry.rooms)} |\n"
        for code, entry in ERROR_CODES.items()
    ]
    return _ERROR_HEAD + "".join(rows)


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
        parts.append("| key | type | default | unit | what | resume | only | notes |\n")
        parts.append("|---|---|---|---|---|---|---|---|\n")
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
            next((unit for end, unit in UNITS.items() if name.endswith(end)), ""),
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
    parser.add_argument("--write", action="store_true", help="write the pages")
    return parser


if __name__ == "__main__":
    sys.exit(run_program(main))
