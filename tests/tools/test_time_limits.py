"""Every program with a time limit refuses an invalid one before it starts."""

from __future__ import annotations

from types import ModuleType

import pytest

from bill import compile_for_tpu, shape_advisor
from lab import matmul
from lab.delta import __main__ as delta
from proofs import jax_decoder, jax_vision

RUN = ["--config=configs/smoke.yaml", "--batch=8"]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan"])
@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (compile_for_tpu, RUN),
        (jax_decoder, RUN),
        (jax_vision, RUN),
        (shape_advisor, []),
        (matmul, ["--on=v5e"]),
        (delta, ["--on=v5e"]),
    ],
    ids=lambda one: one.__name__ if isinstance(one, ModuleType) else "",
)
def test_an_invalid_time_limit_is_refused(program, flags, seconds, capsys, monkeypatch):
    for name in ("require_compiler", "run_script", "compile_artifact", "compile_step"):
        monkeypatch.setattr(f"bill.compiler.{name}", lambda *_, **__: pytest.fail("began"))
    assert program.main([*flags, f"--time-limit={seconds}"]) == 2
    text = capsys.readouterr().err
    assert f"--time-limit ({seconds})" in text and text.count("\n") == 1
