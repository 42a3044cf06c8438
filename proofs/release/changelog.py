"""CHANGELOG.md in the form of Keep a Changelog: sections made of the history, and their place.

A first release is described by theme: sentences on what the project does, and counts of commits. A
later one lists its commits, and what users meet: keys, fields of files, formats and pins.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proofs.release.changes import Change, Changes
from proofs.release.history import Commit, list_versions
from store.quality.trends import Trend
from utils.errors import UserError

HEAD = """\
# Changelog

Written by `python -m proofs.release` from the log and from what differs between two releases, in
the form of Keep a Changelog. Versions are MAJOR.MINOR.PATCH: before 1.0.0 a MINOR may change keys
and interfaces. Runs, checkpoints and teachers' caches of a released version open in later ones.
"""
_WORDS = {
    "feat": ("feature", "features"),
    "fix": ("fix", "fixes"),
    "perf": ("speed-up", "speed-ups"),
    "refactor": ("refactoring", "refactorings"),
    "docs": ("on documents", "on documents"),
    "test": ("on tests", "on tests"),
}
_LISTED = ("feat", "perf", "fix")
# One commit may carry a list of packages or keys; a section names so many and counts the rest.
_MOST_NAMES = 40
_WIDTH = 118


@dataclass(frozen=True)
class Theme:
    """A part of the project as a first release presents it."""

    title: str
    scopes: frozenset[str]
    sentences: tuple[str, ...]


def _theme(title: str, scopes: str, *sentences: str) -> Theme:
    return Theme(title, frozenset(scopes.split()), sentences)


THEMES = (
    _theme(
        "Training",
        "engine job optim main config configs keys errors check preflight checkpoint "
        "checkpoints resume storage buckets recipes utils groups mixing",
        "One command, `python main.py --config FILE`, trains and distils models of images, "
        "text and numbers; every key is a flag, and `--check` says what would run before a "
        "device is touched.",
        "A killed run continues bit for bit on the same kind of device and number of threads; "
        "`python -m proofs.chaos` kills runs to prove it.",
        "After warm-up nothing compiles, and nothing is read from the device between log "
        "points; both are counted in the run's metrics, and a run that exceeds its graph "
        "budget stops.",
    ),
    _theme(
        "Devices",
        "runtime runtimes xla torch_tpu cuda devices ranks parity compile patches",
        "The CPU, NVIDIA GPUs, PyTorch/XLA (`torch_xla` 2.9) and its successor TorchTPU "
        "(`torch_tpu`) by one key, `runtime.device`; one process, several, or a mesh of "
        "devices.",
        "A checkpoint of one device continues on another; `tests/test_parity.py` compares their "
        "losses.",
        "No run on a TPU has been made for this release: the TPU compiler, XLA on the CPU and "
        "a stand-in for TorchTPU's device are what it was tested with (`docs/runtimes.md`, "
        "`docs/torch_tpu.md`).",
    ),
    _theme(
        "Distillation",
        "losses distill kd cache kd_table cache_teacher",
        "One or several teachers, live or stored, teach by losses on logits, features and "
        "relations, and without labels (`docs/losses.md`, `docs/labelfree.md`); each loss is "
        "compared with reference values.",
    ),
    _theme(
        "Models and weights",
        "models delta weights export lora average kernels",
        "timm's models by name, own models, and attention with a state of fixed size "
        "(`docs/delta.md`); freezing, LoRA, averaging, and export to ONNX, StableHLO, "
        "SavedModel and timm (`docs/export.md`).",
    ),
    _theme(
        "Data",
        "data input pp prepare prepare_dataset loader big_vision erasing multilabel tasks",
        "TFDS, folders, shards, Arrow, text and tables in an order that is the same on 1 or 8 "
        "shards and after each restart (`docs/data.md`); preprocessing is one string "
        "(`docs/preprocessing.md`).",
        "Tasks are classification, language models, regression and distillation; more come by "
        "`run.imports`, as do models, losses, sources and optimizers of your own "
        "(`docs/own_code.md`).",
    ),
    _theme(
        "Runs and their numbers",
        "store runs compare trends metrics mirror card trace validate evaluate evaluation "
        "eval predict generate judge tags replay",
        "Each run is a directory with published schemas; `python -m tools.runs` lists, "
        "compares over seeds, gates, traces, exports and repeats runs (`docs/store.md`).",
    ),
    _theme(
        "Service and sweeps",
        "service web queue sweep sweeps handover keeper",
        "A dashboard and an API submit, watch, stop and compare runs behind tokens with roles "
        "(`docs/service.md`); sweeps of one file run in a queue (`docs/sweeps.md`).",
    ),
    _theme(
        "TPUs: machines, plans, the compiler's verdict",
        "tpu train sky plan bill compiler profile doctor monitor setup",
        "Launch helpers for TPU VMs, pods, SkyPilot, GKE and Slurm, tested against stand-ins "
        "of their programs (`docs/tpu.md`).",
        "The TPU compiler's time and memory of a step without a TPU (`docs/tpu_compiler.md`), "
        "and hours and dollars of a run before it starts (`docs/plan.md`).",
    ),
    _theme(
        "Proofs",
        "proofs tests test testing benchmark house words floors rooms lab docs documents "
        "readme agents tools demo",
        "Benchmarks, chaos, planted faults and the structure of the source are programs of "
        "`proofs/`; tests run the documents' commands (`docs/testing.md`).",
    ),
)
_REST = "Everything else"


def find_theme(commit: Commit) -> str:
    """Return the title of a commit's theme, by the first of its scopes that has one."""
    titles = [t.title for scope in commit.scopes for t in THEMES if scope in t.scopes]
    return titles[0] if titles else _REST


