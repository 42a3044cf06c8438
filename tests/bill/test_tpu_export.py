"""What the TPU compiler's tool traces: the engine's step, for any run, on any host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from big_vision.input.synthetic import parse_synthetic_name
from bill.step.derive import derive_config
from bill.step.export import compute_digest, trace_step
from bill.step.synthetic_run import create_synthetic_run
from bill.step.tracing import StepExport, trace_alone
from tests.support.language import create_language_argv
from tests.support.rows import create_regression_argv
from tests.support.tiny_parts import create_config
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/imagenet/vit_s16_90ep.yaml"


def trace(tmp_path: Path, *flags: str) -> StepExport:
    return trace_step(create_config(tmp_path, *flags, device="xla"))


@pytest.mark.xla
def test_an_unsplittable_step_is_refused_with_the_runs_message(tmp_path):
    config = create_config(tmp_path, device="xla")
    model = {"name": "cifar_resnet8x4", "args": {"in_chans": 1}, "image_size": None}
    config = change(config, model=model)
    words = r"train\.accumulate_steps \(auto\) is not supported with the BatchNorm of"
    with pytest.raises(UserError, match=words):
        trace_step(config, is_automatic=True)


@pytest.mark.xla
def test_the_traced_step_is_complete_and_donates_its_state(tmp_path):
    export = trace(tmp_path, "--train.ema=true", "--optim.max_grad_norm=1")
    weights = [name for name in export.arguments if name.startswith("model.")]
    averages = [name for name in export.arguments if name.startswith("ema.")]
    moments = [name for name in export.arguments if name.endswith("|exp_avg")]
    assert len(weights) == len(averages) == len(moments) > 10
    assert {"batch/images", "batch/labels", "batch/mask"} <= set(export.arguments)
    assert export.undonated == []
    assert (export.gradients_alive, export.host_ops) == ([], [])
    assert len(export.donations) >= len(weights) + len(averages) + len(moments)
    assert len(set(export.donations.values())) == len(export.donations)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("create", "unit", "shapes"),
    [
        (create_language_argv, ("tokens", 8), {"tokens": [9]}),
        (create_regression_argv, ("rows", 1), {"inputs": [10], "targets": [1]}),
    ],
    ids=["language", "regress"],
)
def test_the_step_of_every_task_is_traced_without_its_data(tmp_path, create, unit, shapes):
    config = load_config(create(tmp_path / "runs", "--runtime.precision=bf16", "--train.ema"))
    export = trace_step(derive_config(config, tmp_path / "twin", batch=4, devices=1))
    assert (export.unit, export.shapes, export.examples) == (unit, shapes, 4)
    moments = [name for name in export.arguments if name.endswith("|exp_avg")]
    weights = {name.removeprefix("optimizer/").removesuffix("|exp_avg") for name in moments}
    assert len(moments) > 2 and weights <= set(export.arguments)
    assert {f"batch/{name}" for name in (*shapes, "mask")} <= set(export.arguments)
    assert export.undonated == export.gradients_alive == export.host_ops == []


@pytest.mark.slow
@pytest.mark.xla
def test_a_step_uses_the_kernels_of_its_target_chip(tmp_path):
    """`model.kernels: auto` takes on a v5e what pallas takes of its rule, and nothing on a v3."""
    pytest.importorskip("jax", reason="needs jax: setup --tpu-compiler")
    sizes = {
        "depth": 1,
        "width": 32,
        "mlp_width": 32,
        "linear_key_width": 128,
        "linear_value_width": 128,
        "chunk": 64,
    }
    flags = [
        "--config",
        "configs/qwen3_5_sequences.yaml",
        f"--run.output_dir={tmp_path}",
        "--runtime.device=xla",
        "--runtime.precision=bf16",
        "--data.sequence_length=128",
        f"--model.args={json.dumps(sizes)}",
    ]
    found = {}
    for kernels, chip in (("auto", "v5e"), ("pallas", ""), ("auto", "v3")):
        config = load_config([*flags, f"--model.kernels={kernels}"])
        export = trace_alone(config, batch=2, devices=1, given={}, chip=chip)
        found[kernels, chip] = export.digest, b"tpu_custom_call" in export.bytecode
    assert found["auto", "v5e"] == found["pallas", ""]
    assert [calls for _, calls in found.values()] == [True, True, False]


@pytest.mark.xla
def test_an_accumulated_step_is_longer_and_tracing_is_repeatable(tmp_path):
    plain = trace(tmp_path / "a")
    split = trace(tmp_path / "b", "--train.accumulate_steps=2")
    assert len(split.bytecode) > 1.2 * len(plain.bytecode)
    again = trace(tmp_path / "c")
    assert again.bytecode == plain.bytecode
    assert again.digest == plain.digest != split.digest


def test_a_programs_digest_ignores_source_locations():
    line = (
        '%a = f32[8] add(%b, %c), metadata={op_name="blocks.0" source_file="/x/a.py" source_line=7}'
    )
    moved = line.replace("/x/a.py", "/y/b.py").replace("line=7", "line=12")
    assert compute_digest(line) == compute_digest(moved)
    for other in (line.replace("add", "sub"), line.replace("blocks.0", "blocks.1")):
        assert compute_digest(line) != compute_digest(other)


@pytest.mark.xla
def test_patches_change_the_traced_step(tmp_path):
    with_patches = trace(tmp_path / "a", "--runtime.precision=bf16")
    without = trace(tmp_path / "b", "--runtime.precision=bf16", "--model.xla_patches=false")
    assert with_patches.digest != without.digest
    assert len(with_patches.donations) == len(without.donations)


SPMD = """
import json, sys
from pathlib import Path
from bill.step.export import prepare_tracing, trace_step
prepare_tracing(4)
from tests.support.tiny_parts import create_config
flags = ("--runtime.parallel=spmd", "--train.accumulate_steps=2")
config = create_config(Path(sys.argv[1]), *flags, device="xla")
export = trace_step(config)
print(json.dumps({"donations": len(export.donations), "arguments": export.arguments,
                  "undonated": export.undonated, "sharded": b"devices=[4" in export.bytecode}))
