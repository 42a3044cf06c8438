"""Packages hidden while TensorFlow is imported, and visible to all other threads."""

import importlib.util
import sys
import threading

import pytest

from big_vision.tensorflow_setup import _hide_packages


def test_a_package_is_hidden_only_from_the_importing_thread(tmp_path, monkeypatch):
    for name in ("hidden_one", "hidden_two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    imported = []
    with _hide_packages(("hidden_one", "hidden_two", "not_there_at_all")):
        with pytest.raises(ModuleNotFoundError, match="hidden_one is hidden"):
            importlib.import_module("hidden_one")
        # TensorFlow asks where Keras lies without importing it.
        found = importlib.util.find_spec("hidden_one")
        assert found.submodule_search_locations == [str(tmp_path / "hidden_one")]
        assert importlib.util.find_spec("not_there_at_all") is None
        other = threading.Thread(
            target=lambda: imported.append(importlib.import_module("hidden_two"))
        )
        other.start()
        other.join()
    assert imported[0].VALUE == 1
    assert importlib.import_module("hidden_one").VALUE == 1
    assert not any(type(finder).__name__ == "_Hiding" for finder in sys.meta_path)
