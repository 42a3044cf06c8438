"""Declares keys: type, default and meaning, and all rules about them that need no other code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from utils.config.devices import get_devices
from utils.errors import UserError

# What a changed value does to a run that continues from a checkpoint. free: nothing; warns: it is
# reported, because bits may differ; between_epochs: allowed at the end of an epoch, refused within
# an epoch whose examples it would change; refused: it would be another run.
Resume = Literal["free", "warns", "between_epochs", "refused"]


class ConfigSection(BaseModel):
    """A frozen group of keys; unknown keys and infinite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    # `resume` and `affects_results` of the section's keys that do not set them.
    on_resume: ClassVar[Resume] = "refused"
    affects_results: ClassVar[bool] = True


@dataclass(frozen=True)
class Devices:
    """The devices that support a key, or one value of it."""

    mode: str  # of `get_devices`
    why: str  # the reason and the way out, the end of the error elsewhere
    value: str | None = None  # the value that needs them; None: any but the default

    @property
    def names(self) -> tuple[str, ...]:
        """As in `runtime.device`; an imported module may have added some."""
        return get_devices(self.mode)


# Tasks that share keys.
IMAGE_TASKS = ("classify", "distil", "multilabel")
CLASS_TASKS = ("classify", "multilabel")
TAUGHT_TASKS = ("classify", "distil", "language", "regress")


def _check_class_weights(value: object) -> object:
    """Refuse what is no weights: one rule for all forms, where a union would show one for each."""
    numbers: list[object] = [None]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        numbers = list(value.values())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        numbers = list(value)
    if value == "auto" or all(map(_is_weight, numbers)):
        return value
    raise PydanticCustomError(
        "class_weights",
        "write auto, a list with a number for each class, or {{class name: number}}; a number must "
        "be finite and at least 0",
    )


def _is_weight(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0


# A weight for each class: by their labels' counts, by names, or by their numbers; empty: all equal.
ClassWeights = Annotated[
    Literal["auto"] | dict[str, float] | tuple[float, ...], BeforeValidator(_check_class_weights)
]


@dataclass(frozen=True)
class KeyInfo:
    """Rules of a key beyond type and range; a field carries them as `json_schema_extra`."""

    resume: Resume | None = None  # None: `ConfigSection.on_resume` of its section
    # Entry of the stream's description (`job.spec.describe_stream`) that holds the key, because it
    # decides which examples come when and how they look; empty if it decides neither. Keys that
    # share an entry make a list.
    stream: str = ""
    devices: Devices | None = None  # None: all of them
    tasks: tuple[str, ...] = ()  # names of `train.task` that read the key; empty: all of them
    aliases: tuple[str, ...] = ()  # short flags, known from similar trainers
    known: tuple[str, ...] = ()  # its names; run.imports may add others
    # If the key is not at its default, one of these must hold: `section.key` (it is not at its
    # default) or `section.key=value`.
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()  # keys that cannot be set together with this one
    # It names a file or a directory, or its URL: a service for submitted runs limits the roots that
    # it may lie below.
    is_path: bool = False
    # False for keys (paths, logging, limits of time) that cannot change what is learnt or measured:
    # runs that differ in such keys alone have the same configuration.
    affects_results: bool | None = None


def key(default: Any, description: str, **rules: Any) -> Any:
    """Declare a key of a `ConfigSection`; its `default` is `...` if the key must be set.

    `description` has meaning, unit and special values, for help and documents; `rules` are
    attributes of `KeyInfo`, and constraints of pydantic's `Field`.
    """
    names = {field.name for field in fields(KeyInfo)}
    info = asdict(KeyInfo(**{name: rules.pop(name) for name in names & rules.keys()}))
    extra: Any = {name: value for name, value in info.items() if value != getattr(KeyInfo, name)}
    return Field(default, description=description, json_schema_extra=extra, **rules)


def read_key_info(field: FieldInfo) -> KeyInfo:
    """Return the `KeyInfo` in the `json_schema_extra` of a field."""
    extra = field.json_schema_extra
    values: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    devices = values.pop("devices", None)
    return KeyInfo(**values, devices=Devices(**devices) if devices else None)


def check_devices(device: str, **sections: ConfigSection) -> None:
    """Raise a UserError for the first key that a device (not auto) does not support."""
    for prefix, section in sections.items():
        for name, field in type(section).model_fields.items():
            devices, value = read_key_info(field).devices, getattr(section, name)
            if devices is None or device in devices.names:
                continue
            if value == devices.value if devices.value else value != field.default:
                raise UserError(
                    f"{prefix}.{name} ({value!r}) works on {' and '.join(devices.names)}, not on "
                    f"{device!r}: {devices.why}",
                    code="config.unsupported",
                )
