"""The source that a run was started from: its commit, and all differences from it as one patch.

The patch has `git diff HEAD` and the untracked text files, in the form that `git apply` reads. A
patch that is too large, or seems to contain a secret, is not saved; the reason is recorded instead.
"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
from dataclasses import dataclass
from pathlib import Path

from store.lineage.leaks import find_secret
from store.record.ids import RUN_FILE
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.installation import ROOT, is_installed

DIFF_FILE = "source.diff.zst"
MOST_BYTES = 1 << 20
# Untracked files with these endings or names may be source.
_SUFFIXES = {".py", ".pyi", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".txt", ".md"}
_NAMELESS = {"Dockerfile", "Makefile"}
_TIMEOUT_S = 10
_PLAIN = (
    "-c",
    "core.quotepath=false",
    "-c",
    "diff.noprefix=false",
    "-c",
    "diff.mnemonicPrefix=false",
)
_DIFF = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
_OF_FILE = "diff --git "


@dataclass(frozen=True)
class SourceState:
    """The state of a source tree."""

    commit: str = ""  # its hash; empty without a repository
    # Differences from it, for `git apply`; empty if there are none, or they are not saved
    diff: str = ""
    # none (no differences), whole, too large, secret or unknown (no repository, or git failed)
    kept: str = "unknown"
    reason: str = ""  # why the patch is not saved; never the secret itself

    @property
    def name(self) -> str:
        """Commit and hash of the patch, equal for two attempts of the same source."""
        digest = hashlib.sha256(self.diff.encode()).hexdigest()[:12]
        mark = {"none": "", "whole": f"+{digest}"}.get(self.kept, f"+{self.kept}")
        return f"{self.commit}{mark}" if self.commit else ""

    def describe(self) -> JsonObject:
        """Return the entry of `environment.json`."""
        return {
            "commit": self.commit,
            "dirty": self.kept not in ("none", "unknown"),
            "diff": self.kept,
            "reason": self.reason,
            "bytes": len(self.diff.encode()),
            "sha256": hashlib.sha256(self.diff.encode()).hexdigest() if self.diff else "",
        }


def read_source(root: Path = ROOT) -> SourceState:
    """Read the commit of a source tree and the differences from it by running git."""
    if root == ROOT and is_installed():  # a repository around it is somebody else's
        return SourceState(reason="an installed package, no git repository")
    try:
        commit = _run_git(root, "rev-parse", "HEAD").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return SourceState(reason=_explain(error))
    try:
        parts = split_diff(_run_git(root, *_PLAIN, *_DIFF)) | _read_untracked(root)
    except (OSError, subprocess.SubprocessError) as error:
        return SourceState(commit, reason=_explain(error))
    if not parts:
        return SourceState(commit, kept="none")
    text = "".join(parts.values())
    if (size := len(text.encode())) > MOST_BYTES:
        reason = f"{size:,} bytes, more than {MOST_BYTES:,}"
        return SourceState(commit, kept="too large", reason=reason)
    for name, part in parts.items():
        if secret := find_secret(part):
            return SourceState(commit, kept="secret", reason=f"{name} seems to hold {secret}")
    return SourceState(commit, text, "whole")


def pack_diff(text: str) -> bytes:
    """Compress a patch for `source.diff.zst`, with a checksum of its own."""
    import zstandard

    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode())


def unpack_diff(content: bytes) -> str:
    """Decompress the patch of a `source.diff.zst`; UserError if it is torn or changed."""
    import zstandard

    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        text = reader.decompress(content)
        if reader.eof and not reader.unused_data:
            return text.decode()
    except (zstandard.ZstdError, UnicodeDecodeError):
        pass
    raise UserError(f"{DIFF_FILE} is torn or damaged; take it from a copy of the run")


def split_diff(text: str) -> dict[str, str]:
    """Split a patch by the files that it changes."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(_OF_FILE):
            name = line.removeprefix(_OF_FILE).strip()
            # `a/NAME b/NAME`; of a renamed file the new name counts.
            lines = parts.setdefault(name.rpartition(" b/")[2], [])
        lines.append(line)
    return {name: "".join(lines) for name, lines in parts.items()}


def _read_untracked(root: Path) -> dict[str, str]:
    """Read untracked source files as patches that create them, without files of runs."""
    names = _run_git(root, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    patches: dict[str, str] = {}
    for name in filter(None, names):
        path = root / name
        is_source = path.suffix in _SUFFIXES or path.name in _NAMELESS
        if not is_source or path.is_symlink():
            continue
        inner = itertools.takewhile(lambda folder: folder != root, path.parents)
        if (
            any((folder / RUN_FILE).exists() for folder in inner)
            or path.stat().st_size > MOST_BYTES
        ):
            continue
        content = path.read_bytes()
        if b"\0" not in content and not set(name) & set('"\\\n\t'):
            patches[name] = _make_patch(name, content.decode("utf-8", errors="replace"))
    return patches


def _make_patch(name: str, text: str) -> str:
    """Return the output of `git diff` for a new file."""
    head = f"{_OF_FILE}a/{name} b/{name}\nnew file mode 100644\n"
    if not text:
        return f"{head}index 0000000..e69de29\n"
    lines = text.split("\n")
    is_whole = not lines[-1]
    lines = lines[:-1] if is_whole else lines
    body = "".join(f"+{line}\n" for line in lines)
    end = "" if is_whole else "\\ No newline at end of file\n"
    return f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,{len(lines)} @@\n{body}{end}"


def _run_git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout.decode("utf-8", errors="replace")


def _explain(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not finish in {_TIMEOUT_S} s"
    return "no git repository, or no git"
