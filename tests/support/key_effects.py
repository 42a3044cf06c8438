"""The effect of each key of the configuration: a row for each key.

A row is (key, flags that both runs share, the flag that changes it, where it shows). It shows in a
part of what `describe` gives: built objects, values of a first step, files; or in `refused`, which
is the message that names the key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_parts import VIT_ARGS, create_config
from utils.config.load import RunConfig

# Keys whose effect needs hardware, a killed run or several processes: where a test shows it.
ELSEWHERE = {
    "tests/test_key_effects.py": {
        "model.pretrained": "test_pretrained_loads_hub_weights",
        "runtime.compile_cache_gib": "test_a_compile_cache_keeps_its_size_limit",
        "run.tensorboard": "test_tensorboard_events_are_written_on_request",
    },
    "tests/test_early_stop.py": {
        "train.early_stop_patience": "test_the_run_logs_why_it_ended",
        "train.early_stop_min_delta": "test_the_run_ends_when_its_scores_stop_improving",
    },
    "tests/test_bad_input.py": {"data.root": "test_a_missing_dataset_root_names_the_flag"},
    "tests/test_faults.py": {
        "train.on_nonfinite": "test_a_bad_batch_is_skipped_after_a_rollback",
        "train.deterministic": "test_another_thread_count_warns_and_is_refused_if_deterministic",
        "run.allow_changes": "test_a_changed_configuration_is_refused_with_the_difference",
        "run.init_skip": "test_a_run_may_start_from_another_runs_weights",
    },
    "tests/tools/test_replay.py": {
        "train.keep_bad_step": "test_the_kept_state_and_batch_are_those_of_the_step",
    },
    "tests/tasks/test_extra_evaluations.py": {
        "data.evals": "test_a_run_evaluates_extra_sets_by_their_own_rules",
        **dict.fromkeys(
            (f"data.evals[].{name}" for name in ("name", "dataset", "split", "classes", "every")),
            "test_a_run_evaluates_extra_sets_by_their_own_rules",
        ),
        **dict.fromkeys(
            (f"data.evals[].{name}" for name in ("source", "root", "pp", "label_key", "class_map")),
            "test_a_set_may_have_its_own_root_and_class_map",
        ),
    },
    "tests/test_own_code.py": {
        "run.imports": "test_two_processes_train_own_parts",
        "run.import_dir": "test_images_distil_by_an_own_loss_model_and_teacher",
    },
    "tests/models/test_teacher_parts.py": {
        "distill.teachers[].parts": "test_a_teacher_sees_a_batch_in_parts",
    },
    "tests/big_vision/test_input_mixture.py": dict.fromkeys(
        (
            "data.mix",
            *(f"data.mix[].{name}" for name in ("name", "weight", "pp", "source", "root")),
            *(f"data.mix[].{name}" for name in ("split", "image_key", "label_key")),
        ),
        "test_each_key_of_a_member_decides_its_examples",
    ),
    "tests/test_start_weights.py": {
        "run.init_rename": "test_mismatched_weights_are_named_by_patterns",
        "model.reset_head": "test_another_number_of_classes_starts_a_new_head",
    },
    "tests/test_runtime_options.py": {
        "train.remat": "test_a_model_without_repeated_blocks_is_refused",
        "train.scan_layers": "test_a_loop_over_blocks_with_dropout_is_refused",
        "runtime.overlap": "test_keys_that_a_runtime_cannot_honour_are_refused",
        "profile.steps": "test_a_trace_is_the_first_ranks_unless_all_are_asked_for",
        "profile.all_ranks": "test_a_trace_is_the_first_ranks_unless_all_are_asked_for",
        "runtime.compile": "test_channels_last_and_compile_change_only_layout_and_call",
        "runtime.compile_cache": "test_the_compile_cache_is_on_except_on_the_cpu",
    },
    "tests/test_compile_backends.py": {
        "runtime.compile_backend": "test_each_backend_compiles_one_graph_and_gives_equal_values"
    },
    "tests/test_parity.py": {
        "train.sync_batchnorm": "test_without_synchronisation_ranks_normalise_by_their_own_examples"
    },
    "tests/tasks/test_language.py": {
        "data.sequence_length": "test_windows_have_the_configured_length",
        "train.z_loss": "test_the_z_loss_adds_squares_of_the_log_normaliser",
        "train.logits_mib": "test_no_chunk_of_logits_exceeds_the_limit",
    },
    "tests/tasks/test_multilabel.py": {
        "data.labels_file": "test_batches_hold_the_label_lists_of_the_file"
    },
    "tests/tasks/test_regress.py": {
        "data.input_columns": "test_columns_are_chosen_by_name",
        "data.target_columns": "test_columns_are_chosen_by_name",
        "data.split_seed": "test_rows_are_permuted_only_by_the_split_seed",
        "data.standardise": "test_the_model_holds_the_requested_statistics",
        "train.task_loss": "test_each_loss_trains_its_statistic",
        "train.l2_penalty": "test_the_penalty_applies_to_matrices_only",
    },
    "tests/tasks/test_teacher_cache.py": {
        "distill.cache_end": "test_a_run_longer_than_the_cache_stops_or_cycles_as_configured"
    },
    "tests/test_recipe_sources.py": {
        **dict.fromkeys(
            (f"source.{name}" for name in ("paper", "code", "commit", "published")),
            "test_the_results_page_matches_the_recipes",
        ),
        **dict.fromkeys(
            ("source.values", "source.differs"),
            "test_a_recipe_equals_its_source_except_for_listed_differences",
        ),
    },
    "tests/test_main.py": {
        "distill.allow_weak_teacher": "test_a_weak_teacher_is_refused_unless_allowed"
    },
    "tests/test_groups.py": {
        "runtime.timeout_s": "test_a_failed_rank_ends_all_and_is_named",
        "runtime.reduce_dtype": "test_gradients_are_summed_in_the_requested_type",
        "runtime.num_threads": "test_cores_are_divided_among_ranks_unless_set",
    },
    "tests/job/test_summary.py": {
        "run.check_only": "test_check_prints_what_would_run_and_writes_nothing"
    },
    "tests/tasks/test_probing.py": dict.fromkeys(
        ("data.evals[].bank", "distill.score"),
        "test_a_run_evaluates_features_by_probes_and_keeps_the_best",
    ),
    "tests/tasks/test_distil.py": dict.fromkeys(
        (
            "distill.losses[].of",
            "distill.losses[].teacher",
            "distill.projector",
            "distill.projector_width",
        ),
        "test_terms_and_projectors_follow_the_configuration",
    ),
    "tests/tasks/test_feature_statistics.py": dict.fromkeys(
        ("distill.standardise", "distill.statistics"),
        "test_stored_statistics_standardise_the_features",
    ),
    "tests/test_buckets.py": {
        "run.overwrite": "test_an_existing_run_on_a_bucket_is_refused_or_renamed_first"
    },
}
BASE = ("--epochs=3", "--data.name=channels=1,num_classes=10,num_examples=96", "--run.run_id=a")
VIT = "vit_tiny_patch16_224"
Row = tuple[str, tuple[str, ...], str, str]
DIGITS = "digits"  # stands for the flags of the handwritten digits
TWO = ("--data.name=channels=1,num_classes=10,num_examples=64",)


def list_rows(teacher: Path, other: Path) -> list[Row]:
    """(key, shared flags, changed flag, part); `teacher` and `other` are exports."""
    weights = ("model.weights", (), f"--model.weights={teacher}", "weights")
    return [
        *_PLAIN_ROWS,
        weights,
        *_list_distill_rows(teacher, other),
        *_list_term_rows(teacher),
        *_list_teacher_rows(teacher, other),
    ]


def _list_distill_rows(teacher: Path, other: Path) -> list[Row]:
    args = json.dumps({"img_size": 8, **VIT_ARGS})
    taught = ("--kd=kd", f"--teacher_path={teacher}")
    one = f"{{model: {VIT}, weights: {teacher}, args: {args}}}"
    two = f"{{model: {VIT}, weights: {other}, args: {args}}}"
    both = ("--kd=kd", f"--distill.teachers=[{one}, {two}]")
    return [
        ("distill.teacher", taught, "--teacher=resnet18", "refused"),
        ("distill.teacher_weights", taught, f"--teacher_path={other}", "task"),
        ("distill.teachers", ("--kd=kd", f"--distill.teachers=[{one}]"), both[1], "teachers"),
        ("distill.ensemble", both, "--distill.ensemble=logits", "loss"),
        (
            "data.strong_pp",
            (
                taught[1],
                "--kd=mlkd",
                "--distill.views=weak_strong",
                "--data.strong_pp=value_range(-1, 1)",
            ),
            "--data.strong_pp=value_range(0, 1)",
            "refused:data.strong_pp ends with",
        ),
        ("distill.views", taught, "--distill.views=independent", "batch"),
        ("distill.teacher_cache", taught, "--distill.teacher_cache=nowhere", "refused"),
        ("distill.peer", taught, "--distill.peer=resnet10t", "invalid:distill.peer"),
        (
            "distill.peer_args",
            ("--kd=kd", "--distill.peer=resnet10t", "--distill.peer_args={in_chans: 1}"),
            "--distill.peer_args={in_chans: 3}",
            "refused:takes 3 channels",
        ),
        ("distill.alpha_schedule", taught, "--distill.alpha_schedule=epochs", "batch"),
        ("distill.loss", taught, "--kd=dkd", "loss"),
        ("distill.temperature", taught, "--kd_temperature=2", "loss"),
        ("distill.alpha", taught, "--kd_alpha=0.9", "loss"),
    ]


def _list_term_rows(teacher: Path) -> list[Row]:
    def with_term(**values: Any) -> str:
        return f"--distill.losses={json.dumps([{'name': 'kd'} | values])}"

    taught, termed = f"--teacher_path={teacher}", (f"--teacher_path={teacher}", with_term())
    rkd = "--distill.losses=[{name: rkd, layers: {blocks.0: blocks.0}}]"
    return [
        ("distill.losses", termed, with_term(name="dkd"), "loss"),
        ("distill.group_size", (rkd, taught), "--distill.group_size=4", "loss"),
        ("distill.losses[].name", termed, with_term(name="dkd"), "loss"),
        ("distill.losses[].args", termed, with_term(args={"temperature": 1}), "loss"),
        ("distill.losses[].layers", termed, with_term(layers={"no": "no"}), "refused:layers"),
        ("distill.losses[].weight", termed, with_term(weight=3), "loss"),
        ("distill.losses[].weight_end", termed, with_term(weight_end=0.1), "batch"),
        ("distill.losses[].start_epoch", termed, with_term(start_epoch=1), "batch"),
        ("distill.losses[].warmup_epochs", termed, with_term(warmup_epochs=1), "batch"),
    ]


def _list_teacher_rows(teacher: Path, other: Path) -> list[Row]:
    def with_teacher(**values: Any) -> str:
        section = {
            "model": VIT,
            "weights": str(teacher),
            "args": {"img_size": 8, **VIT_ARGS},
        } | values
        return f"--distill.teachers={json.dumps([section])}"

    single = ("--kd=kd", with_teacher())
    return [
        ("distill.teachers[].model", single, with_teacher(model="resnet18"), "refused:resnet18"),
        ("distill.teachers[].weights", single, with_teacher(weights=str(other)), "task"),
        (
            "distill.teachers[].args",
            single,
            with_teacher(args={**VIT_ARGS, "depth": 2}),
            "refused:of another model",
        ),
        ("distill.teachers[].weight", single, with_teacher(weight=3), "teachers"),
        (
            "distill.teachers[].num_classes",
            single,
            with_teacher(num_classes=3),
            "refused:has 3 classes",
        ),
        (
            "distill.teachers[].label_map",
            single,
            with_teacher(label_map="nowhere"),
            "refused:label_map ('nowhere')",
        ),
        ("distill.teachers[].size", single, with_teacher(size=12), "refused:by size"),
        ("distill.teachers[].keep_tokens", single, with_teacher(keep_tokens=0.5), "loss"),
        ("distill.teachers[].mean", single, with_teacher(mean=[3], std=[5]), "teachers"),
        ("distill.teachers[].std", single, with_teacher(mean=[0], std=[5]), "teachers"),
        ("distill.teachers[].dtype", single, with_teacher(dtype="bf16"), "teachers"),
    ]


def load(folder: Path, digits: tuple[str, ...], flags: tuple[str, ...]) -> RunConfig:
    """The configuration of a row."""
    spread = [word for flag in flags for word in (digits if flag == DIGITS else (flag,))]
    words = (*BASE, *(word.replace("HERE", str(folder)) for word in spread))
    return create_config(folder, *words)


def _rows(shared: str, section: str, changes: list[tuple[str, str, str]]) -> list[Row]:
    """Rows of keys of one section that share their flags."""
    flags = (shared,) if shared else ()
    return [
        (f"{section}.{name.partition('.')[0]}", flags, f"--{section}.{name}={value}", part)
        for name, value, part in changes
    ]


_PLATEAU = ("--optim.schedule=plateau",)
_STEPPED = ("--optim.schedule=step", "--optim.decay_epochs=[1]")
_BCE = "--train.task_loss=bce"
_DROPPED = ("--model.args.depth=2", "--drop_path=0.5")
_LORA = '--model.lora=["blocks.*.attn.qkv"]'
_MESH = ("--runtime.device=xla", "--runtime.parallel=spmd")
_PLAIN_ROWS: list[Row] = [
    *_rows(
        "",
        "model",
        [
            ("name", "resnet10t", "refused:resnet10t"),
            ("num_classes", "12", "model"),
            ("image_size", "12", "layout"),
            ("drop_rate", "0.5", "model"),
            ("args.depth", "2", "model"),
        ],
    ),
    ("model.drop_path_rate", ("--model.args.depth=2",), "--drop_path=0.5", "model"),
    ("model.drop_path_law", _DROPPED, "--model.drop_path_law=constant", "model"),
    ("model.drop_path_rescale", _DROPPED, "--model.drop_path_rescale=false", "loss"),
    ("model.xla_patches", ("--runtime.device=xla",), "--model.xla_patches=false", "layers"),
    (
        "model.skip_patches",
        ("--runtime.device=xla",),
        "--model.skip_patches=[linear, attention, layer_norm, gelu]",
        "layers",
    ),
    ("model.attention_kernel", (), "--model.attention_kernel=on", "refused"),
    ("model.kernels", (), "--model.kernels=pallas", "refused"),
    ("model.norm_width", (), "--model.norm_width=8", "refused:model.norm_width"),
    ("model.norm_copies", (), "--model.norm_copies=0", "invalid:model.norm_copies"),
    ("model.lora", (), _LORA, "optimizer"),
    *_rows(_LORA, "model", [("lora_rank", "2", "model"), ("lora_alpha", "3", "weights")]),
    ("data.source", (), "--data.source=folder", "refused:data.root"),
    ("data.name", (), TWO[0], "task"),
    ("data.allow_download", (), "--data.allow_download=true", "invalid:data.allow_download"),
    *_rows(
        DIGITS,
        "data",
        [
            ("train_split", "train[:640]", "task"),
            ("eval_split", "train[:90]", "task"),
            ("test_split", "test", "task"),
            ("order", "sharded", "reader"),
            ("train_pp", "decode(channels=1)|resize(9)|value_range(-1, 1)", "refused"),
            ("eval_pp", "decode(channels=1)|resize(9)|value_range(-1, 1)", "refused"),
            ("image_key", "img", "refused"),
            ("label_key", "lab", "refused"),
            ("shuffle_gib", "1e-6", "reader"),
            ("threads", "1", "reader"),
            ("prefetch_batches", "5", "reader"),
            ("skip_corrupt", "3", "reader"),
        ],
    ),
    *_rows(
        "",
        "data",
        [
            ("global_batch_size", "32", "plan"),
            ("eval_batch_size", "20", "eval"),
            ("return_id", "true", "batch"),
            ("random_erasing", "1", "batch"),
        ],
    ),
    ("data.erasing_mode", ("--data.random_erasing=1",), "--data.erasing_mode=pixel", "batch"),
    *_rows(
        "",
        "optim",
        [
            ("name", "sgd", "optimizer"),
            ("lr", "0.5", "schedule"),
            ("min_lr", "5e-4", "schedule"),
            ("warmup_epochs", "1", "schedule"),
            ("warmup_steps", "3", "schedule"),
            ("schedule", "linear", "schedule"),
            ("weight_decay", "0.5", "optimizer"),
            ("eps", "1e-3", "optimizer"),
            ("weight_decay_end", "0.5", "schedule"),
            ("betas", "[0.5, 0.6]", "optimizer"),
            ("layer_decay", "0.5", "optimizer"),
            ("max_grad_norm", "1", "state"),
            ("max_grad_value", "1", "state"),
            ("max_grad_ratio", "1", "state"),
            ("base_lr", "0.5", "schedule"),
            ("args.amsgrad", "true", "optimizer"),
        ],
    ),
    *_rows(
        "--optim.base_lr=0.5",
        "optim",
        [("base_batch_size", "64", "schedule"), ("lr_scaling", "linear", "schedule")],
    ),
    ("optim.warmup_lr", ("--optim.warmup_steps=3",), "--optim.warmup_lr=1e-4", "schedule"),
    ("optim.warmup_inside", ("--optim.warmup_steps=3",), "--optim.warmup_inside=true", "schedule"),
    ("optim.decay_rate", _STEPPED, "--optim.decay_rate=0.5", "schedule"),
    ("optim.decay_epochs", _STEPPED, "--optim.decay_epochs=[2]", "schedule"),
    ("optim.power", ("--optim.schedule=polynomial",), "--optim.power=3", "schedule"),
    ("optim.plateau_patience", _PLATEAU, "--optim.plateau_patience=2", "plan"),
    ("optim.plateau_min_delta", _PLATEAU, "--optim.plateau_min_delta=0.5", "plan"),
    ("optim.cycles", (), "--optim.cycles=2", "schedule"),
    ("optim.cycle_decay", ("--optim.cycles=2",), "--optim.cycle_decay=0.5", "schedule"),
    (
        "optim.cycle_length_factor",
        ("--optim.cycles=2",),
        "--optim.cycle_length_factor=2",
        "schedule",
    ),
    (
        "optim.cooldown_fraction",
        ("--optim.schedule=wsd",),
        "--optim.cooldown_fraction=0.5",
        "schedule",
    ),
    ("optim.freeze", (), '--optim.freeze=["blocks.*"]', "optimizer"),
    ("optim.unfreeze", (), '--optim.unfreeze={"blocks.*":1}', "optimizer"),
    ("optim.lr_factors", (), '--optim.lr_factors={"head.*":10}', "optimizer"),
    ("optim.decay_factors", (), '--optim.decay_factors={"head.weight":0}', "optimizer"),
    ("optim.momentum", ("--opt=sgd",), "--optim.momentum=0.5", "optimizer"),
    *_rows(
        "",
        "train",
        [
            ("task", "language", "refused"),
            ("epochs", "2", "plan"),
            ("steps", "7", "plan"),
            ("accumulate_steps", "2", "state"),
            ("seed", "1", "batch"),
            ("log_every_steps", "3", "plan"),
            ("eval_every_epochs", "2", "plan"),
            ("eval_every_steps", "4", "plan"),
            ("checkpoint_every_epochs", "2", "plan"),
            ("checkpoint_every_steps", "5", "plan"),
            ("keep_checkpoints", "7", "callbacks"),
            ("keep_every_steps", "3", "callbacks"),
            ("max_rollbacks", "9", "callbacks"),
            ("stall_timeout_s", "77", "callbacks"),
            ("label_smoothing", "0.3", "loss"),
            ("mixup_alpha", "0.8", "batch"),
            ("cutmix_alpha", "0.8", "batch"),
            ("ema", "true", "state"),
        ],
    ),
    (
        "train.verdicts",
        (),
        "--train.verdicts={'v9:8': {parts: 2, step: a, graph: b}}",
        "invalid:train.verdicts",
    ),
    ("train.mix_prob", ("--mixup=0.8",), "--train.mix_prob=0", "batch"),
    *_rows(
        "--mixup=0.8", "train", [("mix_mode", "element", "batch"), ("mix_off_epoch", "0", "batch")]
    ),
    (
        "train.image_sizes",
        ("--model.args.dynamic_img_size=true",),
        "--train.image_sizes={0: 4, 1: 8}",
        "batch",
    ),
    ("data.repeats", (), "--data.repeats=3", "batch"),
    ("data.sample_weights", (), "--data.sample_weights=auto", "batch"),
    ("train.cutmix_prob", ("--mixup=0.8", "--cutmix=1"), "--train.cutmix_prob=1", "batch"),
    ("train.ema_decay", ("--model_ema",), "--train.ema_decay=0.5", "state"),
    ("train.ema_start_epoch", ("--model_ema",), "--train.ema_start_epoch=1", "state"),
    ("train.ema_more", ("--model_ema",), "--train.ema_more=[0.5]", "state"),
    (
        "train.task_loss_args",
        ("--train.task_loss=focal",),
        "--train.task_loss_args={gamma: 3}",
        "loss",
    ),
    ("train.bce_threshold", (_BCE, "--smoothing=0.5"), "--train.bce_threshold=0.2", "loss"),
    *_rows(_BCE, "train", [("bce_sum", "true", "loss"), ("bce_positive_weight", "3", "loss")]),
    ("train.class_weights", (), "--train.class_weights=[0, 1, 1, 1, 1, 1, 1, 1, 1, 1]", "loss"),
    *_rows(
        "", "model", [("head_init_scale", "0.1", "weights"), ("head_init_bias", "-7", "weights")]
    ),
    *_rows(
        "",
        "runtime",
        [
            ("device", "xla", "device"),
            ("parallel", "spmd", "refused"),
            ("num_processes", "2", "ranks"),
            ("precision", "bf16", "loss"),
            ("tf32", "true", "refused"),
            ("matmul_precision", "highest", "refused"),
            ("graph_budget", "77", "plan"),
        ],
    ),
    ("runtime.cpu_processes", (), "--runtime.cpu_processes=2", "ranks"),
    ("runtime.channels_last", (), "--runtime.channels_last=true", "layout"),
    ("runtime.mesh_fsdp", _MESH, "--runtime.mesh_fsdp=2", "mesh"),
    ("runtime.mesh_context", _MESH, "--runtime.mesh_context=2", "invalid:runtime.mesh_context"),
    ("runtime.mesh_data", _MESH, "--runtime.mesh_data=2", "refused"),
    ("quantile.epsilon", (), "--quantile.epsilon=0.05", "callbacks"),
    *_rows(
        "",
        "run",
        [
            ("output_dir", "HERE/other", "task"),
            ("experiment", "other", "task"),
            ("run_id", "other", "task"),
            ("resume", "nowhere", "refused"),
            ("init_from", "nowhere", "refused"),
            ("eval_only", "true", "invalid:run.eval_only"),
            ("checkpoint_root", "HERE/root", "task"),
        ],
    ),
    (
        "run.cache_dir",
        ("--run.output_dir=memory://effects/runs",),
        "--run.cache_dir=HERE/c",
        "task",
    ),
]
