"""Writes what the versions of the site share: a list of them, and the script that switches."""

from __future__ import annotations

import io
import json
import shutil
import string
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from proofs.release.history import open_history
from utils.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
LATEST = "latest"


def write_versions(html: Path, name: str) -> None:
    """Write what the versions below `html` share, one folder each: the latest one comes first."""
    folders = sorted(path.parent for path in html.glob("*/index.html"))
    folders.sort(key=lambda path: _get_rank(path.name), reverse=True)
    pages = {
        folder.name: sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
        for folder in folders
    }
    items = "".join(f'<li><a href="{v}/index.html">{v}</a></li>\n' for v in pages)
    template = string.Template((TEMPLATES / "list.html").read_text(encoding="utf-8"))
    moved = f'<meta http-equiv="refresh" content="0; url={LATEST}/index.html">\n'
    for file, head in {"versions.html": "", "index.html": moved}.items():
        text = template.substitute(head=head, title=f"Versions of {name}", items=items)
        (html / file).write_text(text, encoding="utf-8")
    script = (TEMPLATES / "versions.js").read_text(encoding="utf-8")
    text = f"const VERSIONS = {json.dumps(pages)};\n{script}"
    (html / "versions.js").write_text(text, encoding="utf-8")


def _get_rank(version: str) -> tuple[float, ...]:
    return (float("inf"),) if version == LATEST else tuple(map(float, version.split(".")))


def build_releases(root: Path, html: Path) -> None:
    """Build below `html` each version that the clone at `root` has a tag of, from its own files.

    Raises:
      UserError: a version's own builder has made no pages.
    """
    history = open_history(root)
    for release in history.list_releases():
        if history.has_tag(release.version):
            build_release(root, release.revision, html / release.version)


def build_release(root: Path, revision: str, target: Path) -> None:
    """Build the site of a revision by its own builder, and move its pages to `target`."""
    command = ["git", "-C", str(root), "archive", revision]
    tree = subprocess.run(command, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(tree)) as archive:
            archive.extractall(folder, filter="data")
        # Its warnings are shown; a released page can no longer be mended.
        subprocess.run([sys.executable, "-m", "proofs.docs_site", "--out", "site"], cwd=folder)
        pages = Path(folder) / "site" / "html" / LATEST
        if not pages.is_dir():
            raise UserError(f"revision {revision!r} has built no pages; see its error above")
        shutil.move(pages, target)
