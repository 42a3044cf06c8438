"""Test set-up: the XLA device exists before any backward and before TensorFlow."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PJRT_DEVICE", "CPU")
# Else importing torch would open libtpu where torch_tpu is installed.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("MPLBACKEND", "Agg")
# gcsfs asks at its import; its other client looks at Google's servers for the kind of a bucket.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Graphs of tests run a few times only: compiling them without optimisation takes half the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# A backward before the XLA device exists makes the first XLA backward die, and TensorFlow imported
# before torch_xla aborts Python: so the device comes first, for all tests.
if importlib.util.find_spec("torch_xla") is not None:
    import torch_xla

    torch_xla.device()

elif importlib.util.find_spec("torch_tpu") is not None:
    os.environ.setdefault("TPU_STANDIN", "cpu")
    from utils.runtime.tpu.runtime import open_device

    open_device()

if importlib.util.find_spec("torch") is not None:
    # Tests that call layers without a runtime would damage this process's heap.
    from utils.runtime.narrow_convolutions import guard_narrow_convolutions

    guard_narrow_convolutions()

# The same examples on every machine, and no limit that a loaded machine exceeds: both the deadline
# and the check for slow strategies read the clock.
settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")

MAPS = Path("/proc/self/maps")
MAX_MAPS = Path("/proc/sys/vm/max_map_count")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a TPU stack that is not installed."""
    packages = {"xla": "torch_xla", "tpu": "torch_tpu"}
    missing = {m: p for m, p in packages.items() if importlib.util.find_spec(p) is None}
    for item in items:
        for mark in missing.keys() & {marker.name for marker in item.iter_markers()}:
            reason = f"{missing[mark]} is not installed"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def warn_of_memory_maps() -> Iterator[None]:
    """Warn once the process holds three quarters of the memory maps that the kernel allows.

    XLA on the CPU maps the code of each program for good; a process that exceeds the kernel's
    limit ends with a segmentation fault.
    """
    yield
    if MAPS.exists() and MAX_MAPS.exists():
        count, limit = MAPS.read_bytes().count(b"\n"), int(MAX_MAPS.read_text())
        if count > 0.75 * limit:
            warnings.warn(
                f"this test process holds {count} of at most {limit} memory maps "
                f"(vm.max_map_count); run fewer test files in one process",
                stacklevel=1,
            )


@pytest.fixture(autouse=True)
def untouched_log() -> None:
    """Reset the project's log to that of a fresh process."""
    from utils.log import get_logger

    logger = get_logger()
    logger.handlers = []
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def digits_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the digits dataset, written once by the tool that users call."""
    from tests.support.input_data import use_private_cache
    from tools.prepare_dataset.__main__ import main

    use_private_cache(tmp_path_factory.mktemp("cache"))
    root = tmp_path_factory.mktemp("datasets")
    assert main(["digits", "--out", str(root)]) == 0
    return root


@pytest.fixture(scope="module")
def records_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the dataset `records`; its indexes are the module's own."""
    from tests.support.input_data import use_private_cache, write_records

    use_private_cache(tmp_path_factory.mktemp("cache"))
    directory = tmp_path_factory.mktemp("data")
    write_records(directory)
    return directory


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[dict[str, str]]:
    """A gs:// server on loopback: the environment that makes gs:// lead to it."""
    from tests.support.gcs import run_server

    with run_server() as environment:
        yield environment


@pytest.fixture
def gs(gcs_server: dict[str, str]) -> Iterator[str]:
    """An empty place on the loopback server, where gs:// leads during the test."""
    from tests.support.gcs import use_server

    with use_server(gcs_server):
        yield f"gs://bucket/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def teacher_run(tmp_path_factory: pytest.TempPathFactory, digits_root: Path) -> Path:
    """Return the directory of a finished run on the digits, trained above chance."""
    import main

    output_dir = tmp_path_factory.mktemp("teacher")
    flags = [
        "--config",
        str(ROOT / "configs/digits_student.yaml"),
        f"--data.root={digits_root}",
        f"--run.output_dir={output_dir}",
        "--run.run_id=taught",
        "--runtime.device=cpu",
        "--train.epochs=6",
        "--train.eval_every_epochs=6",
    ]
    assert main.main(flags) == 0
    return output_dir / "digits_student" / "taught"


@pytest.fixture(scope="session")
def digits_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the model of configs/digits_teacher.yaml, untrained: for checks of a config."""
    import torch

    from models.factory import create_model, export_model
    from utils.config.load import load_config

    section = load_config(["--config", str(ROOT / "configs/digits_teacher.yaml")]).model
    torch.manual_seed(0)
    tensors = create_model(section, num_classes=10).state_dict()
    folder = tmp_path_factory.mktemp("digits_teacher")
    args = {**section.args, "img_size": section.image_size}
    export_model(tensors, {"model": section.name, "args": args, "num_classes": 10}, folder)
    return folder


@pytest.fixture(scope="session")
def text_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small texts under the names that configurations know, and untrained teachers of text.

    That of configs/transformer_teacher.yaml lies beside them, and in `full` the model of
    configs/delta_text.yaml with full attention in every layer.
    """
    from models.factory import create_model, export_model
    from tests.support.language import write_tokens
    from utils.config.load import load_config

    root = tmp_path_factory.mktemp("text")
    write_tokens(root, "stdlib_byte", "stdlib_small", "manual")
    of_task = {"vocab_size": 257, "sequence_length": 128}
    full = [f"--model.args={json.dumps({'full_every': 1})}"]
    teachers = {"transformer_teacher": (root, []), "delta_text": (root / "full", full)}
    for name, (folder, flags) in teachers.items():
        path = str(ROOT / f"configs/{name}.yaml")
        section = load_config(["--config", path, *flags]).model
        facts = {"model": section.name, "args": dict(section.args), "tokenizer": "byte", **of_task}
        folder.mkdir(exist_ok=True)
        export_model(create_model(section, **of_task).state_dict(), facts, folder)
    return root


@pytest.fixture(scope="session")
def rows_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the model of configs/regression/friedman1_teacher.yaml, untrained."""
    from models.factory import create_model, export_model
    from utils.config.load import load_config

    path = ROOT / "configs/regression/friedman1_teacher.yaml"
    section = load_config(["--config", str(path)]).model
    sizes = {"in_features": 10, "out_features": 1}
    facts = {"model": section.name, "args": dict(section.args), **sizes}
    folder = tmp_path_factory.mktemp("rows_teacher")
    export_model(create_model(section, **sizes).state_dict(), facts, folder)
    return folder
