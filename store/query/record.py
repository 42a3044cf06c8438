"""`RunRecord` reads a run directory of version 1 or 2, on a disk or a bucket.

Reading never waits for the run's program and changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from store.quality.field_types import fit_artifacts, fit_environment, fit_line, is_number
from store.query.config_text import flatten_run_config, parse_config
from store.query.modules import MODULES_FILE
from store.query.tags import TAGS_FILE, parse_note, parse_tags
from store.record.artifacts import ARTIFACTS_FILE
from store.record.attempts import ATTEMPTS_FILE, merge_attempts
from store.record.catalogue import EVAL, TRAIN
from store.record.environment import ENVIRONMENT_FILE
from store.record.history import METRICS_FILE, Line, get_learnt, get_numbers, modernise, parse_lines
from store.record.hits import HITS_FILE, Hits, parse_hits
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.mirror import read_segments
from store.record.run_file import RunFacts, find_damage, fit
from store.record.source import DIFF_FILE, unpack_diff
from store.record.spans import SPANS_FILE, Span, parse_spans
from store.record.windows import SKETCHES_FILE, RunSketches, parse_sketches
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue, load_json, make_plain, mend_text
from utils.storage.folder import Folder
from utils.storage.places import join_path_or_url, open_folder

if TYPE_CHECKING:
    from store.query.schemas import ModulesFile

# Newer run directories are for newer programs.
NEWEST_SCHEMA = 2
TEST = "test"
# A history is searched for its newest lines from this far before its end.
_TAIL_BYTES = 1 << 13
_TAIL_MOST = 1 << 20
# Fields of `run.json`, as filters name them.
FACTS = (
    "path", "experiment", "name", "id", "status", "started", "ended", "attempts",
    "final_up_to_step", "schema_version", "host", "device", "git_commit",
)  # fmt: skip
Values = dict[str, float]


class RunRecord:
    """One run directory; each file is read at its first use. `facts` is its `run.json`."""

    def __init__(self, path_or_url: str | Path | Folder) -> None:
        self.folder = open_folder(path_or_url)
        text = self.folder.read_texts([RUN_FILE]).get(RUN_FILE)
        if text is None:
            raise UserError(f"{self.folder} contains no {RUN_FILE}; give the directory of a run")
        self.facts = parse_facts(text, f"{self.folder}/{RUN_FILE}")

    @property
    def path(self) -> str:
        """`experiment/name`, the run's name for users."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended successfully."""
        return self.facts.status == "complete"

    @cached_property
    def config(self) -> JsonObject:
        """Dotted key -> value of the resolved configuration; empty without one."""
        try:
            config: Any = mend_text(make_plain(parse_config(self._read(CONFIG_FILE))))
        except RecursionError:  # a mapping that contains itself
            return {}
        return flatten_run_config(config)

    @property
    def checkpoints(self) -> Folder:
        """The folder of its checkpoints, which need not exist."""
        root = self.config.get("run.checkpoint_root")
        if isinstance(root, str) and root:
            return open_folder(join_path_or_url(root, self.folder.parent.name, self.folder.name))
        return self.folder.child("checkpoints")

    @cached_property
    def attempts(self) -> list[JsonObject]:
        """Each program that has worked on the run, with its end."""
        return merge_attempts(self._read(ATTEMPTS_FILE))

    @cached_property
    def artifacts(self) -> list[JsonObject]:
        """Files that the run has left, with their checksums; empty before its end."""
        return fit_artifacts(self._read_json(ARTIFACTS_FILE))

    @cached_property
    def spans(self) -> list[Span]:
        """Where its time went; empty for runs of earlier programs."""
        return parse_spans(self._read(SPANS_FILE))

    @cached_property
    def sketches(self) -> RunSketches | None:
        """Quantiles of its numbers; None for runs of earlier programs."""
        return parse_sketches(self._read(SKETCHES_FILE))

    @cached_property
    def modules(self) -> ModulesFile | None:
        """Where the time of its profiled steps went; None without a whole profile."""
        # Imported here because a list must not wait for pydantic.
        from store.query.schemas import ModulesFile

        with contextlib.suppress(ValueError):
            return ModulesFile.model_validate(self._read_json(MODULES_FILE))
        return None

    @cached_property
    def hits(self) -> dict[str, Hits]:
        """Which examples its evaluations classified correctly; empty if not kept, or torn."""
        return parse_hits(self._read_bytes(HITS_FILE)) or {}

    @cached_property
    def environment(self) -> JsonObject:
        """Details of the machine and packages; empty for runs of earlier programs."""
        return fit_environment(self._read_json(ENVIRONMENT_FILE))

    @cached_property
    def patch(self) -> str:
        """The source's changes beside the commit; empty without changes, or if not kept or torn."""
        content = self._read_bytes(DIFF_FILE)
        with contextlib.suppress(UserError):
            return unpack_diff(content) if content else ""
        return ""

    @cached_property
    def tags(self) -> list[str]:
        """Tags that users have given it."""
        return parse_tags(self._read(TAGS_FILE))

    @cached_property
    def note(self) -> str:
        """Note of a user; empty without one."""
        return parse_note(self._read(TAGS_FILE))

    @cached_property
    def lines(self) -> list[Line]:
        """Its metrics in today's form; those of a bucket come from its segments."""
        text = self._read(METRICS_FILE)
        if text or not self.folder.child("metrics").is_there():
            return read_history(text)
        lines = (fit_line(line) for line in read_segments(self.folder))
        return [line for line in lines if line is not None]

    @cached_property
    def values(self) -> Values:
        """Its newest numbers as filters name them: `eval.top1`, `train.loss/total`."""
        return {**get_last_values(self.lines), **get_final_values(self.facts)}

    def _read_bytes(self, name: str) -> bytes:
        with contextlib.suppress(OSError), self.folder.open_local(name) as path:
            return path.read_bytes()
        return b""

    def _read_json(self, name: str) -> JsonValue:
        with contextlib.suppress(ValueError):
            return load_json(self._read(name))
        return None

    def _read(self, name: str) -> str:
        return self.folder.read_texts([name]).get(name, "")


