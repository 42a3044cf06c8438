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
    "aug_repeats": "data.repeats",
    "batch": "data.global_batch_size",
    "bce_loss": "train.task_loss=bce",
    "bce_pos_weight": "train.bce_positive_weight",
    "bce_sum": "train.bce_sum",
    "bce_target_thresh": "train.bce_threshold",
    "channels_last": "runtime.channels_last",
    "checkpoint_hist": "train.keep_checkpoints",
    "class_weight": "train.class_weights",
    "clip_mode": "optim.max_grad_ratio",
    "cooldown_epochs": "optim.cooldown_fraction",
    "cutmix_minmax": "train.cutmix_alpha",
    "grad_accum_steps": "train.accumulate_steps",
    "grad_checkpointing": "train.remat",
    "head_init_bias": "model.head_init_bias",
    "head_init_scale": "model.head_init_scale",
    "initial_checkpoint": "model.weights",
    "kd_model_name": "distill.teacher",
    "log_interval": "train.log_every_steps",
    "lr_base": "optim.base_lr",
    "lr_base_scale": "optim.lr_scaling",
    "lr_base_size": "optim.base_batch_size",
    "mixup_mode": "train.mix_mode",
    "mixup_off_epoch": "train.mix_off_epoch",
    "momentum": "optim.momentum",
    "opt_betas": "optim.betas",
    "opt_eps": "optim.eps",
    "opt_kwargs": "optim.args",
    "output": "run.output_dir",
    "patience_epochs": "optim.plateau_patience=N+1 (timm's N cuts one evaluation later)",
    "repeated_aug": "data.repeats",
    "remode": "data.erasing_mode",
    "reprob": "data.random_erasing",
    "sched": "optim.schedule",
    "torchcompile": "runtime.compile",
    "train_split": "data.train_split",
    "val_split": "data.eval_split",
    "validation_batch_size": "data.eval_batch_size",
    "workers": "data.threads",
}
