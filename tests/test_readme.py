"""Every command and every file that the documentation names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.own_images.make_images import main as make_images
from models.factory import create_model, export_model
from tests.support.documented_commands import (
    Places,
    UnknownCommandError,
    find_uncollected,
    list_documents,
    read_commands,
    run_dry,
)
from tests.support.language import write_tokens
from tests.support.mnist_files import write_mnist
from utils.config.sections import ModelSection
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = list_documents()
COMMANDS = [
    (path.relative_to(ROOT).as_posix(), command)
    for path in DOCUMENTS
    for command in read_commands(path.read_text(encoding="utf-8"))
]
# Not where it goes on another path: OWNER/REPOSITORY/losses/name.py is a file of theirs.
_NAMED = (
    r"(?<![\w/-])(?:\.ci|configs|docs|tools|tests|utils|models|losses|big_vision|train)"
    r"/[\w./-]+\.\w+"
)


@pytest.fixture(scope="session")
def data_root(digits_root, tmp_path_factory) -> Path:
    """A root with all datasets that the documents have made when they name them."""
    from tools.prepare_dataset.__main__ import main

    folder = tmp_path_factory.mktemp("documented")
    (folder / "data").mkdir()
    (folder / "data" / "digits").symlink_to(digits_root / "digits")
    files = write_mnist(folder / "mnist_files")
    assert main(["mnist", "--from", str(files), "--out", str(folder / "data")]) == 0
    write_tokens(folder / "data", "stdlib_byte")
    assert make_images([str(folder / "shapes")]) == 0
    facts = {"model": "test_efficientnet", "args": {}, "num_classes": 3}
    teacher = create_model(ModelSection(name="test_efficientnet"), num_classes=3)
    (folder / "own_images").mkdir()
    export_model(teacher.state_dict(), facts, folder / "own_images")
    return folder / "data"


@pytest.fixture
def places(data_root, teacher_run, digits_teacher, text_root, rows_teacher, tmp_path) -> Places:
    return Places(data_root, teacher_run, digits_teacher, text_root, rows_teacher, tmp_path)


@pytest.mark.parametrize(("document", "command"), COMMANDS)
def test_a_documented_command_works(document, command, places):
    assert run_dry(command, places)


def test_the_readme_shows_the_commands_of_the_project():
    text = "\n".join(command for document, command in COMMANDS if document == "README.md")
    for needed in ("run_commands.sh demo", "run_commands.sh test", "main.py --config"):
        assert needed in text


def test_the_readme_is_short_and_says_first_what_is_not_proven():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert lines[0].startswith("# tpudistil: ")
    assert any("No run on a TPU has been made" in line for line in lines[:20])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_named_in_a_document_exists(path):
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing = [link for link in links if not (path.parent / link).exists()]
    # A training split's own files lie in a folder of the package's name, too.
    named = {name for name in re.findall(_NAMED, text) if not name.endswith((".png", ".tar"))}
    named -= {f"docs/{link}" for link in links}
    missing += [name for name in sorted(named) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_placeholder_is_left(path):
    assert re.findall(r"\b[A-Z]+_TABLE\b|\bTODO\b|\bTBD\b", path.read_text()) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_of_commands_is_collected(path):
    text = path.read_text(encoding="utf-8")
    assert find_uncollected(text) == []
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(re.findall(r"^```bash", text, flags=re.MULTILINE))
    for block in blocks:
        assert read_commands(f"```bash\n{block}```\n"), block


SKIPPED = [
    "```sh\npython main.py --help\n```\n",
    "- do\n  ```bash\n  python main.py --help\n  ```\n",
    "~~~bash\npython main.py --help\n~~~\n",
    "```console\n$ ls\n```\n",
    "```Bash\npython main.py --help\n```\n",
    "```text\npython main.py --help\n```\n",
    "```\n$ python -m tools.runs list\n```\n",
    "```yaml\nbash run_commands.sh test\n```\n",
]


@pytest.mark.parametrize("text", SKIPPED)
def test_a_block_that_would_be_skipped_is_found(text):
    assert read_commands(text) == []
    assert find_uncollected(text) != []
    assert (
        find_uncollected("```bash\npython main.py --help\n```\n```text\nwhat it says\n```\n") == []
    )


def test_commands_are_read_only_from_bash_blocks():
    text = (
        "```bash\n# a comment\nA=1 python main.py \\\n  --help  # why\ncd x && ls\n```\n"
        "```text\nnot this\n```\n"
    )
    assert read_commands(text) == ["A=1 python main.py --help", "cd x", "ls"]


@pytest.mark.parametrize(
    "command", ["rm -rf runs", "python other.py", "gcloud auth login", "python -m timm"]
)
def test_a_command_without_a_dry_run_is_an_error(command, places):
    with pytest.raises(UnknownCommandError):
        run_dry(command, places)


WRONG = [
    "python main.py --config configs/digits_kd.yaml --train.epoch=3",
    "python main.py --config configs/no_such.yaml",
    "python main.py --config configs/digits_student.yaml --data.eval_split=validaton",
    "python -m tools.prepare_dataset digits --no-such-flag 3",
    "python -m tools.no_such_tool",
    "bash run_commands.sh no-such-command",
    "bash run_commands.sh train configs/no_such.yaml",
    "bash run_commands.sh test tests/no_such.py",
]


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_fails_its_dry_run(command, places):
    with pytest.raises((AssertionError, UserError)):
        run_dry(command, places)
