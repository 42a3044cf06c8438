"""Lets a key say more than type, default and meaning: `Field(..., **about(...))`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from utils.errors import UserError

# What a changed value means to a run that goes on from a checkpoint. free: nothing; warns: it is
# reported, because bits may differ; between_epochs: free at an epoch's border, refused within an
# epoch that it would show other examples of; refused: it would be another run.
Resume = Literal["free", "warns", "between_epochs", "refused"]


class ConfigSection(BaseModel):
    """A frozen group of keys; unknown keys and infinite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    # What holds for each key of the section that does not say its own.
    on_resume: ClassVar[Resume] = "refused"


@dataclass(frozen=True)
class Devices:
    """The devices that a key, or one value of it, works on.

    Attributes:
      names: as in `runtime.device`.
      why: the reason and the way out, the end of the sentence that refuses the key elsewhere.
      value: the value that needs them; none: any but the default.
    """

    names: tuple[str, ...]
    why: str
    value: str | None = None


# Tasks that share keys.
IMAGE_TASKS = ("classify", "distil", "multilabel")
CLASS_TASKS = ("classify", "multilabel")
TAUGHT_TASKS = ("classify", "distil", "language", "regress")


@dataclass(frozen=True)
class About:
    """What a field carries as `json_schema_extra`.

    Attributes:
      resume: none: as its section says, `ConfigSection.on_resume`.
      stream: the entry of the stream's description (`job.spec.describe_stream`) that
        the key stands in, because it decides which examples come when and how they look; empty: it
        decides nothing of them. Keys that share an entry make a list.
      devices: none: all of them.
      tasks: of `train.task` that read the key; empty: all of them.
      aliases: short flags that people of this family of trainers know.
      is_place: it names a file or a directory, or a URL of one: who lets others submit runs says
        below which roots it may lie.
      is_neutral: it says where, when or how loudly, so that no other value of it can change what is
        learnt or measured: runs that differ in such keys alone are one configuration.
    """

    resume: Resume | None = None
    stream: str = ""
    devices: Devices | None = None
    tasks: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_place: bool = False
    is_neutral: bool = False


def about(
    *,
    resume: Resume | None = None,
    stream: str = "",
    devices: Devices | None = None,
    **more: Any,
) -> dict[str, JsonDict]:
    """The argument of pydantic's `Field` that holds an `About`, without what it leaves out."""
    said = asdict(About(resume, stream, devices, **more))
    return {"json_schema_extra": {name: value for name, value in said.items() if value}}


def read_about(extra: JsonDict) -> About:
    """The `About` of a field's `json_schema_extra`."""
    values = dict(extra)
    devices = values.pop("devices", None)
    return About(**values, devices=Devices(**devices) if devices else None)


def check_devices(device: str, **sections: ConfigSection) -> None:
    """Refuse keys that a device cannot honour, instead of ignoring them.

    Args:
      device: a name of `runtime.device`, not auto.
      sections: of the configuration, by name.

    Raises:
      UserError: the first such key.
    """
    for prefix, section in sections.items():
        for name, field in type(section).model_fields.items():
            devices = read_about(field.json_schema_extra or {}).devices
            value = getattr(section, name)
            if devices is None or device in devices.names or not _needs(devices, field, value):
                continue
            raise UserError(
                f"{prefix}.{name} ({value!r}) works on {' and '.join(devices.names)}, not on "
                f"{device!r}: {devices.why}"
            )


def _needs(devices: Devices, field: FieldInfo, value: object) -> bool:
    return value != field.default if devices.value is None else value == devices.value
