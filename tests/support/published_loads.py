"""Loads of the steps whose speed others have published, counted as the plan counts them."""

from __future__ import annotations

from functools import cache

from store.quality.bill import RunWork
from store.quality.slices import Load
from tasks import TASKS
from tasks.work import measure_step
from utils.config.load import RunConfig

MODELS = {
    "big_vision ViT-S/16": "vit_small_patch16_224",
    "flax ResNet-50": "resnet50",
    "big_vision Mixer-B/16": "mixer_b16_224",
    "big_vision BiT-R50x1": "resnetv2_50x1_bit",
    "torch_xla ResNet-50": "resnet50",
}


@cache
def create_published_load(name: str, optimizer: str = "sgd") -> Load:
    """Count a step on images of 224 pixels and 1,000 classes in bfloat16."""
    images = "image_size=224,channels=3,num_classes=1000,num_examples=256"
    config = RunConfig.model_validate(
        {
            "model": {"name": MODELS[name]},
            "data": {
                "source": "synthetic",
                "name": images,
                "train_pp": "value_range(-1, 1)",
                "eval_pp": "value_range(-1, 1)",
                "global_batch_size": 128,
            },
            "optim": {"name": optimizer},
            "train": {"steps": 1},
            "runtime": {"precision": "bf16"},
        }
    )
    from models.factory import create_model

    check = TASKS.get(config.train.task).check(config)
    check.dry_run(create_model(config.model, **check.model_arguments, device="meta"))
    step = measure_step(config, check.find_facts())
    return Load(
        values=config.model_dump(mode="json"),
        work=RunWork(1, 128),
        epochs=1.0,
        parts=None,
        train_flops=step.train_flops,
        state_bytes=step.state_bytes,
        checkpoint_bytes=step.checkpoint_bytes,
        example_bytes=step.example_bytes,
    )
