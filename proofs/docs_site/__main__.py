"""Builds the documents as a site: `docs/navigation.yaml`, and a reference made from the code.

    python -m proofs.docs_site
    python -m proofs.docs_site --serve 8000
    python -m proofs.docs_site --releases

The pages are copied to OUT/source, the reference is written beside them, and Sphinx makes
OUT/html/latest, which needs no network and loads nothing from elsewhere. Any warning ends the build
with exit code 1: a broken link or anchor, a page that the navigation lacks. `--releases` adds
OUT/html/VERSION for each tag such as v0.1.0, from that version's own files; every page lists all.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from proofs.docs_site.reference import PAGES
from proofs.docs_site.versions import LATEST, TEMPLATES, build_releases, write_versions
from utils.errors import EXIT_FAILED
from utils.programs import CommandLine, create_program_parser

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = ROOT / "docs" / "navigation.yaml"
NAME = "tpudistil"
# Folders whose names begin with a dot hold no documents of the project.
OUT = ROOT / ".site"
# Where a link out of the site goes: a page here is a document, another file a download.
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
# Fences of languages that the highlighter does not know.
_PLAIN_FENCE = re.compile(r"^(\s*```)(?:pp|csv)$", re.MULTILINE)
# The theme's own parts; after them come the versions.
_SIDEBAR = [
    f"sidebar/{part}.html"
    for part in ("brand", "search", "scroll-start", "navigation", "scroll-end")
]
# What the theme leaves out: the keyboard reaches what scrolls, and a heading has its level.
_ACCESS = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
}


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m proofs.docs_site")
    text = "where the site is built anew (.site of this project)"
    parser.add_argument("--out", type=Path, default=OUT, help=text)
    text = "build each released version beside it, in a clone with its tags"
    parser.add_argument("--releases", action="store_true", help=text)
    text = "then serve it on this machine until Ctrl-C (0: any free port)"
    parser.add_argument("--serve", type=int, metavar="PORT", help=text)
    return parser


def run(options: argparse.Namespace) -> int:
    """Build the site, and serve it if a port is given; return the exit code."""
    warnings = build_site(options.out)
    if warnings:
        print(warnings, file=sys.stderr)
        return EXIT_FAILED
    if options.releases:
        build_releases(ROOT, options.out / "html")
        write_versions(options.out / "html", NAME)
    print(f"built {options.out / 'html' / 'index.html'}")
    if options.serve is not None:
        _serve(options.out / "html", options.serve)
    return 0


def build_site(out: Path) -> str:
    """Build the site anew below `out`; return the warnings, empty if it is whole."""
    for folder in ("source", "html", "doctrees"):
        shutil.rmtree(out / folder, ignore_errors=True)
    stage_pages(out / "source")
    warnings = build_pages(out)
    write_versions(out / "html", NAME)
    return warnings


def build_pages(out: Path) -> str:
    """Build OUT/html/latest from the pages in OUT/source; return the warnings."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    version = read_version()
    settings = {
        "project": NAME,
        "version": version,
        "release": version,
        "extensions": ["myst_parser"],
        "myst_heading_anchors": 4,
        "html_theme": "furo",
        "templates_path": [str(TEMPLATES)],
        "html_sidebars": {"**": [*_SIDEBAR, "versions.html"]},
        "html_title": f"{NAME} {version}",
        "html_copy_source": False,
        "html_show_sphinx": False,
        "pygments_style": "a11y-high-contrast-light",
    }
    warnings = io.StringIO()
    pages = out / "html" / LATEST
    folders = (out / "source", None, pages, out / "doctrees")
    with patch_docutils(), docutils_namespace():  # nothing is left for the next build
        app = Sphinx(*folders, "html", confoverrides=settings, status=None, warning=warnings)
        app.build()
    for path in pages.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        for theirs, ours in _ACCESS.items():
            html = html.replace(theirs, ours)
        path.write_text(html, encoding="utf-8")
    return re.sub(r"\x1b\[[\d;]*m", "", warnings.getvalue())


def read_version() -> str:
    """Return the version of the project."""
    return (ROOT / "VERSION").read_text(encoding="utf-8").strip()


def read_navigation() -> dict[str, dict[str, str]]:
    """Return the parts of the site: their pages by title, as paths from the root.

    A page that the checkout lacks is left out: under another name it is an orphan.
    """
    parts: dict[str, dict[str, str]] = yaml.safe_load(NAVIGATION.read_text(encoding="utf-8"))
    return {
        part: {title: page for title, page in pages.items() if find_origin(page) or page in PAGES}
        for part, pages in parts.items()
    }


def find_origin(page: str) -> Path | None:
    """Find the file that a page is made from, itself or a notebook; None if both are missing."""
    path = ROOT / page
    return next((file for file in (path, path.with_suffix(".ipynb")) if file.is_file()), None)


def stage_pages(source: Path) -> None:
    """Write all pages of the site as Markdown, and copy the files that they link to."""
    parts = read_navigation()
    for pages in parts.values():
        for page in pages.values():
            _write_page(source, page)
    for path in sorted((ROOT / "docs").rglob("*.md")):  # one that the navigation lacks is an orphan
        if not (source / path.relative_to(ROOT)).exists():
            _write_page(source, path.relative_to(ROOT).as_posix())
    (source / "index.md").write_text(format_index(parts, source), encoding="utf-8")


def _write_page(source: Path, page: str) -> None:
    path = source / page
    path.parent.mkdir(parents=True, exist_ok=True)
    if page in PAGES:
        path.write_text(PAGES[page](), encoding="utf-8")
        return
    origin = find_origin(page)
    assert origin is not None
    if origin.suffix == ".ipynb":
        path.write_text(format_notebook(origin), encoding="utf-8")
        return
    text = _PLAIN_FENCE.sub(r"\1text", origin.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    for file in _list_linked(origin, text):
        target = source / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _list_linked(origin: Path, text: str) -> Iterator[Path]:
    """Yield the files of the project, pages left out, that a page shows or links to."""
    for link in _LINK.findall(text):
        file = (origin.parent / link).resolve()
        if file.suffix != ".md" and file.is_file() and file.is_relative_to(ROOT):
            yield file


def format_index(parts: dict[str, dict[str, str]], source: Path) -> str:
    """Return the first page: each part of the navigation with all of its pages."""
    lines = [f"# {NAME} {read_version()}", "", "Train and distil vision models on Cloud TPUs.", ""]
    for part, pages in parts.items():
        lines += [f"## {part}", ""]
        for title, page in pages.items():
            heading = re.search(r"^# (.*)", (source / page).read_text(encoding="utf-8"), re.M)
            assert heading is not None, f"{page} has no title"
            more = "" if heading[1] == title else f": {heading[1]}"
            lines.append(f"- [{title}]({page}){more}")
        entries = [f"{title} <{page.removesuffix('.md')}>" for title, page in pages.items()]
        lines += ["", "```{toctree}", f":caption: {part}", ":hidden:", "", *entries, "```", ""]
    return "\n".join(lines)


def format_notebook(path: Path) -> str:
    """Return a notebook as Markdown: its prose, its code, and a link to the file."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts]
    return "\n\n".join(parts) + "\n"


def _serve(folder: Path, port: int) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
