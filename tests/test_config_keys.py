"""The keys of the configuration: pinned, described, and named with their unit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fnmatch import filter as find_matching
from pathlib import Path
from typing import get_args

from utils.config.distill import LossTerm, TeacherSection
from utils.config.evals import EvalSection
from utils.config.keys import get_keys, get_neutral_keys, get_resume_rules, iterate_keys
from utils.config.load import RunConfig
from utils.config.metadata import About, Resume, read_about

ROOT = Path(__file__).resolve().parents[1]
PREFIXES = {
    EvalSection: "data.evals[]",
    LossTerm: "distill.losses[]",
    TeacherSection: "distill.teachers[]",
}
# The pinned list: an addition shows in review, and belongs into the help of main.py.
KEYS = """
model.name model.num_classes model.image_size model.pretrained model.weights model.reset_head
model.drop_rate model.drop_path_rate model.drop_path_law model.drop_path_rescale
model.head_init_scale model.head_init_bias model.args
model.norm_width model.norm_copies model.lora model.lora_rank model.lora_alpha model.xla_patches
model.skip_patches model.attention_kernel model.kernels
data.source data.name data.root data.allow_download data.train_split data.eval_split
data.test_split data.evals
data.train_pp data.eval_pp data.strong_pp data.image_key data.label_key data.labels_file
data.input_columns data.target_columns
data.split_seed data.standardise data.global_batch_size data.eval_batch_size data.order data.repeats
data.shuffle_gib data.sequence_length data.threads data.prefetch_batches data.return_id
data.skip_corrupt data.random_erasing data.erasing_mode
optim.name optim.lr optim.base_lr optim.base_batch_size optim.lr_scaling optim.min_lr
optim.warmup_lr optim.warmup_epochs optim.warmup_steps optim.warmup_inside
optim.schedule optim.decay_rate optim.decay_epochs optim.power optim.plateau_patience
optim.plateau_min_delta optim.cycles optim.cycle_decay optim.cycle_length_factor
optim.cooldown_fraction
optim.weight_decay optim.weight_decay_end optim.momentum optim.betas optim.eps optim.layer_decay
optim.freeze optim.unfreeze optim.lr_factors optim.decay_factors
optim.max_grad_norm optim.max_grad_value optim.max_grad_ratio optim.args
train.task train.task_loss train.task_loss_args train.bce_threshold train.bce_sum
train.bce_positive_weight
train.class_weights train.l2_penalty train.epochs train.steps train.accumulate_steps
train.verdicts
train.seed train.log_every_steps
train.eval_every_epochs train.eval_every_steps train.checkpoint_every_epochs
train.checkpoint_every_steps
train.keep_checkpoints train.keep_every_steps train.on_nonfinite train.max_rollbacks
train.stall_timeout_s train.early_stop_patience train.early_stop_min_delta train.deterministic
train.label_smoothing train.mixup_alpha train.cutmix_alpha train.mix_mode train.mix_off_epoch
train.image_sizes
train.mix_prob train.cutmix_prob train.z_loss train.logits_mib train.remat train.scan_layers
train.sync_batchnorm train.ema train.ema_decay train.ema_start_epoch train.ema_more
distill.teacher distill.teacher_weights distill.teachers distill.peer distill.peer_args
distill.ensemble distill.views
distill.teacher_cache distill.cache_end distill.loss distill.temperature distill.alpha
distill.alpha_schedule
distill.losses distill.projector distill.projector_width distill.standardise distill.statistics
distill.score distill.group_size distill.allow_weak_teacher
runtime.device runtime.parallel runtime.num_processes runtime.cpu_processes runtime.mesh_data
runtime.mesh_fsdp runtime.mesh_context
runtime.timeout_s runtime.precision runtime.reduce_dtype runtime.overlap runtime.compile
runtime.compile_backend
runtime.channels_last runtime.tf32 runtime.matmul_precision runtime.compile_cache
runtime.compile_cache_gib
runtime.graph_budget runtime.num_threads profile.steps quantile.epsilon
run.output_dir run.cache_dir run.experiment run.run_id run.resume run.allow_changes run.init_from
run.init_skip run.init_rename run.checkpoint_root run.eval_only run.check_only run.overwrite
run.tensorboard
source.paper source.code source.commit source.published source.values source.differs
"""
PLACES = """
model.weights data.root data.evals[].root data.evals[].class_map
distill.teacher_weights distill.teachers[].weights
distill.teachers[].label_map distill.teacher_cache distill.statistics runtime.compile_cache
run.output_dir run.cache_dir run.checkpoint_root run.init_from run.resume
"""
NO_PLACES = """
data.labels_file model.drop_path_rate model.drop_path_law model.drop_path_rescale
train.class_weights distill.cache_end runtime.compile_cache_gib
"""
# What may differ when a run goes on, pinned likewise; anything else would be another run.
MAY_CHANGE = {
    "free": """
