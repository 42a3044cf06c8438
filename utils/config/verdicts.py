"""What the TPU compiler has found for a run, as a configuration keeps it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from utils.config.metadata import ConfigSection
from utils.generations import LAUNCHED

# A chip and the examples that a step gives it, such as `v5e:128`.
StepName = Annotated[str, Field(pattern=rf"^({'|'.join(one.name for one in LAUNCHED)}):[1-9]\d*$")]


def _require_parts(value: object) -> object:
    """One sentence for both forms."""
    is_number = isinstance(value, int | str) and str(value).isdecimal()
    if value != "auto" and not (is_number and int(value) >= 1):
        raise PydanticCustomError("parts", "it must be a whole number of at least 1, or auto")
    return value


Parts = Annotated[int | Literal["auto"], BeforeValidator(_require_parts)]


class MicroBatchVerdict(ConfigSection):
    """The cheapest split of one step on one chip, by `tools.compile_for_tpu --micro-batches`."""

    parts: int = Field(ge=1, description="micro-batches of the least cost")
    step: str = Field(description="hash of what of the configuration decides the step's program")
    graph: str = Field(description="hash of the program that was compiled")
