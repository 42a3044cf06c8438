"""Runs libtpu's compiler in a child process, with a time limit and a store of results."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from bill.bundles.chip import get_chip_model
from bill.bundles.counting import count_listings
from bill.children.processes import find_venv, read_versions, run_child
from bill.compiled import Compiled, CompilerFacts, read_stored, write_stored
from bill.targets import OWN
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import get_user_cache

if TYPE_CHECKING:
    from bill.step.tracing import StepExport
    from bill.targets import Target

AnswerT = TypeVar("AnswerT", bound=BaseModel)

CHILD = Path(__file__).parent / "children" / "compile_child.py"
# Of the newest release, whose interface is another.
NEWEST_CHILD = CHILD.with_name("newest_child.py")
SETUP_COMMAND = "bash run_commands.sh setup --tpu-compiler"
_NEWEST_SUFFIX = "-compiler"  # of its environment of packages
_PACKAGES = ("jax", "jaxlib", "libtpu")
_OUT_OF_MEMORY = (
    re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", re.IGNORECASE),
    # libtpu 0.0.52, which gives sums of temporaries alone
    re.compile(r"required for [\w ]+ \(([\d.]+)([KMGT])\) exceeds available HBM \([\d.]+[KMGT]\)"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TAIL = 6


def require_compiler(release: str = OWN) -> dict[str, str]:
    """Versions of the compiler's packages.

    Raises:
      UserError: they are not installed.
    """
    versions = read_versions(_find_venv(release))
    missing = [name for name in _PACKAGES if name not in versions]
    if missing:
        flag = "" if release == OWN else " --newest"
        raise UserError(
            f"the TPU compiler is not installed here ({', '.join(missing)} missing); run "
            f"{SETUP_COMMAND}{flag}"
        )
    return {name: versions[name] for name in _PACKAGES}


def _find_venv(release: str) -> Path:
    """Return the environment of a release's packages: .venv, which is torch_xla's, or its own."""
    return find_venv("" if release == OWN else _NEWEST_SUFFIX)


def get_default_store() -> Path:
    """Return the directory of results, which depend on the program alone."""
    return get_user_cache("tpu_compiler", former="tpu_compiler")


def compile_step(
    export: StepExport,
    target: Target,
    *,
    devices: int,
    store: Path,
    time_limit_s: float,
    with_bundles: bool = False,
) -> Compiled:
    """Compile a step, or find that it was compiled before.

    Args:
      devices: that the program is partitioned over.
      with_bundles: count those of its operations, too.

    Raises:
      UserError: the compiler refused, aborted or took too long.
    """
    versions = require_compiler(target.compiler)
    key = _compute_key(export, target, devices, versions)
    stored = read_stored(store / key, with_bundles=with_bundles)
    if stored is not None:
        return replace(stored, key=key)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request: JsonObject = {
            "donations": export.donations,
            "topology": target.topology,
            "devices": devices,
        }
        if with_bundles:
            request["bundles"] = str(_create_folder(folder / "bundles"))
        compiled = _run_request(request, export.bytecode, target, folder, time_limit_s=time_limit_s)
        if with_bundles and compiled.hlo:
            model = get_chip_model(target.generation)
            costs = count_listings(folder / "bundles", model)
            if not costs:
                raise UserError(
                    f"--bundles is not supported by libtpu {versions['libtpu']}, which has written "
                    "no bundles; leave it out"
                )
            compiled = replace(compiled, costs=costs)
    compiled = replace(compiled, key=key)
    write_stored(store / key, compiled)
    return compiled


def _compute_key(export: StepExport, target: Target, devices: int, versions: dict[str, str]) -> str:
    parts = [
        export.digest,
        sorted(export.donations.items()),
        target.topology,
        devices,
        sorted(versions.items()),
    ]
    digest = hashlib.sha256(_find_child(target).read_bytes())
    digest.update(json.dumps(parts).encode())
    return digest.hexdigest()[:20]


def _find_child(target: Target) -> Path:
    return CHILD if target.compiler == OWN else NEWEST_CHILD


def run_script(
    script: Path,
    request: JsonObject,
    target: Target,
    time_limit_s: float,
    answer: type[AnswerT],
) -> AnswerT:
    """Run another child with a request, and read the answer that it writes as `facts.json`.

    Raises:
      UserError: it refused, aborted, took too long, or a program does not fit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, log = _start(script, request, folder, target, time_limit_s=time_limit_s)
        if code:
            refused = _explain_failure(code, log, target)
            raise UserError(f"it does not fit {target.name}: {refused.facts.message}")
        return answer.model_validate_json((folder / "facts.json").read_bytes())


def compile_artifact(
    artifact: bytes, target: Target, folder: Path, *, time_limit_s: float
) -> Compiled:
    """Compile any StableHLO artifact for one device; its bundles come to lie in `folder/bundles`.

    Raises:
      UserError: the compiler refused, aborted or took too long.
    """
    request: JsonObject = {
        "donations": {},
        "topology": target.topology,
        "devices": 1,
        "bundles": str(_create_folder(folder / "bundles")),
    }
    compiled = _run_request(request, artifact, target, folder, time_limit_s=time_limit_s)
    if compiled.needed_bytes is not None:
        raise UserError(f"it does not fit {target.name}: {compiled.facts.message}")
    return compiled


def _run_request(
    request: JsonObject,
    artifact: bytes,
    target: Target,
    folder: Path,
    *,
    time_limit_s: float,
) -> Compiled:
    """Compile an artifact in a child process, and return its result."""
    path = folder / "step.bin"
    path.write_bytes(artifact)
    request = {**request, "artifact": str(path)}
    code, log = _start(_find_child(target), request, folder, target, time_limit_s=time_limit_s)
    if code:
        return _explain_failure(code, log, target)
    facts = CompilerFacts.model_validate_json((folder / "facts.json").read_bytes())
    return Compiled((folder / "program.hlo").read_text(encoding="utf-8"), facts)


def _start(
    script: Path,
    request: JsonObject,
    folder: Path,
    target: Target,
    *,
    time_limit_s: float,
) -> tuple[int, str]:
    """Exit code and output of a child, which is ended when the time is over."""
    path, log = folder / "request.json", folder / "log.txt"
    path.write_text(json.dumps(request), encoding="utf-8")
    with log.open("w") as output:
        venv = _find_venv(target.compiler)
        code = run_child(script, path, time_limit_s=time_limit_s, output=output, venv=venv)
    return code, log.read_text(encoding="utf-8", errors="replace")


def _explain_failure(code: int, log: str, target: Target) -> Compiled:
    """Return the result of a program that needs too much memory; raise any other failure.

    Raises:
      UserError: what the compiler said last.
    """
    memory = next(filter(None, (pattern.search(log) for pattern in _OUT_OF_MEMORY)), None)
    if memory:
        needed = int(float(memory[1]) * _UNITS[memory[2].upper()])
        return Compiled("", CompilerFacts(message=memory[0]), needed_bytes=needed)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"Check fail|F\d{4} |Error|error:", line)]
    text = " / ".join((telling or lines)[-_TAIL:])[:600]
    how = f"was aborted by signal {-code}" if code < 0 else f"ended with code {code}"
    raise UserError(f"the TPU compiler {how} for --target {target.name}: {text or 'no message'}")


def _create_folder(path: Path) -> Path:
    path.mkdir()
    return path