model.pretrained model.weights model.reset_head
data.root data.allow_download data.test_split data.evals data.eval_batch_size data.threads
data.prefetch_batches
data.return_id data.skip_corrupt
train.log_every_steps train.eval_every_epochs train.eval_every_steps train.checkpoint_every_epochs
train.checkpoint_every_steps train.keep_checkpoints train.keep_every_steps train.on_nonfinite
train.max_rollbacks train.stall_timeout_s
distill.teacher_weights distill.statistics distill.allow_weak_teacher profile.steps quantile.epsilon
run.output_dir run.cache_dir run.experiment run.run_id run.resume run.allow_changes run.init_from
run.init_skip run.init_rename run.checkpoint_root run.eval_only run.check_only run.overwrite
run.tensorboard
source.paper source.code source.commit source.published source.values source.differs
""",
    "warns": """
train.epochs train.steps train.verdicts train.early_stop_patience train.early_stop_min_delta
train.deterministic train.logits_mib train.remat train.scan_layers
runtime.device runtime.parallel runtime.num_processes runtime.cpu_processes runtime.mesh_data
runtime.mesh_fsdp runtime.mesh_context
runtime.timeout_s runtime.precision runtime.reduce_dtype runtime.overlap runtime.compile
runtime.compile_backend
runtime.channels_last runtime.tf32 runtime.matmul_precision runtime.compile_cache
runtime.compile_cache_gib runtime.graph_budget runtime.num_threads
""",
    "between_epochs": "data.shuffle_gib",
}
# Runs of one configuration may differ in these, pinned likewise: places, limits of time, and how
# much is told. What starts the weights, who teaches and what is read or measured is none of them.
NEUTRAL = """
data.allow_download data.threads data.prefetch_batches data.return_id
train.log_every_steps train.checkpoint_every_epochs train.checkpoint_every_steps
train.keep_checkpoints train.keep_every_steps train.stall_timeout_s
distill.allow_weak_teacher runtime.timeout_s runtime.compile_cache runtime.compile_cache_gib
runtime.graph_budget profile.steps quantile.epsilon
run.output_dir run.cache_dir run.experiment run.run_id run.resume run.checkpoint_root
run.check_only run.overwrite run.tensorboard
source.paper source.code source.commit source.published source.values source.differs
"""
# Entries of the stream's description and the keys in them: they decide what a teacher is shown.
STREAM = {
    "dataset": "data.source data.name data.train_split",
    "train_pp": "data.train_pp",
    "image_key": "data.image_key",
    "global_batch_size": "data.global_batch_size",
    "order": "data.order",
    "shuffle_gib": "data.shuffle_gib",
    "random_erasing": "data.random_erasing",
    "erasing_mode": "data.erasing_mode",
    "repeats": "data.repeats",
    "seed": "train.seed",
    "mix_mode": "train.mix_mode",
    "mix_off_epoch": "train.mix_off_epoch",
    "mixing": "train.mixup_alpha train.cutmix_alpha train.mix_prob train.cutmix_prob",
}


def get_wanted() -> set[str]:
    """All keys, and those of the elements of lists."""
    nested = {
        f"{PREFIXES[section]}.{name}" for section in PREFIXES for name in section.model_fields
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


def test_what_may_change_on_resume_is_what_is_pinned():
    found = {rule: [] for rule in get_args(Resume)}
    for key, rule in get_resume_rules().items():
        found[rule].append(key)
    assert found.pop("refused")
    assert found == {rule: keys.split() for rule, keys in MAY_CHANGE.items()}


def test_what_cannot_change_what_is_learnt_is_what_is_pinned():
    assert [key for key in get_keys() if key in get_neutral_keys()] == NEUTRAL.split()


def test_what_decides_the_stream_is_what_is_pinned():
    found: dict[str, list[str]] = {}
    for key in get_keys().values():
        if key.stream:
            found.setdefault(key.stream, []).append(key.name)
    assert found == {entry: keys.split() for entry, keys in STREAM.items()}


def test_a_key_that_may_change_between_epochs_is_an_entry_of_the_stream():
    """`store.query.changes.check_stream` finds its value there by the key's last word."""
    for key in get_keys().values():
        if key.resume == "between_epochs":
            assert key.stream == key.name.rpartition(".")[2]