def format_first_section(
    version: str, date: str, commits: Sequence[Commit], formats: Sequence[Change]
) -> str:
    """Format the section of a release that has none before it."""
    groups: dict[str, Counter[str]] = {theme.title: Counter() for theme in THEMES}
    for commit in commits:
        groups.setdefault(find_theme(commit), Counter())[commit.kind] += 1
    lines = [_format_heading(version, date), "", _format_counts(commits), "", "### Added", ""]
    for theme in THEMES:
        counts = _join_counts(groups[theme.title], ("feat", "fix", "perf"))
        lines.append(f"- **{theme.title}** ({counts}):")
        for sentence in theme.sentences:
            lines += _wrap(sentence, "  - ")
    if _REST in groups:
        lines += _wrap(f"**{_REST}**: {_join_counts(groups[_REST], _WORDS)}.", "- ")
    versions = ", ".join(f"{change.name} {change.after}" for change in formats)
    lines += _wrap(f"**Formats**, by the version that is written: {versions}.", "- ")
    return "\n".join(lines) + "\n"


def format_section(
    version: str,
    date: str,
    commits: Sequence[Commit],
    changes: Changes,
    trends: Sequence[Trend] = (),
) -> str:
    """Format the section of a release by what has changed since the one before.

    Args:
      trends: of the figures of a store of benchmark reports.
    """
    listed = {kind: [c for c in commits if c.kind == kind] for kind in _LISTED}
    new, gone = _split(changes.keys)
    new_fields, gone_fields = _split(changes.fields)
    parts = {
        "Added": [
            *_list_commits(listed["feat"]),
            *_list_names("Keys", new),
            *_list_names("Fields", new_fields),
        ],
        "Changed": [
            *_list_commits(listed["perf"]),
            *_list_values("Key", changes.keys),
            *_list_names("Fields of another form", _find_changed(changes.fields)),
            *_list_values("Format", [c for c in changes.formats if c.after], first="new"),
            *_list_values("Pin", changes.pins, first="new", last="gone"),
            *_list_trends(trends),
        ],
        "Removed": [*_list_names("Keys", gone), *_list_names("Fields", gone_fields)],
        "Fixed": _list_commits(listed["fix"]),
    }
    lines = [_format_heading(version, date), "", _format_counts(commits)]
    for title, rows in parts.items():
        if rows:
            lines += ["", f"### {title}", "", *rows]
    return "\n".join(lines) + "\n"


def insert_section(changelog: str, version: str, section: str) -> str:
    """Return the changelog with a version's section: on top, or in place of its newest."""
    known = list_versions(changelog)
    if version in known[1:]:
        raise UserError(f"version {version!r} is not the newest of the changelog; give {known[0]}")
    if not known:
        return f"{HEAD}\n{section}"
    head, _, rest = changelog.partition(f"## [{known[0]}]")
    if version == known[0]:
        below = re.split(r"^(?=## \[)", rest, flags=re.MULTILINE)[1:]
        return "\n".join([head.rstrip("\n") + "\n", section, *below]).rstrip("\n") + "\n"
    return f"{head}{section}\n## [{known[0]}]{rest}"


def _format_heading(version: str, date: str) -> str:
    return f"## [{version}] - {date}" if date else f"## [{version}]"


def _format_counts(commits: Sequence[Commit]) -> str:
    counts = Counter(commit.kind for commit in commits)
    return f"{len(commits):,} commits: {_join_counts(counts, _WORDS)}."


def _join_counts(counts: Counter[str], kinds: Iterable[str]) -> str:
    shown = [(counts[kind], *_WORDS[kind]) for kind in kinds]
    rest = counts.total() - sum(count for count, *_ in shown)
    shown.append((rest, "other change", "other changes"))
    texts = [
        f"{count:,} {singular if count == 1 else plural}"
        for count, singular, plural in shown
        if count
    ]
    return ", ".join(texts) or "no commit"


def _list_commits(commits: Iterable[Commit]) -> list[str]:
    rows = sorted((", ".join(commit.scopes), commit.text) for commit in commits)
    return [f"- **{scopes}**: {text}" if scopes else f"- {text}" for scopes, text in rows]


def _split(changes: Iterable[Change]) -> tuple[list[str], list[str]]:
    """Split into names that are new and names that are gone."""
    changes = list(changes)
    new = [change.name for change in changes if change.before is None]
    return new, [change.name for change in changes if change.after is None]


def _find_changed(changes: Iterable[Change]) -> list[str]:
    return [c.name for c in changes if c.before is not None and c.after is not None]


def _list_names(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else ""
    return _wrap(f"{title}: {shown}{more}.", "- ")


def _list_values(
    title: str, changes: Iterable[Change], *, first: str = "", last: str = ""
) -> list[str]:
    """List facts that have another value; `first` and `last` stand for values that are missing."""
    rows: list[str] = []
    for change in changes:
        before, after = change.before or first, change.after or last
        if before and after:
            rows += _wrap(f"{title} `{change.name}`: {before} to {after}.", "- ")
    return rows


def _list_trends(trends: Iterable[Trend]) -> list[str]:
    rows: list[str] = []
    for trend in trends:
        text = f"Benchmark of {trend.subject}, `{trend.figure}`: {trend.verdict}"
        rows += _wrap(f"{text} ({trend.worse:+.1%} worse, {len(trend.values)} reports).", "- ")
    return rows


def _wrap(text: str, bullet: str) -> list[str]:
    """Break a text into the lines of one item; nothing in backquotes is broken."""
    words = re.findall(r"[^\s`]*`[^`]+`\S*|\S+", text)
    lines: list[str] = []
    line = bullet.rstrip()
    for word in words:
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = " " * (len(bullet) - 1)
        line += f" {word}"
    return [*lines, line]
