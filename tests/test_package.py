"""The wheel and the sdist: what is in them, and the program in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

from tools.__main__ import VERBS, list_programs, list_verbs
from tools.doctor.__main__ import CHECKS, run_check
from tools.doctor.machine import Machine, yellow
from train.execute import Executor
from utils.errors import UserError
from utils.storage import installation
from utils.storage.installation import ROOT, find_bundled, get_workplace, name_commands
from utils.storage.places import get_user_cache

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Rooms that only a checkout has.
NOT_SHIPPED = {"tests", "proofs", "examples", "tpudistil"}
FILES = {".py", ".yaml", ".yml", ".json", ".html", ".css", ".js", ".svg", ".c", ".h", ".sh"}
TORCH = ("torch==", "torchvision==", "torch_xla==")


@dataclass(frozen=True)
class Installed:
    """The program in a bare environment, and an empty folder that it runs in."""

    program: Path
    package: Path
    folder: Path

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "_ARGC"))}
        own = {"PJRT_DEVICE": "CPU", "XDG_CACHE_HOME": str(self.folder.parent / "cache")}
        return subprocess.run(
            [str(self.program), *words],
            cwd=self.folder,
            env=kept | own | environment,
            capture_output=True,
            text=True,
        )

    def list_package(self) -> set[Path]:
        return {path for path in self.package.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder of a wheel and of an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Installed:
    """An environment of the wheel alone; its dependencies are those of this one, by a path."""
    place = tmp_path_factory.mktemp("bare")
    venv, folder = place / "venv", place / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    made = str(next(built.glob("*.whl")))
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", made], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(venv / "bin" / "tpudistil", site / "tpudistil", folder)


def build(root: Path, folder: Path, *flags: str) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed; setup --dev installs it")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), *flags]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


def read_pins(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def normalise(requirement: str) -> str:
    """As a wheel's metadata writes it: without `_`, `===` and capitals."""
    name, equals, version = requirement.partition("==")
    return f"{name.lower().replace('_', '-')}{equals}{version.lstrip('=')}"


