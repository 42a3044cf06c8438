"""How tests shorten documented commands, and which ones cannot run here."""

from __future__ import annotations

# Native, in one thread: no time is lost where other programs use the cores.
_CPU = ("--runtime.device=cpu", "--runtime.num_threads=1")
# A language model that has read a little of a few small texts, and has not learnt from them.
_READING = (
    *_CPU,
    "--train.steps=2",
    "--optim.warmup_steps=1",
    "--data.global_batch_size=4",
    "--data.sequence_length=64",
)
# What a command starts with -> the flags that shorten it; the first that fits counts.
SHORTENED = {
    r"python examples/": (),
    r"python main\.py --config examples/text/": _READING,
    r"python main\.py --config examples/": (*_CPU, "--train.epochs=3"),
    r"python -m tools\.prepare_dataset text --from docs ": (),
    r"python -m tools\.predict runs/(own_images|label_free)/": ("--device=cpu",),
    r"python -m tools\.(export|evaluate) runs/(own_images|label_free)/": (),
    r"python main\.py --help$": (),
    r"python main\.py .*--train\.epochs=5\b": _CPU,
    r"python main\.py .*--eval\b": _CPU,
    r"python main\.py --config configs/digits_(?!.*gs://)": (*_CPU, "--train.epochs=3"),
    r"python main\.py --config configs/mnist\w*\.yaml .*--print-config$": (),
    r"python main\.py --config configs/mnist\.yaml ": (*_CPU, "--batch_size=32"),
    r"python main\.py --config configs/regression/diabetes_": (
        *_CPU,
        "--train.steps=20",
        "--optim.warmup_steps=2",
    ),
    r"python main\.py --config configs/regression/friedman1_": (
        *_CPU,
        "--train.steps=60",
        "--optim.warmup_epochs=0",
    ),
    r"python main\.py --config configs/transformer_text\.yaml$": (
        *_READING,
        "--data.name=stdlib_small",
        "--run.run_id=first",
    ),
    r"python main\.py --config configs/transformer_teacher\.yaml .*=teacher$": _READING,
    r"python (main\.py|-m tools\.cache write) --config configs/transformer_distil\.yaml ": (
        *_READING,
        "--distill.allow_weak_teacher",
    ),
    r"python main\.py --config configs/transformer_sequences\.yaml$": (
        *_CPU,
        "--train.steps=4",
        "--optim.warmup_steps=2",
    ),
    r"python -m tools\.monitor ": (),
    r"bash run_commands\.sh supervise ": (*_CPU, "--train.epochs=3"),
    r"bash run_commands\.sh smoke$": (
        *_CPU,
        "--train.steps=2",
        "--train.log_every_steps=1",
        "--data.name=image_size=224,num_classes=10,num_examples=16",
    ),
    r"bash run_commands\.sh doctor": (),
    r"python tools/test_tfds_loader_multihost\.py ": (),
    r"python -m tools\.prepare_dataset text .*stdlib_small": ("--from", "texts"),
    r"python -m tools\.prepare_dataset text .*bpe": ("--from", "texts", "--vocab-size", "300"),
    r"python -m tools\.prepare_dataset (?!tfds |resize )": (),
    r"python -m proofs\.tables\.regression_table$": ("--seeds", "1", "--tables", "linnerud"),
    r"python -m proofs\.text_baselines ": (),
    r"python -m tools\.generate ": ("--max-tokens", "8"),
    r"python -m tools\.runs ": (),
    r"python -m tools\.serve .*--add-token ": (),
    r"python tools/test_tfds_loader\.py ": ("--num-loops=1", "--loop-batches=4"),
    r"python -m tools\.checkpoint ": (),
    r"python -m tools\.cache write ": (*_CPU, "--train.epochs=3"),
    r"python -m tools\.kd_report ": (),
}
# Programs that start others, run by a slow test.
SLOW = r"bash run_commands\.sh doctor|python tools/test_tfds_loader_multihost\.py "
# What cannot run here, or not in seconds -> why, and which test stands for it.
NOT_RUN = {
    r"bash run_commands\.sh setup|source \.venv": "8 GB by network: tests/test_run_commands.py",
    r"python -m pip install \.$|tpudistil ": "an environment of its own: tests/test_package.py",
    r"bash run_commands\.sh demo$": "minutes, of what is run here: tests/test_run_commands.py",
    r"VENV=\.venv-tpu bash run_commands\.sh doctor": "9 GB by network: tests/test_run_commands.py",
    r"python -m train\.|python -m tools\.doctor --tpu ": "a cloud: tests/test_tpu_docs.py",
    r"python -m tools\.prepare_dataset resize ": "ImageNet: tests/tools/test_resized_dataset.py",
    r"python -m tools\.prepare_dataset tfds ": "a network: tests/tools/test_prepare_mnist.py",
    r"python main\.py .*gs://": "a bucket: tests/test_buckets.py",
    r"python main\.py --config configs/mnist_distributed\.yaml$": "4 processes: "
    "tests/tools/test_prepare_mnist.py",
    r".*python -m proofs\.study ": "minutes: tests/proofs/test_study.py",
    r"python main\.py --config configs/delta_(distil|convert)\.yaml ": "minutes: "
    "tests/test_configs.py",
    r"python main\.py --config configs/delta_text\.yaml .*--train\.steps=1600": "the same, longer",
    r"python main\.py .*transformer_teacher\.yaml .*--train\.steps=1600": "the same, for longer",
    r"python main\.py --config configs/kd/digits_labelfree\.yaml ": "tests/tasks/test_distil.py",
    r"python -m tools\.feature_statistics ": "tests/tasks/test_feature_statistics.py",
    r"python main\.py --config configs/qwen3_5_sequences\.yaml": "minutes: "
    "tests/models/delta/test_qwen.py",
    r"python -m tools\.export runs/qwen3_5_sequences/": "tests/models/delta/test_hub_folders.py",
    r"python -m proofs\.jax_vision ": "TPU compiler: tests/proofs/test_jax_vision.py",
    r"python -m lab\.": "a measurement: tests/lab/test_delta_lab.py",
    r"python -m tools\.compile_for_tpu ": "TPU compiler: tests/bill/test_compile_for_tpu.py",
    r"python -m proofs\.chaos ": "minutes: tests/proofs/test_chaos.py",
    r"python -m proofs\.benchmark_checkpoint ": "a measurement: tests/test_readme.py",
    r"python -m tools\.benchmark_input ": "a measurement: tests/proofs/test_benchmark_input.py",
    r"python -m tools\.host_feed ": "reads a measurement: tests/proofs/test_host_feed.py",
    r"python -m proofs\.kd_table ": "hours of runs: tests/proofs/test_kd_table.py",
    r"bash run_commands\.sh (test(-all)?|lint)( |$)": "this suite: tests/test_run_commands.py",
    r"(python -m proofs\.|bash run_commands\.sh )release ": "tests/proofs/test_release.py",
    r"bash run_commands\.sh docs": "the site: tests/proofs/test_docs_site.py",
    r"bash run_commands\.sh service$|python -m tools\.serve .*--port ": "serves until it is "
    "stopped: tests/tools/test_serve.py",
    r"python -m tools\.serve .*--add-token ": "writes into runs/: tests/tools/test_serve.py",
    r"python -m proofs\.mutants ": "minutes: tests/proofs/test_mutants.py",
    r".*python -m tools\.benchmark ": "a measurement: tests/proofs/benchmark/test_benchmark.py",
    r"python main\.py .*num_processes|torchrun |CPU_NUM": "several: tests/utils/test_runtime.py",
    r"python -m proofs\.jax_decoder ": "TPU compiler: tests/proofs/test_jax_decoder.py",
    r"python -m tools\.shape_advisor ": "TPU compiler: tests/bill/test_shape_advisor.py",
    r"(python|\.venv-mirrors/bin/python) -m tools\.mirror |bash run_commands\.sh mirrors": "other "
    "trackers: tests/tools/mirror/test_trackers.py",
    r"python -m tools\.(sweep|queue) ": "runs of their own: tests/service/test_sweeps.py",
    r"python -m tools\.evaluate (?!runs/label_free/)": "a run's weights: "
    "tests/tools/evaluate/test_evaluate.py",
    r"python -m tools\.predict (?!runs/(own_images|label_free)/)": "images of one's own: "
    "tests/tools/test_predict.py",
    r"python -m tools\.(average|card) ": "runs of their own: tests/tools/test_average.py",
    r"python -m tools\.cache (info|verify|subset|write .*runs/views) ": "a cache: "
    "tests/tools/test_cache.py",
    r"python -m tools\.cache import ": "published files: tests/tools/test_cache_import.py",
    r"python -m proofs\.parity ": "a device beside the CPU: tests/proofs/test_layer_parity.py",
    r"(python -m tools\.|bash run_commands\.sh )export (?!runs/own_images/)": "minutes: "
    "tests/tools/test_export.py",
    r"bash (train/sky|scripts)/": "a cloud: tests/test_train_sky.py",
    r"python -m tools\.plan ": "of full recipes: tests/tools/test_plan.py",
    r"python -m tools\.replay |python main\.py .*--train\.keep_bad_step": "a step that is not "
    "finite: tests/tools/test_replay.py",
    r"python main\.py .*--profile\.steps=20-25$|python -m tools\.runs (profile |compare "
    r"runs/digits_student/RUN runs/digits_student/RUN$|trace .*RUN --out |show .*RUN --modules)": ""
    "a profile: tests/job/test_profiling.py",
}
