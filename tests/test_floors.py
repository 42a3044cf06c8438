"""Imports only point down, heavy frameworks stay in their packages, imports have no effects."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room -> floor. A module belongs to the longest room that its name begins with.
FLOORS = {
    "utils.registry": 0,
    "utils.json_types": 0,
    "utils.log": 0,
    "utils.errors": 0,
    "utils.error_codes": 0.1,
    "utils.own_code": 0,
    "utils.patterns": 0,
    "utils.processor": 0,
    "utils.generations": 0.2,
    "utils.hosts": 0.2,
    "utils.storage": 0.5,
    "utils.programs": 0.7,
    "utils.config": 1,
    "store": 1,
    "utils.endings": 1,
    "utils.stopping": 1,
    "utils.device_use": 1.5,
    "utils.blocks": 1.9,
    "utils.runtime": 2,
    "big_vision": 2,
    "utils.checkpoint": 2.4,
    "utils.weights": 2.6,
    "models": 3,
    "losses": 3,
    "datasets": 3,
    "optim_factory": 3,
    "utils.metrics": 3,
    "utils.ema": 3,
    "utils.torch_types": 1.9,
    "utils.clipping": 3,
    "engine": 4,
    "tasks": 4,
    # The life of a run is a straight line: each imports only those before it.
    "job.curves": 5.05,
    "job.metric_writer": 5.05,
    "job.spec": 5.1,
    "job.micro_batches": 5.15,
    "job.resume": 5.2,
    "job.check": 5.3,
    "job.build": 5.4,
    "job.stream": 5.5,
    "job.warmup": 5.52,
    "job.step_timer": 5.55,
    "job.correctness": 5.56,
    "job.recording": 5.57,
    "job.saving": 5.58,
    "job.stopping": 5.59,
    "job.callbacks": 5.6,
    "job.steps.modules": 5.55,
    "job.steps.profiling": 5.56,
    "job.steps.bad_step": 5.65,
    "job.summary": 5.7,
    "job.lineage": 5.75,
    "job.replica": 5.8,
    "job.entry": 5.9,
    "job": 5.95,
    "main": 6,
    "bill": 6.5,
    "service": 7,
    "tools": 7,
    "train": 7,
    "tpudistil": 7.2,
    "lab": 7.5,
    "proofs": 8,
}
# Floors whose rooms may use each other: the ground floor and programs.
MIXED = (0, 7)
OWN = {room.partition(".")[0] for room in FLOORS} | {"tests"}
# Rooms of programs for those who change the project.
DEVELOPERS = ("bill/", "lab/", "proofs/", "tests/")
# Old names of programs there.
OLD_NAMES = (
    "tools/proofs/__init__.py",
    "tools/lab/__init__.py",
)
# Framework -> where it may be imported; in all of them inside functions only.
ROOMS_OF = {
    "torch_xla": (
        "utils/runtime/xla",
        "models/patches/",
        "models/delta/kernels",
        "tools/",
        *DEVELOPERS,
    ),
    "torch_tpu": ("utils/runtime/tpu/", *DEVELOPERS),
    "tensorflow": ("big_vision/", "tools/", *DEVELOPERS),
    "tensorflow_datasets": ("big_vision/", "tools/", *DEVELOPERS),
    "jax": ("models/delta/kernels", "models/patches/kernels", "tools/", *DEVELOPERS),
    # Other trackers' clients live in an environment of their own.
    "mlflow": ("tools/mirror/targets/", "tests/"),
    "wandb": ("tools/mirror/targets/", "tests/"),
    "trackio": ("tools/mirror/targets/", "tests/"),
}
LIGHT_LIBRARIES = {
    "pydantic",
    "pydantic_core",
    "pydantic_settings",
    "yaml",
    "fsspec",
    "google_crc32c",
    "psutil",
    "zstandard",
}
# What a trainer must never load: only the readers of its runs do.
READERS_LIBRARIES = {
    "sqlalchemy": ("store/index/",),
    "scipy": ("store/compare/",),
    "pyarrow": ("store/export.py",),
    "numpy": ("store/record/sketches.py",),
    "ddsketch": ("store/record/sketches.py",),
    "rich": ("store/terminal.py", "store/quality/"),
}
WEB_LIBRARIES = {"fastapi", "starlette", "uvicorn", "jinja2", "plotly", "tsdownsample", "optuna"}
# The service asks the store and starts programs: it never does their work itself. The children
# make the checks of main.py, or are it, in a process of their own.
SERVICE_CHILDREN = ("service/checker_child.py", "service/jobs/warm_child.py")
NOT_OF_SERVICE = {"torch", "torchvision", "torch_xla", "tensorflow", "jax", "timm"}
MAY_PRINT = ("tools/", "train/", "store/quality/report_comparison.py", *DEVELOPERS)
MAY_NAME_DEVICES = ("utils/runtime/", "models/patches/", "tools/", "train/", *DEVELOPERS)
DEVICE_NAMES = {"xla", "tpu", "cpu", "cuda", "gpu", "TPU", "CPU", "CUDA", "GPU"}
BAD_NAMES = {"utils.py", "common.py", "misc.py", "helpers.py"}


def list_sources(root: Path) -> list[Path]:
    """The house's Python files, without virtual environments and hidden folders."""
    tops = {room.partition(".")[0] for room in FLOORS} | {"tests"}
    found = [root / f"{top}.py" for top in sorted(tops) if (root / f"{top}.py").is_file()]
    for top in sorted(tops):
        found += sorted((root / top).rglob("*.py"))
    return found


