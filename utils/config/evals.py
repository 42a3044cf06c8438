"""`EvalSection`: a set of images that a model is judged on beside the run's own splits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from utils.config.metadata import ConfigSection, about


class EvalSection(ConfigSection):
    """One set; what it leaves out is as in `data`, or as the known set of that name has it."""

    name: str = Field(
        pattern=r"^[\w.-]+$",
        description="what metrics call it; imagenet_v2, imagenet_real, imagenet_a, imagenet_r, "
        "imagenet_sketch and imagenet_c are known and need no more",
    )
    dataset: str = Field("", description="as data.name")
    source: str = Field("", description="as data.source")
    root: str = Field("", description="as data.root", **about(is_place=True))
    split: str = Field("", description="as data.eval_split")
    bank: str = Field(
        "",
        description="train.task=distil: the split whose labelled examples probes learn from; none: "
        "as data.train_split",
    )
    pp: str = Field("", description="as data.eval_pp; a size of its own costs graphs of its own")
    label_key: str = Field(
        "", description="as data.label_key; a list of labels means that each of them is right"
    )
    classes: Literal["auto", "named", "present", "all"] = Field(
        "auto",
        description="classes that an answer is chosen from: those that the set names, those that "
        "occur in it, or all of the model's; auto: as the known set is judged, else named",
    )
    class_map: str = Field(
        "",
        description="JSON list: for each class of the set, the model's class, or -1 to leave its "
        "examples out; none: by the classes' names",
        **about(is_place=True),
    )
    every: int = Field(
        1, ge=1, description="judged at each such evaluation of the run, and at the last one"
    )
