"""The site of the documents: whole, reachable, self-contained, with a full reference."""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from big_vision.pp.registry import OPS
from losses.table import EMBEDDING_LOSSES, LOSSES
from proofs.docs_site.__main__ import (
    build_pages,
    build_site,
    read_navigation,
    read_version,
)
from proofs.docs_site.reference import PROGRAMS, list_commands, load_parser
from proofs.docs_site.versions import LATEST, build_releases, write_versions
from store.record.catalogue import METRICS
from tests.service.browsers import SIZES, open_browser
from tools.__main__ import list_programs
from utils.config.keys import get_resume_rules
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CLICKS = 2


class Links(HTMLParser):
    """What a page links to, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.links, self.loaded = path, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "search"):
            self.loaded.append(values["href"])
        self.loaded += [values[name] for name in ("src", "srcset", "data") if values.get(name)]

    def list_pages(self) -> set[Path]:
        """The site's own pages that it links to."""
        own = [urlsplit(link).path for link in self.links if not urlsplit(link).scheme]
        return {(self.path.parent / unquote(path)).resolve() for path in own if path}


class Site:
    def __init__(self, out: Path):
        self.warnings = build_site(out)
        self.html = out / "html" / LATEST
        self.pages = {path.resolve(): Links(path) for path in sorted(self.html.rglob("*.html"))}

    def read(self, page: str) -> str:
        """The text of a page, without its tags."""
        html = (self.html / page).read_text(encoding="utf-8")
        return unescape(re.sub(r"<[^>]+>", "", html))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def test_the_site_is_built_without_a_warning(site):
    assert site.warnings == ""


def test_every_page_is_two_clicks_away(site):
    reached = frontier = {(site.html / "index.html").resolve()}
    for _ in range(CLICKS):
        links = {page for path in frontier for page in site.pages[path].list_pages()}
        frontier = (links & site.pages.keys()) - reached
        reached = reached | frontier
    made = {page for page in site.pages if page.name not in ("genindex.html", "search.html")}
    assert made - reached == set()
    documents = {page.relative_to(ROOT).with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site.html.resolve()).with_suffix("") for page in site.pages}
    assert documents <= built


def test_the_site_loads_nothing_from_elsewhere(site):
    loaded = {url for page in site.pages.values() for url in page.loaded}
    assert loaded
    assert {url for url in loaded if urlsplit(url).netloc} == set()
    styles = [path.read_text(encoding="utf-8") for path in site.html.rglob("*.css")]
    assert styles
    assert [
        url for text in styles for url in re.findall(r"url\(\W*((?:https?:)?//[^)]+)", text)
    ] == []
    assert not any("@import" in text for text in styles)


def test_the_reference_names_everything(site):
    keys = site.read("docs/keys.html")
    assert [key for key in get_resume_rules() if key not in keys] == []
    wanted = {
        "losses": [*LOSSES, *(f"{name}: without labels" for name in EMBEDDING_LOSSES)],
        "ops": [*OPS],
        "metrics": [metric.name for metric in METRICS],
    }
    programs = [*(f"tools.{name}" for name in list_programs()), *PROGRAMS]
    wanted["commands"] = [
        *(f"python -m {name}" for name in programs),
        *(f"{name} {verb}" for name in programs for verb, _ in list_commands(load_parser(name))),
    ]
    assert any(verb.startswith("tools.runs ") for verb in wanted["commands"])
    for page, names in wanted.items():
        html = (site.html / "reference" / f"{page}.html").read_text(encoding="utf-8")
        found = re.findall(r"<h[23]>(.*?)<a|<td><p><code.*?>(.*?)</code>", html)
        found = {unescape(re.sub("<.*?>", "", "".join(pair))) for pair in found}
        assert set(names) <= found, page


def test_a_loss_has_its_formula_source_and_row(site):
    text = re.sub(r"\s+", " ", site.read("reference/losses.html"))
    kd = text.partition(" dkd¶ ")[2].partition(" fitnet¶ ")[0]
    for part in ("alpha TCKD + beta NCKD", "arXiv:2203.08679", "beta=8.0", "table of methods"):
        assert part in kd


def test_the_version_and_the_parts_are_shown(site):
    index = site.read("index.html")
    assert f"tpudistil {read_version()}" in index
    assert all(part in index for part in read_navigation())


def test_a_downloaded_file_is_the_projects(site):
    links = {link for page in site.pages.values() for link in page.links if "_downloads" in link}
    assert {Path(link).name for link in links} >= {"digits.ipynb"}


def test_the_lines_of_the_explained_step_are_those_of_the_engine():
    page = (ROOT / "docs" / "explain" / "one_step.md").read_text(encoding="utf-8")
    told = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    body = (ROOT / "engine.py").read_text(encoding="utf-8").partition("def train_step(")[2]
    body = body.partition('"""Run one optimizer step')[2].partition('"""\n')[2]
    assert told == textwrap.dedent(body.partition("\n\n\n")[0] + "\n")


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[x](no_such.md)", "no_such"),
        ("[x](#no-such)", "no-such"),
        ("[x](other.md#no-such)", "no-such"),
        ("![x](no_such.png)", "no_such.png"),
    ],
)
def test_a_broken_link_is_a_warning(tmp_path, text, warning):
    assert warning in build_small(tmp_path, text)


