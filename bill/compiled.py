"""What the compiler says of a program, and the store that remembers it by the program's hash."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bill.bundles.counting import BundleCost, ListingCosts
from utils.json_types import JsonObject

_BUNDLES = Path(__file__).with_name("bundles")


class CompilerFacts(BaseModel):
    """Facts of one compilation as `children/compile_child.py` writes them, in its order.

    Files of other versions may lack some of them; what is not known here is kept. Of a program
    that does not fit there is `message` alone.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    topology_devices: int = 0
    device_kind: str = ""
    memory: dict[str, int] = {}
    cost: dict[str, float] = {}
    versions: dict[str, str] = {}
    compile_s: float = 0.0
    message: str = ""

    @property
    def flops(self) -> float:
        """FLOPs of one device as the compiler counts them."""
        return self.cost.get("flops", 0.0)

    def get_bytes(self, kind: str) -> int:
        """Return HBM bytes of `argument`, `output`, `temp` or `alias`."""
        return self.memory[f"{kind}_size_in_bytes"]


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a program.

    Args:
      hlo: the scheduled module; empty where the program does not fit.
      needed_bytes: HBM that a program needs which does not fit.
      costs: of the bundles of each operation that has a listing; None if not requested.
    """

    hlo: str
    facts: CompilerFacts = field(default_factory=CompilerFacts)
    needed_bytes: int | None = None
    costs: ListingCosts | None = None
    key: str = ""
    cached: bool = False


def read_stored(folder: Path, *, with_bundles: bool) -> Compiled | None:
    """Read a result of the store, or None if it is missing, or lacks the bundles asked for."""
    try:
        record = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        needed = record.pop("needed_bytes")
        facts = CompilerFacts.model_validate(record)
        with gzip.open(folder / "program.hlo.gz", "rt", encoding="utf-8") as file:
            hlo = file.read()
    except (OSError, ValueError, EOFError):
        return None
    costs = _read_costs(folder / "bundles.json")
    if with_bundles and costs is None and needed is None:
        return None
    return Compiled(hlo, facts, needed_bytes=needed, costs=costs, cached=True)


def write_stored(folder: Path, compiled: Compiled) -> None:
    """Keep a result; what tells that it is whole is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / "program.hlo.gz", "wt", encoding="utf-8") as file:
        file.write(compiled.hlo)
    if compiled.costs is not None:
        costs = {name: cost and asdict(cost) for name, cost in compiled.costs.items()}
        _replace(folder / "bundles.json", {"reader": compute_reader_digest(), "costs": costs})
    facts = compiled.facts.model_dump(exclude_unset=True)
    _replace(folder / "facts.json", {**facts, "needed_bytes": compiled.needed_bytes})


def compute_reader_digest() -> str:
    """Hash of what counts bundles: costs by another reader are not used again."""
    digest = hashlib.sha256()
    for path in sorted(_BUNDLES.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _read_costs(path: Path) -> ListingCosts | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if record["reader"] != compute_reader_digest():
        return None
    return {name: cost and BundleCost(**cost) for name, cost in record["costs"].items()}


def _replace(path: Path, content: JsonObject) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
