"""Short flags that people of this family of trainers know, and the keys they stand for."""

from __future__ import annotations

from utils.config.keys import get_keys

# Key -> its other flags, as its field tells them.
ALIASES: dict[str, list[str]] = {
    name: list(key.aliases) for name, key in get_keys().items() if key.aliases
}
# Flags of timm's trainer whose values are others here -> what to write in their place.
OF_TIMM: dict[str, str] = {
    "amp": "runtime.precision=bf16",
    "batch": "data.global_batch_size",
    "channels_last": "runtime.channels_last",
    "checkpoint_hist": "train.keep_checkpoints",
    "cooldown_epochs": "optim.cooldown_fraction",
    "cutmix_minmax": "train.cutmix_alpha",
    "grad_accum_steps": "train.accumulate_steps",
    "grad_checkpointing": "train.remat",
    "initial_checkpoint": "model.weights",
    "kd_model_name": "distill.teacher",
    "log_interval": "train.log_every_steps",
    "momentum": "optim.momentum",
    "opt_betas": "optim.betas",
    "opt_eps": "optim.eps",
    "opt_kwargs": "optim.args",
    "output": "run.output_dir",
    "reprob": "data.random_erasing",
    "sched": "optim.schedule",
    "torchcompile": "runtime.compile",
    "train_split": "data.train_split",
    "val_split": "data.eval_split",
    "validation_batch_size": "data.eval_batch_size",
    "workers": "data.threads",
}
