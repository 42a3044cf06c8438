"""Names of a sweep's runs: the values that vary, instead of a hash."""

from __future__ import annotations

from collections.abc import Mapping

from service.sweeps.plan import list_sweeps, read_sweep
from store.compare.sides import SEED
from store.formatting import format_value
from utils.errors import UserError
from utils.json_types import JsonValue


class TrialNames:
    """The sweeps of a store, whose values name their runs."""

    def __init__(self, store: str) -> None:
        self._keys: dict[str, tuple[str, ...]] = {}
        for name in list_sweeps(store):
            try:
                spec = read_sweep(store, name)
            except UserError:
                continue  # a damaged sweep must not hide a run
            self._keys[name] = (*spec.axes, *((SEED,) if spec.seeds else ()))

    def list_keys(self) -> list[str]:
        """List the configuration keys that some sweep varies."""
        return list(dict.fromkeys(key for keys in self._keys.values() for key in keys))

    def describe(self, path: str, config: Mapping[str, JsonValue]) -> str:
        """Format a trial as `sweep lr=0.002 depth=1`; empty if the run is of no sweep.

        Args:
          path: `experiment/name`; a trial's name is the sweep's with a hash.
          config: dotted key -> value, of the keys that sweeps vary.
        """
        sweep, dash, _ = path.rpartition("/")[2].rpartition("-")
        keys = self._keys.get(sweep) if dash else None
        values = {key: config[key] for key in keys or () if key in config}
        if not values:
            return ""
        names = [key.rpartition(".")[2] for key in values]
        shown = {
            name if names.count(name) == 1 else key: value
            for name, (key, value) in zip(names, values.items(), strict=True)
        }
        # Without commas, which would look like several values.
        texts = {k: str(v) if isinstance(v, int) else format_value(v) for k, v in shown.items()}
        return " ".join([sweep, *(f"{name}={text}" for name, text in texts.items())])
