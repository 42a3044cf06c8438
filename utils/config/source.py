"""`SourceSection`: where a recipe is published, and what of it a configuration changes."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from utils.config.metadata import ConfigSection, Resume, about


class SourceSection(ConfigSection):
    """Publication that the recipe follows, as data for tests and documents; a run ignores it."""

    on_resume: ClassVar[Resume] = "free"

    paper: str = Field("", description="arXiv identifier or title", **about(is_neutral=True))
    code: str = Field(
        "",
        description="public repository and file, as owner/name: train.py",
        **about(is_neutral=True),
    )
    commit: str = Field(
        "", description="commit of that repository that was read", **about(is_neutral=True)
    )
    published: str = Field(
        "",
        description="published figure and its conditions; empty: none",
        **about(is_neutral=True),
    )
    values: dict[str, Any] = Field(
        default_factory=dict,
        description="what the source states, by dotted key or by a property of the built run "
        "(docs/recipes.md)",
        **about(is_neutral=True),
    )
    differs: dict[str, str] = Field(
        default_factory=dict,
        description="name in values -> why this configuration does otherwise",
        **about(is_neutral=True),
    )

    @model_validator(mode="after")
    def _check_differs(self) -> SourceSection:
        unknown = sorted(self.differs.keys() - self.values.keys())
        if unknown:
            raise PydanticCustomError(
                "differs",
                "it names {name}, which source.values does not state; add the source's value there",
                {"name": unknown[0]},
            )
        return self