def test_devices_and_their_values_are_choices_of_their_keys():
    known = set(
        get_args(RunConfig.model_fields["runtime"].annotation.model_fields["device"].annotation)
    )
    for key in get_keys().values():
        if key.devices is None:
            continue
        section, name = key.name.split(".")
        field = RunConfig.model_fields[section].annotation.model_fields[name]
        assert set(key.devices.names) < known - {"auto"}, key.name
        assert "; " in key.devices.why, key.name
        if key.devices.value is not None:
            assert key.devices.value in get_args(field.annotation), key.name
            assert key.devices.value != field.default, key.name


def test_the_schema_of_the_configuration_tells_what_keys_say_of_themselves():
    schema = json.loads(json.dumps(RunConfig.model_json_schema()))
    assert schema["$defs"]["TrainSection"]["properties"]["epochs"]["resume"] == "warns"
    assert schema["$defs"]["DataSection"]["properties"]["shuffle_gib"]["stream"] == "shuffle_gib"
    tf32 = schema["$defs"]["RuntimeSection"]["properties"]["tf32"]
    assert (tf32["devices"]["names"], "resume" in tf32, "stream" in tf32) == (
        ["cuda"],
        False,
        False,
    )


def test_a_short_flag_stands_for_one_key_and_hides_none():
    flags = Counter(flag for key in get_keys().values() for flag in key.aliases)
    assert {flag for flag, count in flags.items() if count > 1} == set()
    assert not flags.keys() & (get_keys().keys() | {"config"})


def test_keys_of_list_elements_say_nothing_of_their_own():
    """A list is one key: what it says holds for all that stands in it."""
    for section in PREFIXES:
        for name, field in section.model_fields.items():
            said = read_about(field.json_schema_extra or {})
            assert replace(said, is_place=False) == About(), name


