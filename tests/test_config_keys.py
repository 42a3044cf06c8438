"""The keys of the configuration: pinned, described, and named with their unit."""

from __future__ import annotations

from utils.config import RunConfig
from utils.config.sections import LossTerm, TeacherSection, iterate_keys

PREFIXES = {
    LossTerm: "distill.losses[]",
    TeacherSection: "distill.teachers[]",
}
# The pinned list: an addition shows in review, and belongs into the help of main.py.
KEYS = """
model.name model.num_classes model.image_size model.pretrained model.weights model.drop_rate
model.drop_path_rate model.args model.xla_patches model.skip_patches
data.source data.name data.root data.train_split data.eval_split data.test_split data.train_pp
data.eval_pp data.image_key data.label_key data.global_batch_size data.eval_batch_size data.order
data.shuffle_gib data.threads data.prefetch_batches data.return_id data.skip_corrupt
data.random_erasing
optim.name optim.lr optim.min_lr optim.warmup_lr optim.warmup_epochs optim.warmup_steps
optim.schedule optim.decay_rate optim.decay_epochs optim.power optim.cooldown_fraction
optim.weight_decay optim.weight_decay_end optim.momentum optim.betas optim.eps optim.layer_decay
optim.max_grad_norm optim.args
train.epochs train.steps train.accumulate_steps train.seed train.log_every_steps
train.eval_every_epochs train.checkpoint_every_epochs train.checkpoint_every_steps
train.keep_checkpoints train.keep_every_steps train.on_nonfinite train.max_rollbacks
train.stall_timeout_s train.deterministic
train.label_smoothing train.mixup_alpha train.cutmix_alpha train.mix_prob
train.cutmix_prob train.remat train.scan_layers train.sync_batchnorm train.ema train.ema_decay
distill.teacher distill.teacher_weights distill.teachers distill.ensemble distill.views
distill.teacher_cache distill.cache_end distill.loss distill.temperature distill.alpha
distill.losses distill.group_size distill.allow_weak_teacher
runtime.device runtime.parallel runtime.num_processes runtime.mesh_data runtime.mesh_fsdp
runtime.timeout_s runtime.precision runtime.reduce_dtype runtime.overlap runtime.compile
runtime.channels_last runtime.tf32 runtime.compile_cache runtime.compile_cache_gib
runtime.graph_budget runtime.num_threads profile.steps
run.output_dir run.cache_dir run.experiment run.run_id run.resume run.allow_changes run.init_from
run.init_tolerance run.checkpoint_root run.eval_only run.check_only run.overwrite run.tensorboard
"""


def get_wanted() -> set[str]:
    """All keys, and those of the elements of lists."""
    nested = {
        f"{PREFIXES[section]}.{name}"
        for section in (LossTerm, TeacherSection)
        for name in section.model_fields
    }
    return set(iterate_keys()) | nested


def test_the_keys_are_those_that_are_pinned():
    assert list(iterate_keys()) == KEYS.split()


def test_every_key_has_a_description_and_says_its_unit():
    """Times, sizes and intervals carry their unit in the name."""
    for key in iterate_keys():
        section, name = key.split(".")
        field = RunConfig.model_fields[section].annotation.model_fields[name]
        assert field.description, key
        assert not name.endswith(("_freq", "_interval", "_period")), key