def test_the_wheel_has_one_package_with_every_file_of_its_rooms(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert all(name.startswith("tpudistil/") for name in names)
    rooms = set(PROJECT["tool"]["ruff"]["lint"]["isort"]["known-first-party"]) - NOT_SHIPPED
    paths = [ROOT / f"{room}.py" for room in rooms if (ROOT / f"{room}.py").is_file()]
    for folder in (*rooms, "configs", "prices", "schemas"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in FILES]
    wanted = {f"tpudistil/{path.relative_to(ROOT)}" for path in paths}
    assert len(wanted) > 700 and wanted - names == set()
    assert {"tpudistil/__init__.py", "tpudistil/VERSION", "tpudistil/requirements.txt"} <= names
    assert not [name for name in names if name.startswith(("tpudistil/tests", "tpudistil/data/"))]


def test_the_metadata_has_the_pins_of_the_requirement_files(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == (ROOT / "VERSION").read_text().strip()
    extras: dict[str, set[str]] = {"": set()}
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        match = re.search(r"extra == '([\w-]+)'", marker)
        extras.setdefault(match[1] if match else "", set()).add(requirement.strip())
    trainer = read_pins("requirements.txt")
    stack = {normalise(pin) for pin in trainer if pin.startswith(TORCH)}
    others = {normalise(pin) for pin in trainer if not pin.startswith(TORCH)}
    ranges = {"torch<=2.13.0,>=2.9.0", "torchvision<=0.28.0,>=0.24.0", "pyarrow<=26.0.1,>=25.0.1"}
    assert extras[""] - others == ranges
    assert others - extras.pop("") == {"pyarrow==26.0.1"}
    assert "compiler" not in extras
    assert extras.pop("xla") == stack and extras.pop("tpu") >= {"torch-xla[tpu]==2.9.0"}
    assert extras.pop("tpu-compiler") >= {"torch-xla[pallas,tpu]==2.9.0"}
    assert extras.pop("cuda") == {"torch==2.13.0", "torchvision==0.28.0"}
    for extra, pins in extras.items():
        assert pins == set(map(normalise, read_pins(f"requirements-{extra}.txt"))), extra
    assert {"dev", "export", "mirrors", "service", "torch-tpu"} <= set(extras)


def test_a_package_has_one_version_in_all_lists_of_a_stack():
    apart = {"requirements-compiler.txt", "requirements-torch-tpu.txt"}
    pins = [
        pin
        for path in ROOT.glob("requirements*.txt")
        if path.name not in apart
        for pin in read_pins(path.name)
    ]
    versions: dict[str, set[str]] = {}
    for name, _, version in (pin.partition("==") for pin in pins):
        versions.setdefault(name.lower(), set()).add(version)
    # The wheel takes a range of what two lists pin otherwise.
    differing = {name for name, found in versions.items() if len(found) > 1}
    assert differing == {"pyarrow"}


def test_a_users_list_has_no_tests_no_linters_and_no_notebooks():
    development = {pin.partition("==")[0] for pin in read_pins("requirements-dev.txt")}
    assert {"pytest", "ruff", "ipykernel", "gcp-storage-emulator", "hatchling"} <= development
    for name in ("requirements.txt", "requirements-service.txt", "requirements-export.txt"):
        assert not development & {pin.partition("==")[0] for pin in read_pins(name)}, name
    (backend,) = PROJECT["build-system"]["requires"]
    assert backend in read_pins("requirements-dev.txt")


def test_the_sdist_builds_the_same_wheel(built, wheel, tmp_path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "again", "--target", "wheel")
    with zipfile.ZipFile(next((tmp_path / "again").glob("*.whl"))) as again:
        assert sorted(again.namelist()) == sorted(wheel.namelist())


def test_help_lists_a_line_for_each_program_and_the_version_is_that_of_the_file(installed):
    done = installed.run("--help")
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^  (\w+)  +\S", done.stdout, re.MULTILINE))
    assert listed == set(list_verbs()) == set(list_programs()) | set(VERBS)
    assert "python -m" not in done.stdout and "main.py" not in done.stdout
    version = (ROOT / "VERSION").read_text().strip()
    assert installed.run("--version").stdout == f"tpudistil {version}\n"
    assert installed.run().stdout == done.stdout


@pytest.mark.parametrize("verb", ["train", "runs", "serve", "doctor", "prepare-dataset"])
def test_a_verbs_help_names_the_installed_command(installed, verb):
    done = installed.run(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: tpudistil {verb.replace('-', '_')} ")
    assert "python -m tools" not in done.stdout and "python main.py" not in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("servx",), "error: unknown verb 'servx'; did you mean 'serve'?; see tpudistil --help\n"),
        (("train", "--no_such=1"), "tpudistil train --help\n"),
        (("train", "--config", "configs/no.yaml"), "use a readable YAML file\n"),
        (("runs", "no-such"), "see tpudistil runs --help\n"),
    ],
)
def test_a_wrong_call_gives_one_line_and_code_2(installed, words, line):
    done = installed.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(line) and done.stderr.count("\n") == 1
    assert list(installed.folder.iterdir()) == []


def test_a_check_reads_a_bundled_configuration_and_no_module_of_the_folder(installed, tmp_path):
    """The user's folder may have modules of the same names, and a configuration, too."""
    for name in ("datasets.py", "utils.py", "engine.py", "tools.py"):
        (tmp_path / name).write_text("raise SystemExit('the folder is on the path')\n")
    here = Installed(installed.program, installed.package, tmp_path)
    flags = ("--check", "--runtime.device=cpu")
    done = here.run("train", "--config", "configs/smoke.yaml", *flags)
    assert done.returncode == 0, done.stderr
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "smoke.yaml").write_text("optim: {lr: -1}\n")
    refused = here.run("train", "--config", "configs/smoke.yaml", *flags)
    assert refused.returncode == 2 and "optim.lr" in refused.stderr


def test_the_completion_of_verbs_and_flags_comes_from_their_parsers(installed, tmp_path):
    def complete(line: str) -> set[str]:
        answer = tmp_path / "answer"
        environment: Mapping[str, str] = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        }
        assert installed.run(**environment).returncode == 0
        return {word.strip() for word in answer.read_text().split("\n")}

    assert complete("tpudistil se") == {"serve"}
    assert {"list", "show", "compare"} <= complete("tpudistil runs ")
    assert "--optim.lr" in complete("tpudistil train --optim.l")
    for shell in ("bash", "zsh", "fish"):
        script = installed.run("completion", shell).stdout
        assert "tpudistil" in script and "python -m" not in script