def test_an_orphan_is_a_warning_and_a_whole_site_has_none(tmp_path):
    assert build_small(tmp_path / "whole", "[x](other.md#other)") == ""
    assert "toctree" in build_small(tmp_path / "orphan", "", orphan="# Orphan\n")


def build_small(out: Path, text: str, **more: str) -> str:
    (out / "source").mkdir(parents=True)
    index = f"# Index\n\n{text}\n\n```{{toctree}}\nother\n```\n"
    for name, page in {"index": index, "other": "# Other\n", **more}.items():
        (out / "source" / f"{name}.md").write_text(page, encoding="utf-8")
    return build_pages(out)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> Path:
    """The pages of three versions; only the newest has the page `new`."""
    out = tmp_path_factory.mktemp("versions")
    build_small(out, "", other="# Other\n\n```{toctree}\nnew\n```\n", new="# New\n")
    html = out / "html"
    for name in ("0.9.0", "0.10.0"):
        shutil.copytree(html / LATEST, html / name)
        (html / name / "new.html").unlink()
    write_versions(html, "small")
    return html


def list_switches(page, address: str) -> dict[str, str]:
    """Version -> where the open switcher of a page leads."""
    page.goto(address)
    page.locator(".versions summary").click()
    links = page.locator(".versions a")
    targets = links.evaluate_all("links => links.map(link => link.href)")
    return dict(zip(links.all_inner_texts(), targets, strict=True))


def test_the_switcher_leads_to_the_same_page_of_each_version(versions):
    with open_browser() as browser:
        page = browser.new_page()
        root = versions.as_uri()
        found = list_switches(page, f"{root}/0.9.0/other.html#other")
        assert found == {v: f"{root}/{v}/other.html" for v in (LATEST, "0.10.0", "0.9.0")}
        current = page.locator(".versions [aria-current=page]")
        assert current.all_inner_texts() == ["0.9.0"]
        found = list_switches(page, f"{root}/{LATEST}/new.html")
        assert found[LATEST].endswith("/new.html") and found["0.9.0"].endswith("/index.html")


def test_the_switcher_leads_to_the_list_where_scripts_do_not_run(versions):
    with open_browser() as browser:
        page = browser.new_context(java_script_enabled=False).new_page()
        page.goto((versions / "index.html").as_uri())
        page.wait_for_url(f"**/{LATEST}/index.html")
        assert page.locator(".versions summary").inner_text() == f"Version {read_version()}"
        page.locator(".versions summary").click()
        page.locator(".versions a").click()
        assert page.url == (versions / "versions.html").as_uri()
        assert page.locator("li").all_inner_texts() == [LATEST, "0.10.0", "0.9.0"]
        page.get_by_text("0.10.0").click()
        assert page.url == (versions / "0.10.0" / "index.html").as_uri()


def test_a_released_version_is_built_by_its_own_builder(tmp_path):
    """A clone with one tag, and a heading of an older version that has none."""
    root, html = tmp_path / "clone", tmp_path / "html"
    builder = root / "proofs" / "docs_site.py"
    builder.parent.mkdir(parents=True)
    builder.write_text(
        "import pathlib, sys\n"
        "page = pathlib.Path(sys.argv[2], 'html', 'latest', 'index.html')\n"
        "page.parent.mkdir(parents=True)\n"
        "page.write_text('as it was')\n"
    )
    (root / "CHANGELOG.md").write_text("## [0.2.0]\n\n## [0.1.0]\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "feat: a"], ["tag", "v0.2.0"]):
        subprocess.run([*git, *words], check=True)
    html.mkdir()
    build_releases(root, html)
    assert [path.name for path in html.iterdir()] == ["0.2.0"]
    assert (html / "0.2.0" / "index.html").read_text() == "as it was"
    builder.write_text("raise SystemExit('broken')\n")
    subprocess.run([*git, "commit", "-qam", "fix: b"], check=True)
    subprocess.run([*git, "tag", "v0.3.0"], check=True)
    shutil.rmtree(html / "0.2.0")
    with pytest.raises(UserError, match=r"v0\.3\.0.* has built no pages"):
        build_releases(root, html)


LOOKED_AT = ("index", "docs/explain/architecture", "docs/kd_table")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_are_accessible_at_every_size_and_scheme(site, size, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with open_browser() as browser:
        page = browser.new_page(viewport=SIZES[size], color_scheme=scheme)
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        for name in LOOKED_AT:
            page.goto((site.html / f"{name}.html").as_uri())
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name} scrolls sideways by {wide}"
            found = [
                (fault["id"], node["html"][:200])
                for fault in axe.run(page).response["violations"]
                for node in fault["nodes"]
                if fault["impact"] in ("serious", "critical")
            ]
            assert found == [], name
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