def test_the_keys_that_name_a_place_are_those_that_are_pinned():
    """What is not among them is taken for a name by who lets others submit runs."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    sections |= {prefix: section for section, prefix in PREFIXES.items()}
    found = [
        f"{prefix}.{name}"
        for prefix, section in sections.items()
        for name, field in section.model_fields.items()
        if read_about(field.json_schema_extra or {}).is_place
    ]
    assert sorted(found) == sorted(PLACES.split())
    words = ("path", "directory", "file", "root", "cache", "weights")
    for prefix, section in sections.items():
        for name in section.model_fields:
            if any(word in name for word in words) and f"{prefix}.{name}" not in found:
                assert f"{prefix}.{name}" in NO_PLACES.split(), "a place? say so by about(is_place)"


def test_the_documents_say_of_each_key_what_its_field_says():
    found = {}
    for row in _find_rows("docs/checkpoints.md", "| there | means | keys |"):
        rule = row[0].strip("`").removeprefix("resume: ").replace(" ", "_")
        for pattern in re.findall(r"`(\w+\.[\w*]+)`", row[2]):
            found |= dict.fromkeys(find_matching(get_keys(), pattern), rule)
    rules = get_resume_rules().items()
    assert found == {key: rule for key, rule in rules if rule != "refused"}


def test_the_documents_say_which_devices_a_key_works_on():
    found = {}
    for key, where, _ in _find_rows("docs/runtimes.md", "| key | works on | what |"):
        value, _, names = where.rpartition(": ")
        if where != "all":
            found[key.strip("`")] = (value.strip("`"), tuple(re.findall(r"`(\w+)`", names)))
    limited = [key for key in get_keys().values() if key.devices]
    assert found == {key.name: (key.devices.value or "", key.devices.names) for key in limited}


def _find_rows(file: str, header: str) -> list[list[str]]:
    """Cells of the table with that header."""
    text = (ROOT / file).read_text(encoding="utf-8")
    _, _, table = text.partition(f"{header}\n")
    lines = table.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


# A key that says all that a key can say of itself, and is named nowhere but in its section.
PLANTED = """
    hue: float = Field(
        0.0,
        ge=0,
        description="share of examples in shifted colours",
        **about(
            resume="between_epochs",
            stream="hue",
            devices=Devices(("xla",), "others shift no colours; leave it out"),
            aliases=("hue_shift",),
        ),
    )
"""
PROGRAM = """
import json, sys
import main
from store.query.changes import check_changes, check_stream, hash_config
from datasets import DatasetFacts
from job.spec import describe_stream
from utils.config.keys import get_resume_rules
from utils.config.load import load_config
from utils.config.load import create_parser
from utils.errors import UserError

FLAGS = ["--data.source=synthetic", "--runtime.device=cpu", "--model=resnet18"]

def load(*flags):
    return load_config([*FLAGS, *flags])

def describe(config):
    dataset = DatasetFacts({"train": 4}, {}, "1", "x")
    return describe_stream(config, dataset, {"num_classes": 2}, processes=1)

old, new = load(), load("--hue-shift=0.5")
then, now = (config.model_dump(mode="json") for config in (old, new))
rules = get_resume_rules()
refusal = ""
try:
    check_stream(describe(old), describe(new), (), rules, mid_epoch=True)
except UserError as error:
    refusal = str(error)
print(json.dumps({
    "help": create_parser().format_help(),
    "value": new.data.hue,
    "entry": describe(new)["hue"],
    "config": check_changes(then, now, (), rules),
    "same_hash": hash_config(then, rules) == hash_config(now, rules),
    "border": check_stream(describe(old), describe(new), (), rules, mid_epoch=False),
    "refusal": refusal,
}))
sys.stdout.flush()
sys.exit(main.main([*FLAGS, "--hue_shift=0.5", "--check"]))
"""


def test_a_new_key_is_honoured_everywhere_by_what_its_field_says(tmp_path):
    """The program's own files, with one field more in `DataSection` and no other edit."""
    _link(ROOT, tmp_path, but="utils")
    _link(ROOT / "utils", tmp_path / "utils", but="config")
    _link(ROOT / "utils" / "config", tmp_path / "utils" / "config", but="data.py")
    head, name, tail = (
        (ROOT / "utils/config/data.py").read_text().partition('"""What the model sees."""\n')
    )
    assert name
    head = head.replace("ConfigSection, about", "ConfigSection, Devices, about")
    (tmp_path / "utils/config/data.py").write_text(head + name + PLANTED + tail)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "data.hue (0.5) works on xla, not on 'cpu': others shift no colours" in done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    words = " ".join(found.pop("help").split())
    assert "--hue_shift" in words
    assert "in shifted colours (default: 0.0) [resume: between epochs; xla only]" in words
    refusal = found.pop("refusal")
    assert "data.hue: hue was 0.0, is 0.5" in refusal and "twice or never" in refusal
    border = ["data.hue: hue was 0.0, is 0.5"]
    assert found == {"value": 0.5, "entry": 0.5, "config": [], "same_hash": True, "border": border}


def _link(source: Path, target: Path, *, but: str) -> None:
    """A directory that shows the entries of another one, except for one of them."""
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.name != but and not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry)