def test_pages_of_comparisons_need_nothing_of_the_service():
    """The demo ends with one; jinja2 comes with torch."""
    names = {pin.partition("==")[0].lower() for pin in read_pins("requirements-service.txt")}
    assert {"fastapi", "tsdownsample"} <= names
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(names - {'jinja2'})}))\n"
        "from service.web.views.jinja import create_environment\n"
        "create_environment().get_template('file_comparison.html')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_demo_runs_and_writes_into_the_folder_alone(installed):
    before = installed.list_package()
    # The teacher has learnt nothing in 20 steps, which a run refuses otherwise.
    flags = ("--train.steps=20", "--optim.warmup_epochs=0", "--distill.allow_weak_teacher=true")
    done = installed.run("demo", "--", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\ntpudistil runs compare " in done.stdout
    listed = installed.run("runs", "list")
    assert listed.returncode == 0 and listed.stdout.count("demo/") == 3, listed.stdout
    assert {path.name for path in installed.folder.iterdir()} == {"data", "runs"}
    assert installed.list_package() == before
    record = (installed.folder / "runs/demo/alone-seed0/environment.json").read_text()
    assert '"tpudistil": "' in record and "an installed package" in record


@pytest.fixture
def package(monkeypatch, tmp_path) -> Path:
    """A folder that passes for the installed package."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "__init__.py").touch()
    monkeypatch.setattr(installation, "ROOT", tmp_path / "site")
    return tmp_path / "site"


def test_a_checkout_works_in_its_root_and_calls_its_commands_by_their_names():
    text = "use python main.py --help, or python -m tools.runs list"
    assert get_workplace() == ROOT and name_commands(text) == text


def test_texts_of_an_installed_program_name_its_commands(package):
    texts = {
        "use python main.py --check": "use tpudistil train --check",
        "as main.py --check (docs/store.md); /a/main.py": (
            "as tpudistil train --check (page store of the documents); /a/main.py"
        ),
        "python -m tools.cache write; tools.serve": "tpudistil cache write; tpudistil serve",
        "python -m bill.compile_for_tpu": "tpudistil compile",
        "run bash run_commands.sh setup --torch-tpu": "run pip install 'tpudistil[torch-tpu]'",
        "bash run_commands.sh export installs requirements-export.txt and runs": (
            "pip install 'tpudistil[export]'"
        ),
        "bash run_commands.sh mirrors, and this program by .venv-mirrors/bin/python": (
            "pip install 'tpudistil[mirrors]'"
        ),
        "pip install -r requirements.txt": "pip install 'tpudistil[xla]'",
    }
    assert {text: name_commands(text) for text in texts} == texts


def test_pages_and_findings_of_an_installed_program_name_its_commands(package):
    from service.web.problems import describe_problem
    from service.web.views.jinja import create_environment

    environment = create_environment()
    templates = environment.list_templates(extensions="html")
    texts = [environment.loader.get_source(environment, name)[0] for name in templates]
    assert len(texts) > 10 and any("tpudistil serve --add-token NAME" in text for text in texts)
    assert not [text for text in texts if re.search(r"python -m (tools|bill)|main\.py", text)]
    detail = describe_problem(401, "start python -m tools.serve")["detail"]
    assert detail == "start tpudistil serve"


def test_a_doctors_hint_names_the_installed_commands(package, monkeypatch):
    hint = "bash run_commands.sh setup"
    monkeypatch.setitem(CHECKS, "torch", lambda machine: yellow("main.py has none", hint))
    finding = run_check("torch", Machine())
    assert finding.text == "tpudistil train has none"
    assert finding.hint == "pip install 'tpudistil[xla]'"


def test_an_installed_program_works_in_the_current_directory(package, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert get_workplace() == tmp_path
    (package / "a.yaml").touch()
    assert find_bundled("a.yaml") == str(package / "a.yaml")
    (tmp_path / "a.yaml").touch()
    assert find_bundled("a.yaml") == "a.yaml" and find_bundled("b.yaml") == "b.yaml"


def test_an_installed_program_ships_no_tree_to_other_machines(package):
    with pytest.raises(UserError, match="launching on other machines ships a clone"):
        Executor(dry_run=True)


def test_a_cache_of_the_former_name_is_used_on(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get_user_cache("runs", former="trainer/runs") == tmp_path / "tpudistil/runs"
    (tmp_path / "trainer" / "runs").mkdir(parents=True)
    assert get_user_cache("runs", former="trainer/runs") == tmp_path / "trainer/runs"
    (tmp_path / "tpudistil" / "runs").mkdir(parents=True)
    assert get_user_cache("runs", former="trainer/runs") == tmp_path / "tpudistil/runs"
