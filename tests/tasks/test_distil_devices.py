"""Label-free runs on every form of device: compiled, on ranks, on a mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.backends import registry
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torch.nn.functional import scaled_dot_product_attention

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from store.record.history import read_metrics
from tests.support.feature_teachers import write_feature_teacher
from tests.support.tiny_parts import create_argv
from tests.tasks.test_distil import TEACHERS
from tests.test_parity import FORMS as FORMS_OF_ALL
from tests.test_parity import list_marks, run_child
from utils.config.load import load_config
from utils.runtime.launcher import create_runtime

# Rotary positions, register tokens, SwiGLU: timm has both in a class of their own.
EVA_TEACHERS = (
    (
        "vit_small_patch16_dinov3",
        {"img_size": 32, "in_chans": 1, "embed_dim": 48, "depth": 2, "num_heads": 2},
    ),
    (
        "eva02_tiny_patch14_224",
        {"img_size": 42, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_heads": 2},
    ),
)
TERMS = ({"name": "cosine"}, {"name": "mse", "of": "patches", "weight": 0.5})


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> str:
    """The flag of two teachers of random weights."""
    sections = [
        write_feature_teacher(tmp_path_factory.mktemp("features"), name, args, seed=number)
        for number, (name, args) in enumerate(TEACHERS)
    ]
    sections[1]["size"] = 12
    return f"--distill.teachers={json.dumps(sections)}"


def test_student_average_and_teachers_are_compiled_without_a_break(teachers, tmp_path, monkeypatch):
    """Of the graphs that dynamo hands to the compiler, none is missing and nothing is left over."""
    flags = create_argv(
        tmp_path,
        "--train.task=distil",
        teachers,
        f"--distill.losses={json.dumps(TERMS)}",
        "--train.ema",
    )
    registry.lookup_backend("inductor")  # registered once, before another takes its name
    found = []
    for more in ((), ("--runtime.compile",)):
        counter = CompileCounterWithBackend("eager")
        monkeypatch.setitem(registry._COMPILER_FNS, "inductor", counter)
        config = load_config([*flags, *more])
        parts = build_parts(create_runtime(config.runtime), check(config))
        batch = next(iterate_batches(parts, 0))
        model, task = parts.state.model.train(), parts.task
        loss = task.loss(model, batch)
        loss.total.backward()
        sums = task.count(parts.state.ema.eval(), batch)
        pooled = task.pool(parts.state.ema, batch)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([loss.total.detach(), sums, pooled, *gradients])
        # The student with and its average without a gradient, and two teachers.
        assert counter.frame_count == (4 if more else 0)
        for graph in counter.graphs:
            assert any(node.target is scaled_dot_product_attention for node in graph.graph.nodes)
        parts.close()
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_feature_distillation_trains_alike_with_inductors_kernels(teachers, tmp_path, precision):
    """Whole runs: C++ that inductor writes and compiles here, of student, average and teachers."""
    flags = [
        "--train.task=distil",
        teachers,
        f"--distill.losses={json.dumps(TERMS)}",
        "--train.ema",
        "--train.steps=6",
        "--optim.name=sgd",
        "--optim.lr=0.1",
        "--optim.warmup_epochs=0",
        f"--runtime.precision={precision}",
    ]
    found = []
    for name, more in (("eager", ()), ("compiled", ("--runtime.compile",))):
        torch._dynamo.reset()
        metrics.reset()
        counters.clear()
        with fresh_cache():  # else kernels of an earlier time count as none
            assert main.main(create_argv(tmp_path / name, *flags, *more)) == 0
        assert (metrics.generated_kernel_count > 0) == bool(more)
        assert not counters["graph_break"]
        (run,) = (tmp_path / name).glob("**/metrics.jsonl")
        found.append(list(read_metrics(run.parent)))
    bound = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    for eager, compiled in zip(*found, strict=True):
        for key in (one for one in eager if one.startswith(("loss/", "distil_loss"))):
            assert compiled[key] == pytest.approx(eager[key], rel=bound), (eager["step"], key)


@pytest.mark.xla
@pytest.mark.slow
def test_dinov3_and_eva_teach_on_xla_as_on_the_cpu(tmp_path):
    sections = [
        write_feature_teacher(tmp_path / name, name, args, seed=number) | {"size": args["img_size"]}
        for number, (name, args) in enumerate(EVA_TEACHERS)
    ]
    flags = [
        "--train.task=distil",
        f"--distill.teachers={json.dumps(sections)}",
        f"--distill.losses={json.dumps(TERMS)}",
        "--train.steps=6",
        "--optim.name=sgd",
        "--optim.lr=0.1",
        "--optim.warmup_epochs=0",
    ]
    found = {}
    for device in ("cpu", "xla"):
        more = f"--runtime.device={device}"
        assert main.main(create_argv(tmp_path / device, *flags, more)) == 0
        (lines,) = (tmp_path / device).glob("**/metrics.jsonl")
        found[device] = list(read_metrics(lines.parent))
    for cpu, xla in zip(*found.values(), strict=True):
        for key in (one for one in cpu if one.startswith(("loss/", "distil_loss"))):
            assert xla[key] == pytest.approx(cpu[key], rel=1e-4), (cpu["step"], key)
    assert {one["graphs_train"] for one in found["xla"] if one["kind"] == "train"} == {1}


# Terms of patches alone: the student's pooling head takes no part in the loss.
PATCH_TERMS = ({"name": "mse", "of": "patches"}, {"name": "gram_mse", "of": "patches"})
FORMS = [
    pytest.param(name, marks=list_marks(name))
    for name in ("cpu x2", "cpu x4 overlapped", "xla x1", "mesh 4", "fsdp 2x2")
]


@pytest.fixture(scope="module")
def probed(digits_root, teachers, tmp_path_factory) -> tuple[list[str], Path]:
    """Flags of a run of patches alone that probes its pooled features, and its run on one core."""
    sets = [{"name": "few", "bank": "train[:120]", "split": "validation[:60]"}]
    args = {
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "class_token": False,
        "global_pool": "map",
    }
    flags = [
        "--config=configs/kd/digits_labelfree.yaml",
        f"--data.root={digits_root}",
        "--run.experiment=forms",
        "--run.run_id=a",
        "--run.tensorboard=false",
        "--data.train_split=train[:64]",
        "--data.eval_split=validation[:50]",
        "--data.global_batch_size=16",
        "--data.eval_batch_size=40",
        "--optim.warmup_epochs=0",
        "--train.epochs=2",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=1",
        "--train.accumulate_steps=2",
        "--model_ema",
        "--mixup=0.2",
        "--runtime.num_threads=1",
        f"--model.args={json.dumps(args)}",
        f"--data.evals={json.dumps(sets)}",
        teachers,
        f"--distill.losses={json.dumps(PATCH_TERMS)}",
    ]
    folder = tmp_path_factory.mktemp("alone")
    assert main.main([*flags, f"--run.output_dir={folder}"]) == 0
    return flags, folder / "forms" / "a"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_pooling_head_without_gradients_is_unchanged(probed, name, tmp_path):
    """On ranks and meshes as on one core; losses, probes and every other weight are the same."""
    (flags, alone), form = probed, FORMS_OF_ALL[name]
    run_child(
        [*flags, *form.flags, f"--runtime.device={form.device}", f"--run.output_dir={tmp_path}"],
        form,
    )
    run = tmp_path / "forms" / "a"
    for wanted, found in zip(read_metrics(alone), read_metrics(run), strict=True):
        for key in (one for one in wanted if one.startswith(("loss/", "distil_loss", "few/"))):
            # An example of 60 may change sides where features differ in their last digits.
            bound = {"abs": 100 / 60 + 0.01} if key.startswith("few/") else {"rel": 1e-4}
            assert found[key] == pytest.approx(wanted[key], **bound), (wanted["step"], key)
    weights = [load_file(one / "student.safetensors") for one in (alone, run)]
    heads = [key for key in weights[0] if key.startswith("attn_pool")]
    assert heads and all(torch.equal(weights[0][key], weights[1][key]) for key in heads)
    # Of what no step moves, weight decay neither, an average is the same to the bit.
    *_, last = sorted((run / "checkpoints").glob("step_*"))
    now, average = (load_file(last / f"{one}.safetensors") for one in ("model", "ema"))
    assert all(torch.equal(now[key], average[key]) for key in heads)
    assert any(not torch.equal(now[key], value) for key, value in average.items())
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=2e-4, msg=key)
    if form.device == "xla":
        graphs = {line["graphs_train"] for line in read_metrics(run) if line["kind"] == "train"}
        assert graphs == {1}
