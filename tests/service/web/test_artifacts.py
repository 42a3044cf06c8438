"""Files of runs are downloads by their id; nothing from outside the store, on any request."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from service.web.artifacts import create_artifact_id, open_beneath
from store.record.artifacts import ARTIFACTS_FILE, publish_artifacts
from tests.service.web.apps import make_app, make_client, make_store
from tests.service.web.test_gate import list_routes

SECRET = "the-secret-of-outside"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("artifacts")
    store = make_store(root)
    (root / "secret.txt").write_text(SECRET)
    (store / "secret.txt").write_text(SECRET)
    run = store / "digits" / "seed1"
    (run / "events").mkdir()
    (run / "page.html").write_text("<script>alert(1)</script>")
    (run / "events" / 'naïve "name".svg').write_text("<svg onload='alert(1)'/>")
    publish_artifacts(run)
    return store


@pytest.fixture(scope="module")
def app(store):
    return make_app(store, changes_per_minute=10_000)


@pytest.fixture(scope="module")
def client(app):
    # As a context it keeps one loop for all requests.
    with make_client(app, "view") as client:
        yield client


def test_a_listed_file_is_downloaded_unchanged_and_never_rendered(store, client):
    found = client.get("/api/v1/runs/digits/seed1").json()["artifacts"]
    assert {one["path"] for one in found} >= {"page.html", 'events/naïve "name".svg'}
    for one in found:
        answer = client.get(f"/api/v1/runs/digits/seed1/artifacts/{one['id']}")
        assert answer.content == (store / "digits" / "seed1" / one["path"]).read_bytes()
        assert answer.headers["content-disposition"].startswith("attachment; filename*=UTF-8''")
        assert "\n" not in answer.headers["content-disposition"]
        is_picture = one["path"].endswith(".png")
        kind = "image/png" if is_picture else "application/octet-stream"
        assert answer.headers["content-type"] == kind
        assert int(answer.headers["content-length"]) == len(answer.content)


PLANTED = (
    "../../../secret.txt",
    "../../secret.txt",
    "/etc/passwd",
    "linked.txt",
    "folder/secret.txt",
    "hard/../../secret.txt",
    "",
    ".",
    "..",
    "pipe",
    "/dev/zero",
    "/proc/self/environ",
    "a\x00b",
    "checkpoints",
    "folder",
    "..\\..\\secret.txt",
    "%2e%2e/%2e%2e/secret.txt",
    "device",
)


def test_a_malicious_path_in_a_runs_list_is_refused(store):
    """`artifacts.json` is written by a trainer: it is no more trusted than a client."""
    run = store / "digits" / "seed0"
    (run / "linked.txt").symlink_to(store.parent / "secret.txt")
    (run / "folder").symlink_to(store.parent)
    (run / "device").symlink_to("/dev/zero")
    os.mkfifo(run / "pipe")
    (run / "checkpoints").mkdir(exist_ok=True)
    entry = {"kind": "file", "bytes": 1, "sha256": "0" * 64, "crc32c": "0" * 8}
    entries = [{"path": path, **entry} for path in PLANTED]
    text = json.dumps({"schema_version": 1, "artifacts": entries})
    (run / ARTIFACTS_FILE).write_text(text)
    client = make_client(make_app(store), "view")
    for path in PLANTED:
        place = f"/api/v1/runs/digits/seed0/artifacts/{create_artifact_id(path)}"
        answer = client.get(place)
        assert answer.status_code == 404, path
        assert SECRET not in answer.text


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("1")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    handle = open_beneath(tmp_path, ["a", "file"])
    os.close(handle)
    for names in (["b", "file"], ["a", "..", "a", "file"], ["a", ""], [], ["a/file"], ["a"]):
        with pytest.raises(OSError):
            open_beneath(tmp_path, names)


def list_traversals() -> list[str]:
    """More than 300 ways to write a place that is somewhere else."""
    dots = (
        "..",
        "%2e%2e",
        "%252e%252e",
        ".%2e",
        "..%00",
        "%c0%ae%c0%ae",
        "。。",
        "．．",
        "..;",
        "....",
        "%uff0e%uff0e",
        "\u2025",
        ".. ",
        "..\t",
    )
    slashes = ("/", "%2f", "\\", "%5c", "%252f", "／", "%c0%af", "//")
    targets = ("secret.txt", "etc/passwd", "proc/self/environ")
    climbed = [
        (dot + slash) * depth + target
        for dot, slash, target in itertools.product(dots, slashes, targets)
        for depth in (2, 6)
    ]
    others = [
        "/etc/passwd",
        "file:///etc/passwd",
        "gs://b/x",
        "~root",
        "$HOME",
        "\x00",
        "a\x00b",
        "CON",
        "digits/../../secret.txt",
        "/dev/zero",
        "/proc/self/fd/0",
        "\\\\host\\share",
        "C:\\x",
        "-",
        "*",
        "?",
        "'",
        '"',
        "<script>",
        "${jndi:ldap://h}",
        "{{7*7}}",
        "\ud7ff",
        "\U0001f600",
        "a" * 4096,
        "%",
        "%zz",
        "\r\nX: y",
    ]
    return [*climbed, *others]


def test_path_traversal_is_tried_with_over_300_strings():
    assert len(set(list_traversals())) >= 300


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 23], ids=["all", "some"])
def test_no_path_parameter_leads_out_of_the_store(app, client, step):
    """Each string in each parameter of each route, encoded and as it is: no byte from outside."""
    strings = list_traversals()[::step]
    templates = sorted(
        {path for method, path in list_templates(app) if method == "GET" and "{" in path}
    )
    assert len(templates) >= 6
    passwd = Path("/etc/passwd").read_text().splitlines()[0]
    asked = 0
    for template in templates:
        names = re.findall(r"{(\w+)[^}]*}", template)
        for chosen, text in itertools.product(names, strings):
            known = {
                "experiment": "digits",
                "name": "seed1",
                "job_id": "x",
                "artifact_id": "0" * 16,
            }
            for value in {quote(text, safe="%"), quote(text, safe="")}:
                path = re.sub(
                    r"{(\w+)[^}]*}",
                    lambda found: value if found[1] == chosen else known.get(found[1], "x"),  # noqa: B023
                    template,
                )
                answer = client.get(path)
                asked += 1
                assert answer.status_code in (200, 303, 404, 405, 422, 431), path
                assert SECRET not in answer.text and passwd not in answer.text, path
    assert asked >= len(strings) * len(templates)


def list_templates(app):
    """Method and path of each route as it was written, parameters in braces."""
    found = set(list_routes(app, fill=False))
    assert found
    return found


def test_static_paths_do_not_leave_their_folder(client):
    for text in list_traversals()[::7]:
        for value in {quote(text, safe="%/"), quote(text, safe="")}:
            answer = client.get(f"/static/{value}")
            assert answer.status_code in (404, 405, 431), text
            assert SECRET not in answer.text


def test_pictures_added_by_a_tool_are_shown_but_none_from_outside(tmp_path):
    store = make_store(tmp_path)
    run = store / "digits" / "seed0"
    (run / "evaluation").mkdir()
    (run / "evaluation" / "eval.confusion.png").write_bytes(b"\x89PNG\r\n\x1a\nmatrix")
    (tmp_path / "secret.png").write_text(SECRET)
    (run / "link.png").symlink_to(tmp_path / "secret.png")
    (run / "outside").symlink_to(tmp_path)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "x.png").write_bytes(b"no")
    client = make_client(make_app(store), "view")
    page = client.get("/runs/digits/seed0").text
    (place,) = re.findall(r'<img src="(/api/[^"]+)" alt="([^"]+)"', page)
    assert place[1] == "evaluation/eval.confusion.png"
    answer = client.get(place[0])
    assert answer.content.endswith(b"matrix") and answer.headers["content-type"] == "image/png"
    assert answer.headers["content-disposition"].startswith("attachment")
    for path in ("link.png", "outside/secret.png", "checkpoints/x.png"):
        address = f"/api/v1/runs/digits/seed0/artifacts/{create_artifact_id(path)}"
        assert client.get(address).status_code == 404