"""


@pytest.mark.xla
def test_a_partitioned_step_lists_its_state_and_its_shards(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SPMD, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sharded"]
    assert found["undonated"] == []
    assert found["donations"] > 40
    # The number of micro-batches is data, too, and no state tensor.
    state = [name for name in found["arguments"] if name.startswith(("model.", "optimizer/"))]
    assert len(state) == len(set(state)) and "scalar" in found["arguments"]


def find_image_shape(config: RunConfig) -> tuple[int, int]:
    """Return side and channels of the synthetic run's images."""
    synthetic = create_synthetic_run(config, {"num_classes": 10})
    data = synthetic.replace_data(64, Path("unwritten"), by_trial=True).data
    made = parse_synthetic_name(data.name)
    assert data.source == "synthetic" and made.num_examples == 64
    return made.image_size, made.channels


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)", (224, 3)),
        ("decode|resize(40)|random_crop(32)|vgg_value_range", (32, 3)),
        ("decode(1)|resize(28)|value_range(0, 1)", (28, 1)),
        ("decode|inception_crop(area_min=8, size=96)", (96, 3)),
    ],
)
def test_image_shapes_follow_the_preprocessing(spec, shape):
    config = load_config(["--config", CONFIG, f"--data.train_pp={spec}"])
    assert find_image_shape(config) == shape


def test_images_of_known_tfds_datasets_have_their_size():
    config = load_config(["--config", "configs/kd/cifar100_dkd.yaml"])
    assert find_image_shape(config) == (32, 3)
    spec = 'decode|random_crop(600)|concat(["image", "image"])|resize(32)'
    config = load_config(["--config", CONFIG, f"--data.train_pp={spec}"])
    with pytest.raises(UserError, match="fails on a synthetic image of 400 x 500"):
        find_image_shape(config)


def test_a_teacher_of_another_image_size_is_refused_by_name(tmp_path):
    config = load_config(["--config", "configs/kd/digits_dkd.yaml"])
    with pytest.raises(UserError, match=r"distill.teacher \('vit_tiny_patch16_224'\).* 8 x 8 x 1"):
        derive_config(config, tmp_path, batch=4, devices=1, given={"num_classes": 10})


@pytest.mark.xla
def test_a_cached_teacher_needs_no_matching_image_size(tmp_path):
    flags = ["--config", "configs/kd/digits_cached.yaml", "--distill.teacher_cache=nowhere"]
    derived = derive_config(
        load_config(flags), tmp_path, batch=4, devices=1, given={"num_classes": 10}
    )
    assert Path(derived.distill.teacher_cache, "manifest.json").is_file()


@pytest.mark.xla
def test_a_derived_run_keeps_only_what_the_step_needs(tmp_path):
    flags = [
        "--config",
        CONFIG,
        "--train.accumulate_steps=2",
        "--model.num_classes=1000",
        "--train.ema=true",
        "--distill.teacher=vit_tiny_patch16_224",
        "--distill.loss=kd",
        f"--distill.teacher_cache={tmp_path / 'nowhere'}",
    ]
    config = load_config(flags)
    derived = derive_config(config, tmp_path, batch=16, devices=2)
    assert derived.data.source == "synthetic"
    assert derived.data.global_batch_size == 32
    assert (derived.runtime.parallel, derived.runtime.device) == ("spmd", "xla")
    assert derived.train.accumulate_steps == 2
    assert derived.optim == config.optim
    assert Path(derived.distill.teacher_cache, "manifest.json").is_file()
    assert Path(derived.distill.teachers[0].weights).is_file()
