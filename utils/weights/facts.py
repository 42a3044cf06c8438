"""Facts written with weights, checked where they are read: their model, classes and input."""

from __future__ import annotations

from typing import Any, TypeGuard

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from utils.json_types import JsonValue


@with_config(ConfigDict(extra="allow", strict=True))
class WeightFacts(TypedDict, total=False):
    """JSON of a file of weights as it stands there, further keys included; may be empty."""

    model: str
    args: dict[str, Any]  # of the model
    imports: list[str]  # run.imports of its run
    num_classes: int | None
    classes: list[Any] | None  # their names, in the order of the logits
    scores: str  # "each": a probability of each class by itself
    eval_pp: str | None
    input: dict[str, Any]  # timm's size, crop and resampling
    mean: list[float] | None  # of pixels of 0..255
    std: list[float] | None
    vocab_size: int
    sequence_length: int
    tokenizer: str | None
    input_columns: list[str] | None
    target_columns: list[str] | None
    split_seed: int | None
    variance: bool


_FACTS = TypeAdapter(WeightFacts)


def are_facts(value: JsonValue) -> TypeGuard[WeightFacts]:
    """Return whether a value names a model; ValueError with the fact that has a wrong type."""
    if not isinstance(value, dict) or not isinstance(value.get("model"), str):
        return False
    try:
        _FACTS.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"its fact {name} is wrong: {first['msg']}") from error
    return True
