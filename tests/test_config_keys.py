"""Every key of the configuration is read by something: none may be set in vain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import main
from optim_factory import create_schedule
from preflight import check
from tests.tiny_parts import VIT_ARGS, create_argv, create_cpu_runtime
from tools import cache_teacher
from utils.config import RunConfig, load_config
from utils.config.sections import LossTerm, RuntimeSection, Section, TeacherSection, iterate_keys
from utils.runtime.compile_cache import prepare_cache
from utils.runtime.group import Group
from utils.runtime.xla_spmd import get_mesh_shape

PREFIXES = {
    **{field.annotation: name for name, field in RunConfig.model_fields.items()},
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


@pytest.fixture(scope="module")
def read_keys(tmp_path_factory, digits_root, teacher_run) -> set[str]:
    """The keys that checks, building and two steps read, over runs of several kinds."""
    found: set[str] = set()
    original = Section.__getattribute__

    def record(self: Section, name: str) -> object:
        prefix = PREFIXES.get(type(self))
        if prefix is not None and name in type(self).model_fields:
            found.add(f"{prefix}.{name}")
        return original(self, name)

    cache = tmp_path_factory.mktemp("cache") / "answers"
    earlier = tmp_path_factory.mktemp("earlier")
    assert main.main(create_argv(earlier, "--train.steps=1", "--run.run_id=a")) == 0
    write_cache(cache, teacher_run)
    for number, (flags, is_run) in enumerate(
        [*list_runs(digits_root, teacher_run, cache), *list_continuations(earlier)]
    ):
        output_dir = tmp_path_factory.mktemp(f"keys{number}")
        config = load_config(create_argv(output_dir, *flags))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Section, "__getattribute__", record)
            if is_run:
                assert main.start(config) == 0
            else:
                check(config)
                schedule = create_schedule(config.optim, total_steps=12, steps_per_epoch=6)
                assert all(schedule.lr_at(step) >= 0 for step in range(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Section, "__getattribute__", record)
        read_keys_of_ranks(RuntimeSection(), tmp_path_factory.mktemp("store"))
    return found


def read_keys_of_ranks(section: RuntimeSection, folder: Path) -> None:
    """What only a group of processes, a mesh or a TPU asks for."""
    runtime = create_cpu_runtime()
    runtime.section = section
    runtime.group = Group(section, "gloo", init_method=f"file://{folder}/store", size=1)
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    runtime.reduce_gradients(torch.optim.SGD(layer.parameters(), lr=1.0))
    runtime.close()
    assert get_mesh_shape(section, devices=4) == (4, 1)
    assert prepare_cache(section, "CPU", rank=0) is None


def write_cache(folder: Path, teacher_run: Path) -> None:
    """Store one epoch of the teacher's answers to the synthetic stream."""
    empty = folder.with_suffix(".yaml")
    empty.write_text("")
    flags = create_argv(folder.parent, "--kd=kd", f"--teacher_path={teacher_run}", "--epochs=1")
    own = ["--config", str(empty), "--out", str(folder), "--top-k=4"]
    assert cache_teacher.main([*own, *flags]) == 0


def list_runs(
    digits_root: Path, teacher_run: Path, cache: Path
) -> list[tuple[tuple[str, ...], bool]]:
    """Flags of each run, and whether its steps are needed or its checks alone."""
    digits = (
        "--config=configs/digits_student.yaml", "--data.source=tfds", "--data.name=digits",
        f"--data.root={digits_root}",
        "--data.train_pp=decode(channels=1)|resize(8)|value_range(-1, 1)",
        "--data.eval_pp=decode(channels=1)|resize(8)|value_range(-1, 1)",
    )  # fmt: skip
    two_steps = ("--train.steps=2", "--run.run_id=a", "--optim.warmup_epochs=0")
    weights = teacher_run / "student.safetensors"
    args = json.dumps({"img_size": 8, **VIT_ARGS})
    teacher = f'{{"model": "vit_tiny_patch16_224", "weights": "{weights}", "args": {args}}}'
    terms = '[{"name": "kd", "weight": 0.5, "weight_end": 0.1, "warmup_epochs": 0.5}]'
    mixed = ("--mixup=0.8", "--cutmix=1", "--model_ema", "--clip_grad=1", "--layer_decay=0.8")
    return [
        ((*two_steps, "--kd=kd", f"--teacher_path={teacher_run}", *mixed,
          "--distill.allow_weak_teacher"), True),
        ((*digits, *two_steps, "--data.order=sharded", f"--distill.losses={terms}",
          f"--distill.teachers=[{teacher}, {teacher}]"), True),
        (("--kd=kd", f"--teacher_path={teacher_run}", f"--distill.teacher_cache={cache}",
          "--epochs=2", "--distill.cache_end=cycle"), False),
        (("--opt=sgd", "--optim.schedule=step", "--optim.decay_epochs=[1]",
          "--optim.warmup_steps=2"), False),
        (("--optim.schedule=polynomial",), False),
        (("--optim.schedule=wsd",), False),
    ]  # fmt: skip


def list_continuations(earlier: Path) -> list[tuple[tuple[str, ...], bool]]:
    """Checks of runs that go on from another one, or start from its weights."""
    place = earlier / "tiny" / "a"
    return [
        ((f"--resume={place}", "--lr=0.5", "--run.allow_changes=optim.*"), False),
        ((f"--init-from={place}",), False),
    ]


def test_every_key_is_read(read_keys):
    assert get_wanted() - read_keys == set()


def test_reading_is_what_is_recorded(read_keys):
    assert read_keys <= get_wanted()
    assert len(read_keys) > 50


def test_the_keys_are_those_that_are_pinned():
    assert list(iterate_keys()) == KEYS.split()


def test_every_key_has_a_description_and_says_its_unit():
    """Times, sizes and intervals carry their unit in the name."""
    for key in iterate_keys():
        section, name = key.split(".")
        field = RunConfig.model_fields[section].annotation.model_fields[name]
        assert field.description, key
        assert not name.endswith(("_freq", "_interval", "_period")), key
