"""Scripts, styles and pictures of the dashboard: named after their content, cached for ever.

The charts' script is part of plotly's wheel. It adds its own style sheets to a page, which the
pages' policy forbids, unless the page has elements with certain ids; so pages have such elements.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import threading
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).with_name("static")
PLOTLY = "plotly.js"
# A style sheet into which plotly puts its rules one by one.
PLOTLY_SHEET = "plotly.js-style-global"
_PLOTLY_MARK = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')
_KINDS = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOREVER = "public, max-age=31536000, immutable"
_NAME = re.compile(r"(?P<stem>[a-z][a-z.]*)-(?P<digest>[0-9a-f]{12})(?P<suffix>\.[a-z]+)")


@dataclass(frozen=True)
class Asset:
    """One file as browsers receive it."""

    name: str
    content: bytes

    @cached_property
    def url(self) -> str:
        """Its address, which changes with its content."""
        stem, _, suffix = self.name.rpartition(".")
        return f"/static/{stem}-{hashlib.sha256(self.content).hexdigest()[:12]}.{suffix}"

    @cached_property
    def compressed(self) -> bytes:
        """Its content in gzip, equal for equal content."""
        return gzip.compress(self.content, 6, mtime=0)


class AssetTable:
    """All files that pages load."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._assets: dict[str, Asset] = {}

    def get(self, name: str) -> Asset:
        """Return a file by its name, or raise `KeyError`."""
        with self._lock:
            if name not in self._assets:
                self._assets[name] = Asset(name, self._read(name))
            return self._assets[name]

    def url(self, name: str) -> str:
        """Return the address of a file, for templates."""
        return self.get(name).url

    def list_plotly_marks(self) -> list[str]:
        """List ids of elements whose presence keeps plotly from writing style sheets."""
        marks = _PLOTLY_MARK.findall(self.get(PLOTLY).content)
        return [mark.decode() for mark in dict.fromkeys(marks)]

    def answer(self, request: Request, path: str) -> Response:
        """Return the file of an address, compressed if accepted; 404 if unknown or outdated."""
        match = _NAME.fullmatch(path)
        try:
            asset = self.get(f"{match['stem']}{match['suffix']}") if match else None
        except KeyError:
            asset = None
        if asset is None or asset.url != f"/static/{path}":
            return Response("no such file\n", 404, media_type="text/plain")
        kind = _KINDS["." + asset.name.rpartition(".")[2]]
        headers = {"Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(asset.compressed, headers=headers, media_type=kind)
        return Response(asset.content, headers=headers, media_type=kind)

    def _read(self, name: str) -> bytes:
        if name == PLOTLY:
            spec = find_spec("plotly")  # the path alone: the import of plotly takes long
            if spec is None or spec.origin is None:
                raise KeyError(PLOTLY)
            return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()
        path = self._folder / name
        if path.suffix not in _KINDS or not path.is_file():
            raise KeyError(name)
        return path.read_bytes()