def parse_facts(text: str, file: str) -> RunFacts:
    """Parse a `run.json`; UserError if it is torn, of a newer program, or has wrong types."""
    try:
        facts = load_json(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise UserError(f"{file} is damaged; repair it, or move the run away")
    version = facts.get("schema_version", 1)
    if type(version) is not int or version > NEWEST_SCHEMA:
        raise UserError(
            f"{file} has schema_version {version!r}, this program reads up to {NEWEST_SCHEMA}; "
            "use a newer one"
        )
    if wrong := find_damage(facts):
        raise UserError(f"{file} is damaged: {wrong}; repair it, or move the run away")
    return fit(RunFacts, facts)


def read_history(text: str) -> list[Line]:
    """Parse the whole lines of a metrics file into today's form."""
    lines = (modernise(line) for line in parse_lines(text) if type(line.get("step")) is int)
    return [line for line in map(fit_line, lines) if line is not None]


def describe(facts: RunFacts, path: str) -> JsonObject:
    """Return the fields of a run by the names of `FACTS`, with the names of its present path."""
    fields: JsonObject = {name: getattr(facts, name, None) for name in FACTS[1:]}
    fields["experiment"], _, fields["name"] = path.rpartition("/")
    for name in ("host", "device", "git_commit"):
        value = facts.environment.get(name)
        fields[name] = value if isinstance(value, str) else None
    return fields


def get_final_values(facts: RunFacts) -> Values:
    """Return the numbers of a run's end: `eval.top1`, `test.top1`, `parameters`."""
    values: Values = {}
    for name, value in facts.final.items():
        split, _, rest = name.partition("_")
        key = f"{split}.{rest}" if split in (EVAL, TEST) and rest else name  # eval_top1: eval.top1
        number = _to_number(value, facts.nonfinite.get(f"final.{name}"))
        if number is not None:
            values[key] = number
    return values


def get_last_values(lines: list[Line]) -> Values:
    """Return the newest numbers of each kind, `train.lr`, `eval.top1`, and the last `step`."""
    values: Values = {}
    for kind in (TRAIN, EVAL):
        line = next((line for line in reversed(lines) if line["kind"] == kind), None)
        if line is not None:
            # An evaluation's line repeats numbers of the loop.
            numbers = get_finite_numbers(line)
            wanted = numbers if kind == TRAIN else get_learnt(line)
            values |= {f"{kind}.{name}": v for name, v in numbers.items() if name in wanted}
    if lines:
        values["step"] = float(lines[-1]["step"])
    return values


def get_finite_numbers(line: Line) -> Values:
    """Return a line's numbers, with nan and infinities restored."""
    words = line.get("nonfinite")
    words = words if isinstance(words, dict) else {}
    pairs = ((name, _to_number(v, words.get(name))) for name, v in get_numbers(line).items())
    return {name: number for name, number in pairs if number is not None}


def read_tail(path: Path) -> list[Line]:
    """Read the newest lines of a metrics file, with a step and an evaluation if possible."""
    try:
        with path.open("rb") as file:
            size, count = file.seek(0, 2), _TAIL_BYTES
            while True:
                file.seek(max(0, size - count))
                text = file.read(count).decode("utf-8", errors="replace")
                if size > count:
                    text = text.partition("\n")[2]  # a line's end
                lines = read_history(text)
                if count >= min(size, _TAIL_MOST) or {TRAIN, EVAL} <= {
                    line["kind"] for line in lines
                }:
                    return lines
                count *= 8
    except OSError:
        return []


def _to_number(value: object, word: object) -> float | None:
    """Return a line's number: null with a word is nan or an infinity, null alone is nan."""
    if value is None:
        return float(word) if word in ("nan", "inf", "-inf") else math.nan
    return float(value) if is_number(value) else None