def find_violations(root: Path) -> list[str]:
    """Every breach of the rules below a root, as `file:line: rule`."""
    found = []
    for path in list_sources(root):
        name = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
        found += [f"{name}:{line}: {rule}" for line, rule in _check_file(name, tree)]
    return found


def _check_file(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if Path(name).name in BAD_NAMES:
        yield 1, f"a room needs a name, not {Path(name).name}"
    if name == "utils/__init__.py" and tree.body:
        yield 1, "utils/__init__.py is empty"
    nodes = list(ast.walk(tree))
    yield from _check_imports(name, nodes)
    if not name.startswith("tests/"):
        yield from _check_import_time(tree)
    if not name.startswith(MAY_PRINT):
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                yield node.lineno, "print outside tools/"
    if not name.startswith(MAY_NAME_DEVICES):
        yield from _check_device_branches(nodes)


def _check_imports(name: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    room = _get_room(module)
    if room is None and not name.startswith("tests/") and name != "utils/__init__.py":
        yield 1, f"{module} stands on no floor; give it one"
        return
    lazy = {id(n) for n in _iterate_inside(filter(_is_function, nodes))}
    typed = {id(n) for n in _iterate_inside(filter(_is_for_types, nodes))}
    for node, target in _iterate_imports(module, name, nodes):
        top = target.partition(".")[0]
        if name in OLD_NAMES:
            continue
        if name.startswith("utils/") and top == "store":
            yield node.lineno, f"utils imports {target}: a run's files are the store's business"
        if top in ROOMS_OF:
            if not name.startswith(ROOMS_OF[top]):
                yield node.lineno, f"{top} is imported outside its rooms"
            elif id(node) not in lazy | typed and not name.startswith("tests/"):
                yield node.lineno, f"{top} is imported at module level"
        if room is None:
            continue
        if room == "service" and _is_not_for_service(name, target):
            yield node.lineno, f"the service imports {target}"
        if top in OWN:
            yield from _check_direction(node, room, target, is_for_types=id(node) in typed)
        elif FLOORS[room] == 0 and top not in sys.stdlib_module_names:
            yield node.lineno, f"floor 0 imports {top}"
        elif top in READERS_LIBRARIES and name.startswith(READERS_LIBRARIES[top]):
            continue
        elif top in WEB_LIBRARIES:
            yield from _check_web(node, name, top)
        elif 0 < FLOORS[room] <= 1 and top not in sys.stdlib_module_names | LIGHT_LIBRARIES:
            yield node.lineno, f"floor {FLOORS[room]} imports {top}"


def _is_not_for_service(name: str, target: str) -> bool:
    """Whether it would do the work of a program that it only starts."""
    other = _get_room(target)
    if other is None or name in SERVICE_CHILDREN:
        return target.partition(".")[0] in NOT_OF_SERVICE
    return FLOORS[other] > 1 and other not in ("service", "train")


def _check_web(node: ast.stmt, name: str, library: str) -> Iterator[tuple[int, str]]:
    room = "service/sweeps/" if library == "optuna" else "service/web/"
    if not name.startswith(room):
        yield node.lineno, f"{library} is imported outside {room}"


# What a job may know of tasks: the table of them and what they have in common.
_TASK_SEAM = ("tasks.protocol", "tasks.work")


def _knows_a_kind(room: str, target: str) -> bool:
    is_seam = target in ("tasks", "tasks.TASKS") or target.startswith(_TASK_SEAM)
    return room.startswith("job") and target.startswith("tasks") and not is_seam


def _check_direction(
    node: ast.stmt, room: str, target: str, *, is_for_types: bool
) -> Iterator[tuple[int, str]]:
    """Down only; a sibling may be named in annotations."""
    other = _get_room(target)
    if _knows_a_kind(room, target):
        yield node.lineno, f"{room} imports {target}: a job knows no kind of task"
    if target.startswith("tests"):
        yield node.lineno, f"{room} imports tests"
    elif other is None or other == room:
        return
    elif FLOORS[other] > FLOORS[room]:
        yield node.lineno, f"{room} imports {target}, which is above it"
    elif FLOORS[other] == FLOORS[room] and FLOORS[room] not in MIXED and not is_for_types:
        yield node.lineno, f"{room} imports its sibling {target}"


def _check_import_time(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Module level holds definitions and their registration."""
    for node in tree.body:
        if _is_registration(node):
            continue
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield node.lineno, f"something happens at import: {ast.unparse(node.value)}"
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Subscript | ast.Attribute) for target in targets):
                yield node.lineno, f"something happens at import: {ast.unparse(node)}"
        elif isinstance(node, ast.For | ast.While | ast.With | ast.Try):
            yield node.lineno, f"a {type(node).__name__} at module level"


def _is_registration(node: ast.stmt) -> bool:
    """`REGISTRY.register(name)(factory)`, alone or for each of several names."""
    if isinstance(node, ast.For):
        return all(_is_registration(inner) for inner in node.body)
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    outer = node.value.func
    return isinstance(outer, ast.Call) and getattr(outer.func, "attr", "") == "register"


def _check_device_branches(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Compare):
            words = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            words = [node.value]
        else:
            continue
        texts = {n.value for w in words for n in ast.walk(w) if isinstance(n, ast.Constant)}
        if texts & DEVICE_NAMES:
            yield node.lineno, f"a branch on a device: {ast.unparse(node)}"


def _iterate_inside(outer: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Every import below these nodes."""
    for node in outer:
        yield from (n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom))


def _iterate_imports(
    module: str, name: str, nodes: list[ast.AST]
) -> Iterator[tuple[ast.stmt, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                depth = node.level - name.endswith("__init__.py")
                parents = module.split(".")[: len(module.split(".")) - depth]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((node, f"{base}.{alias.name}".lstrip(".")) for alias in node.names)


def _get_room(module: str) -> str | None:
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in FLOORS), None)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def test_imports_follow_the_layers():
    assert find_violations(ROOT) == []


def test_every_source_file_is_checked():
    names = {path.relative_to(ROOT).as_posix() for path in list_sources(ROOT)}
    rooms = (
        "main.py",
        "engine.py",
        "datasets.py",
        "optim_factory.py",
        "models/factory.py",
        "losses/weighted.py",
        "big_vision/pp/registry.py",
        "store/record/runs.py",
        "utils/runtime/xla/runtime.py",
        "tools/prepare_dataset/write.py",
        "proofs/house.py",
        "bill/hlo.py",
        "tests/conftest.py",
    )
    assert not set(rooms) - names


PLANTED = [
    ("losses/a.py", "from models import create_model", "its sibling"),
    ("models/a.py", "import losses.logits", "its sibling"),
    ("models/a.py", "def f():\n    from optim_factory import Schedule", "its sibling"),
    ("tasks/a.py", "from engine import fit", "its sibling"),
    ("tools/a.py", "from proofs import chaos", "above it"),
    ("proofs/a.py", "import torch_xla", "at module level"),
    ("engine.py", "from tasks import classify", "its sibling"),
    ("job/check.py", "def f():\n    from job.build import Parts", "above it"),
    ("job/spec.py", "from job.resume import restore", "above it"),
    ("job/check.py", "from tasks.images.mixing import Mixing", "knows no kind of task"),
    ("utils/runtime/a.py", "from big_vision.pp import registry", "its sibling"),
    ("utils/config/a.py", "def f():\n    from engine import fit", "above it"),
    ("utils/runtime/a.py", "from utils import checkpoint", "above it"),
    ("models/a.py", "from . import factory\nfrom .. import engine", "above it"),
    ("engine.py", "if TYPE_CHECKING:\n    from main import Task", "above it"),
    ("datasets.py", "from tools import prepare_dataset", "above it"),
    ("models/a.py", "from tests import conftest", "imports tests"),
    ("utils/config/a.py", "import torch", "floor 1 imports torch"),
    ("store/a.py", "def f():\n    import torch", "floor 1 imports torch"),
    ("store/a.py", "def f():\n    import sqlalchemy", "floor 1 imports sqlalchemy"),
    ("utils/log.py", "import tqdm", "floor 0 imports tqdm"),
    ("utils/storage.py", "import torch", "floor 0.5 imports torch"),
    ("utils/storage.py", "from store import runs", "above it"),
    ("engine.py", "def f():\n    import torch_xla", "outside its rooms"),
    ("utils/runtime/xla.py", "import torch_xla.core.xla_model as xm", "at module level"),
    ("main.py", "def f():\n    import tensorflow as tf", "outside its rooms"),
    ("datasets.py", "def f():\n    import tensorflow", "outside its rooms"),
    ("big_vision/a.py", "from tensorflow import io", "at module level"),
    ("tools/a.py", "import tensorflow_datasets", "at module level"),
    ("tools/a.py", "def f():\n    import wandb", "outside its rooms"),
    ("tools/mirror/targets/a.py", "import mlflow", "at module level"),
    ("models/a.py", "def f():\n    import jax.numpy", "outside its rooms"),
    ("engine.py", "def f():\n    print('step')", "print outside"),
    ("main.py", "setup_logging()", "happens at import"),
    ("tools/a.py", "import sys\nsys.path.insert(0, '.')", "happens at import"),
    ("losses/a.py", "for name in ('a', 'b'):\n    run(name)", "For at module level"),
    ("models/a.py", "os.environ['A'] = 'b'", "happens at import"),
    ("engine.py", "def f(device):\n    return device.type == 'xla'", "branch on a device"),
    ("losses/a.py", "def f(d):\n    if d in ('cpu', 'tpu'):\n        return 1", "on a device"),
    ("job/check.py", "def f():\n    import service.web", "above it"),
    ("service/a.py", "from engine import fit", "the service imports engine"),
    ("service/checker_child.py", "def f():\n    import torch", "the service imports torch"),
    ("service/jobs/starters.py", "def f():\n    import main", "the service imports main"),
    ("service/a.py", "from job import check", "the service imports job"),
    ("service/web/a.py", "def f():\n    import tools.runs.find_runs", "the service imports tools"),
    ("service/web/a.py", "def f():\n    import torch", "the service imports torch"),
    ("service/client.py", "import fastapi", "outside service/web"),
    ("tools/serve.py", "def f():\n    import uvicorn", "outside service/web"),
    ("store/a.py", "import jinja2", "outside service/web"),
    ("service/web/a.py", "import optuna", "outside service/sweeps"),
    ("utils/metrics.py", "def f():\n    from store.record import runs", "the store's business"),
    ("utils/misc.py", "x = 1", "needs a name"),
    ("utils/__init__.py", "from utils import log", "is empty"),
    ("utils/shapes.py", "x = 1", "stands on no floor"),
]


@pytest.mark.parametrize(("name", "text", "rule"), PLANTED)
def test_a_planted_violation_is_found(tmp_path, name, text, rule):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    found = find_violations(tmp_path)
    assert len(found) >= 1
    assert all(line.startswith(f"{name}:") for line in found)
    assert rule in " ".join(found)


ALLOWED = [
    ("utils/runtime/xla.py", "def f():\n    import torch_xla\n    return torch_xla"),
    ("main.py", "def f():\n    from engine import fit\n    from losses import LossInputs"),
    ("utils/runtime/a.py", "def f(name):\n    return name == 'xla'"),
    ("tools/a.py", "def f():\n    print(1)"),
    ("tools/a.py", "import sys\nif __name__ == '__main__':\n    sys.path[0] = '.'"),
    ("utils/config/a.py", "import yaml\nfrom pydantic import BaseModel\nfrom utils import errors"),
    ("losses/a.py", "if TYPE_CHECKING:\n    from datasets import Batch"),
    ("job/check.py", "from job.resume import restore"),
    ("store/index/a.py", "import sqlalchemy"),
    ("service/web/a.py", "import fastapi\nfrom store.index import RunIndex"),
    ("service/sweeps/a.py", "def f():\n    import optuna"),
    ("losses/a.py", "from losses.base import LOSSES\nimport torch"),
    ("losses/a.py", "for name in ('a', 'b'):\n    LOSSES.register(name)(make(name))"),
]


@pytest.mark.parametrize(("name", "text"), ALLOWED)
def test_permitted_imports_are_no_violation(tmp_path, name, text):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    assert find_violations(tmp_path) == []


# What is learnt has no place in the loop: neither as a name nor as a word.
TASK_WORDS = {"top1", "images", "labels", "logits", "classes"}


def find_task_words(text: str) -> set[str]:
    """The words of tasks among a program's names and texts, `train_labels` and `labels` alike."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        fields = (value for _, value in ast.iter_fields(node) if isinstance(value, str))
        for field in fields:
            found |= set(re.split(r"[^a-z0-9]+", field.lower()))
    return found & TASK_WORDS


def test_the_engine_names_no_task():
    assert find_task_words((ROOT / "engine.py").read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def f(batch):\n    return batch.images", "images"),
        ("best = metrics['top1']", "top1"),
        ("def f(train_labels): pass", "labels"),
        ('"""Sums logits."""', "logits"),
        ("import classes", "classes"),
    ],
)
def test_a_planted_task_name_is_found(text, word):
    assert find_task_words(text) == {word}
