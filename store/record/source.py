"""The source that a run was started from: its commit, and all that differs from it as one patch.

`git diff HEAD` and the text files that git does not know yet, in the form that `git apply` takes.
A patch that is too large, or that seems to hold a secret, is not kept, and the reason is.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

from store.lineage.leaks import find_secret
from store.record.ids import RUN_FILE
from utils.errors import UserError
from utils.json_types import JsonObject

DIFF_FILE = "source.diff.zst"
MOST_BYTES = 1 << 20
SOURCE_ROOT = Path(__file__).resolve().parents[2]
# What of the files that git does not know may be source.
_SUFFIXES = {".py", ".pyi", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".txt", ".md"}
_NAMELESS = {"Dockerfile", "Makefile"}
_TIMEOUT_S = 10
_PLAIN = ("-c", "core.quotepath=false", "-c", "diff.noprefix=false",
          "-c", "diff.mnemonicPrefix=false")  # fmt: skip
_DIFF = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
_OF_FILE = "diff --git "


@dataclass(frozen=True)
class SourceState:
    """Where a source tree stands.

    Attributes:
      commit: its hash; empty: no repository.
      diff: what differs from it, as `git apply` takes it; empty: nothing, or it is not kept.
      kept: none (nothing differs), whole, too large, secret or unknown (no repository, or git
        gave no answer).
      reason: why it is not kept, in words; never the secret itself.
    """

    commit: str = ""
    diff: str = ""
    kept: str = "unknown"
    reason: str = ""

    @property
    def name(self) -> str:
        """Commit and hash of the patch: two attempts of the same source have the same."""
        digest = hashlib.sha256(self.diff.encode()).hexdigest()[:12]
        mark = {"none": "", "whole": f"+{digest}"}.get(self.kept, f"+{self.kept}")
        return f"{self.commit}{mark}" if self.commit else ""

    def describe(self) -> JsonObject:
        """For `environment.json`."""
        return {
            "commit": self.commit,
            "dirty": self.kept not in ("none", "unknown"),
            "diff": self.kept,
            "reason": self.reason,
            "bytes": len(self.diff.encode()),
            "sha256": hashlib.sha256(self.diff.encode()).hexdigest() if self.diff else "",
        }


def read_source(root: Path = SOURCE_ROOT) -> SourceState:
    """The commit of a source tree and what differs from it; asks git, so it takes a moment."""
    try:
        commit = _ask_git(root, "rev-parse", "HEAD").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return SourceState(reason=_explain(error))
    try:
        parts = _split(_ask_git(root, *_PLAIN, *_DIFF)) | _read_unknown(root)
    except (OSError, subprocess.SubprocessError) as error:
        return SourceState(commit, reason=_explain(error))
    if not parts:
        return SourceState(commit, kept="none")
    text = "".join(parts.values())
    if len(text.encode()) > MOST_BYTES:
        reason = f"{len(text.encode()):,} bytes, more than {MOST_BYTES:,}"
        return SourceState(commit, kept="too large", reason=reason)
    for name, part in parts.items():
        if kind := find_secret(part):
            return SourceState(commit, kept="secret", reason=f"{name} seems to hold {kind}")
    return SourceState(commit, text, "whole")


def pack_diff(text: str) -> bytes:
    """A patch as `source.diff.zst` holds it, with a checksum of its own."""
    import zstandard

    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode())


def unpack_diff(content: bytes) -> str:
    """The patch of a `source.diff.zst`.

    Raises:
      UserError: it is torn or changed.
    """
    import zstandard

    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        found = reader.decompress(content)
        if reader.eof and not reader.unused_data:
            return found.decode()
    except (zstandard.ZstdError, UnicodeDecodeError):
        pass
    raise UserError(f"{DIFF_FILE} is torn or damaged; take it from a copy of the run")


def split_diff(text: str) -> dict[str, str]:
    """A patch by the files that it changes."""
    return _split(text)


def _split(text: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(_OF_FILE):
            name = line.removeprefix(_OF_FILE).strip()
            # `a/NAME b/NAME`; where a file was renamed the new name counts.
            lines = found.setdefault(name.rpartition(" b/")[2], [])
        lines.append(line)
    return {name: "".join(lines) for name, lines in found.items()}


def _read_unknown(root: Path) -> dict[str, str]:
    """Source files that git does not know, as patches that make them; what runs wrote is none."""
    names = _ask_git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    found: dict[str, str] = {}
    of_runs: dict[Path, bool] = {}
    for name in filter(None, names):
        path = root / name
        is_source = path.suffix in _SUFFIXES or path.name in _NAMELESS
        if not is_source or _lies_in_run(path, root, of_runs) or path.is_symlink():
            continue
        if path.stat().st_size > MOST_BYTES:
            continue
        content = path.read_bytes()
        if b"\0" not in content and not set(name) & set('"\\\n\t'):
            found[name] = _make_patch(name, content.decode("utf-8", errors="replace"))
    return found


def _lies_in_run(path: Path, root: Path, known: dict[Path, bool]) -> bool:
    """Whether a directory above a file is that of a run."""
    for folder in path.parents:
        if folder == root:
            return False
        if folder not in known:
            known[folder] = (folder / RUN_FILE).exists()
        if known[folder]:
            return True
    return False


def _make_patch(name: str, text: str) -> str:
    """What `git diff` would say of a new file."""
    head = f"{_OF_FILE}a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return f"{head}index 0000000..e69de29\n"
    lines = text.split("\n")
    is_whole = not lines[-1]
    lines = lines[:-1] if is_whole else lines
    body = "".join(f"+{line}\n" for line in lines)
    end = "" if is_whole else "\\ No newline at end of file\n"
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}{end}"


def _ask_git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout.decode("utf-8", errors="replace")


def _explain(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git gave no answer in {_TIMEOUT_S} s"
    return "no git repository, or no git"
