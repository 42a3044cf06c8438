"""Teachers that see the patches the student favours, or another size, through main.py."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

import main
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from models.factory import create_model
from models.teachers.kept_tokens import ClassTokenScores, KeptTokens, keep_tokens
from models.teachers.teacher import hash_teacher
from models.transforms import to_pixels
from store.record.history import read_metrics
from tasks.classify.synthetic import create_random_teacher
from tasks.teachers.taught import count_flops
from tests.support.child_runs import read_losses, run_series
from tests.support.tiny_parts import DEVICE_CASES, create_cpu_runtime
from utils.config.distill import TeacherSection
from utils.config.load import RunConfig, load_config
from utils.errors import UserError

# 8 pixels are 4 x 4 patches on both sides.
STUDENT = {"patch_size": 2, "in_chans": 1, "embed_dim": 12, "depth": 2, "num_heads": 2}
TEACHER = {**STUDENT, "embed_dim": 16, "num_heads": 4, "img_size": 8}
CROP = "decode(channels=1)|resize(12)|value_range(-1, 1)"
SMALL = "decode(channels=1)|resize(8)|value_range(-1, 1)"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """The weights of a teacher of random numbers."""
    from safetensors.torch import save_file
    from timm import create_model as create_timm

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vit") / "teacher.safetensors"
    save_file(create_timm("vit_tiny_patch16_224", num_classes=10, **TEACHER).state_dict(), path)
    return path


def create_flags(digits_root: Path, folder: Path, teacher: Path, name: str, **says) -> list[str]:
    """4 steps of 2 an epoch, taught by kd; `says` is of the teacher, but `device` and `flags`."""
    device, flags = says.pop("device", "cpu"), says.pop("flags", ())
    section = {"model": "vit_tiny_patch16_224", "weights": str(teacher), "args": TEACHER} | says
    return [
        "--config=configs/digits_student.yaml",
        f"--data.root={digits_root}",
        f"--run.output_dir={folder}",
        "--run.experiment=seen",
        f"--run.run_id={name}",
        f"--runtime.device={device}",
        "--run.tensorboard=false",
        "--data.test_split=",
        "--data.train_split=train[:64]",
        "--data.eval_split=validation[:64]",
        "--data.global_batch_size=32",
        f"--model.args={json.dumps(STUDENT)}",
        "--train.epochs=2",
        "--optim.warmup_epochs=0",
        "--train.log_every_steps=1",
        "--train.eval_every_epochs=100",
        "--train.checkpoint_every_steps=3",
        "--train.keep_checkpoints=9",
        "--mixup=0.2",
        "--runtime.graph_budget=100000",
        f"--distill.teachers={json.dumps([section])}",
        "--kd=kd",
        "--distill.allow_weak_teacher=true",
        *flags,
    ]


def build(flags: list[str]) -> tuple[RunConfig, object, object]:
    config = load_config(flags)
    job = check(config)
    return config, job, build_parts(create_cpu_runtime(), job)


@pytest.mark.parametrize("device", DEVICE_CASES)
def test_token_dropping_takes_one_graph_and_resumes_bit_for_bit(
    digits_root, teacher, tmp_path, device
):
    whole, arguments = tmp_path / "seen" / "whole", (digits_root, tmp_path, teacher)
    assert main.main(create_flags(*arguments, "whole", keep_tokens=0.5, device=device)) == 0
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    assert [line["graphs_train"] for line in lines] == [device == "xla"] * 4
    part = Path(shutil.copytree(whole, whole.with_name("part")))
    shutil.rmtree(part / "checkpoints" / "step_00000004")
    flags = create_flags(*arguments, "part", keep_tokens=0.5, device=device)
    assert main.main([*flags, "--resume=auto"]) == 0
    last, found = (
        load_file(one / "checkpoints" / "step_00000004" / "model.safetensors")
        for one in (whole, part)
    )
    assert all(torch.equal(found[name], value) for name, value in last.items())


@pytest.mark.xla
@pytest.mark.slow
def test_two_processes_micro_batches_and_xla_keep_the_same_patches(digits_root, teacher, tmp_path):
    def say(name, *flags, device="cpu"):
        arguments = (digits_root, tmp_path, teacher, name)
        return create_flags(*arguments, keep_tokens=0.5, device=device, flags=flags)

    two = run_series([say("two", "--runtime.cpu_processes=2")])
    others = run_series(
        [say("xla", device="xla"), say("one"), say("parts", "--train.accumulate_steps=2")]
    )
    assert two.returncode == others.returncode == 0, two.stderr + others.stderr
    one, *rest = (
        read_losses(tmp_path / "seen" / name, "kd") for name in ("one", "two", "parts", "xla")
    )
    assert all(one == pytest.approx(other, rel=1e-3) for other in rest)


def test_the_teacher_keeps_the_patches_with_most_class_attention(digits_root, teacher, tmp_path):
    """Attention and the teacher's shortened pass are written again here, block by block."""
    flags = create_flags(digits_root, tmp_path, teacher, "one", keep_tokens=0.25)
    config, job, parts = build(flags)
    task, student, (one,) = parts.task, parts.state.model, parts.task.teachers
    batch = next(iter(iterate_batches(parts, 0)))
    pixels = task.mixing.mix_pixels(to_pixels(batch.images), batch.draws)
    inputs = task.transform(pixels)
    with torch.no_grad():
        student(inputs)
        (found,) = task.compute_teacher_outputs(pixels, batch)
        tokens = student._pos_embed(student.patch_embed(inputs))
        block = student.blocks[1]
        rows = block.attn.qkv(block.norm1(student.blocks[0](tokens)))
        query, keys = rows[:, 0, :12].view(-1, 2, 6), rows[:, :, 12:24].view(-1, 17, 2, 6)
        scores = (query[:, None] * keys).sum(-1) / 6**0.5
        kept = scores.softmax(dim=1).mean(dim=2)[:, 1:].topk(4, dim=1).indices
        model = one.model
        tokens = model._pos_embed(model.patch_embed(one.transform(pixels)))
        seen = torch.stack(
            [
                torch.cat([row[:1], row[1:][chosen.sort().values]])
                for row, chosen in zip(tokens, kept, strict=True)
            ]
        )
        wanted = model.forward_head(model.norm(model.blocks(seen)))
        whole = one(pixels)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, whole)
    # Of 17 tokens it sees 5: what its blocks cost falls with them.
    less = count_flops(config, job.facts, task)["teachers"]
    parts.close()
    flags = create_flags(digits_root, tmp_path, teacher, "two")
    config, job, parts = build(flags)
    more = count_flops(config, job.facts, parts.task)["teachers"]
    embed = 2 * 16 * 4 * 16
    assert (less - embed) / (more - embed) == pytest.approx(5 / 17, abs=0.06)
    parts.close()


def test_kept_patches_follow_the_prefix_tokens():
    kept, tokens = KeptTokens(2, 3, 4), torch.arange(24.0).view(2, 6, 2)
    assert kept(tokens) is tokens
    kept.chosen = torch.tensor([[3, 0, 1], [2, 1, 0]])
    assert kept(tokens)[0, :, 0].tolist() == [0, 2, 10, 4, 6]
    kept.choose_first(2, "cpu")
    assert torch.equal(kept(tokens), tokens[:, :5])
    kept.choose(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))
    assert kept.chosen.sort().values.tolist() == [[1, 2, 3], [0, 1, 2]]
    # Where images are known in a run alone its first step tells.
    with pytest.raises(UserError, match=r"3 of 4 patches.*finds 9 patches.*in the student"):
        kept.choose(torch.rand(2, 9))
    with pytest.raises(UserError, match="finds 9 patches of an image in the teacher"):
        kept(torch.rand(2, 11, 2))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("vit_tiny_patch16_224", 1),
        ("vit_small_patch14_reg4_dinov2", 5),
        ("deit_tiny_distilled_patch16_224", 2),
    ],
)
def test_class_register_and_distillation_tokens_are_always_kept(name, prefix):
    from timm import create_model as create_timm

    arguments = {**STUDENT, "img_size": 8, "num_classes": 3}
    model = create_timm(name, **arguments).eval()
    kept = keep_tokens(model, 0.5, name)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.rand(2, 1, 8, 8)
    whole = model(images)
    kept.choose(torch.rand(2, 16))
    with torch.no_grad():
        less = model(images)
    assert [one.shape[1] for one in seen] == [prefix + 16, prefix + 8]
    assert torch.equal(seen[0][:, :prefix], seen[1][:, :prefix])
    assert whole.shape == less.shape == (2, 3)


def test_a_teacher_that_keeps_all_tokens_is_unchanged():
    """Stored answers name teachers by their hash, which a later key must not change."""
    plain = TeacherSection(model="resnet18")
    assert "keep_tokens" in plain.model_dump()
    assert hash_teacher(plain) == "eb989eee42629541"
    assert hash_teacher(TeacherSection(model="resnet18", keep_tokens=0.5)) != hash_teacher(plain)


@pytest.mark.parametrize("follows", [False, True])
def test_student_and_teacher_see_one_crop_at_two_sizes(digits_root, teacher, tmp_path, follows):
    """The student at 8 of 12 pixels; the teacher the crop at its own side, or the student's."""
    flags = [
        f"--data.train_pp={CROP}",
        f"--data.eval_pp={SMALL}",
        "--model.image_size=8",
        "--train.image_sizes={0: 8}",
    ]
    says = {"size": "student" if follows else None, "args": {**TEACHER, "dynamic_img_size": True}}
    flags = create_flags(digits_root, tmp_path, teacher, "sides", flags=flags, **says)
    _, _, parts = build(flags)
    task, batch = parts.task, next(iter(iterate_batches(parts, 0)))
    seen = {}
    for name, model in (("student", parts.state.model), ("teacher", task.teachers[0].model)):
        model.patch_embed.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0]})
        )
    task.loss(parts.state.model, batch)
    pixels = task.mixing.mix_pixels(to_pixels(batch.images), batch.draws)
    small = functional.interpolate(pixels, size=8, mode="bilinear", antialias=True)
    torch.testing.assert_close(seen["student"], task.transform(small), rtol=1e-4, atol=1e-4)
    wanted = task.teachers[0].transform(small if follows else pixels)
    torch.testing.assert_close(seen["teacher"], wanted, rtol=1e-4, atol=1e-4)
    assert task.facts.step_shapes == 1
    assert task.create_inputs(2).shape == (2, 1, 8, 8)
    (counted,) = task.list_companions(2)
    assert counted[1].shape == (2, 1, *((8, 8) if follows else (12, 12)))
    parts.close()


def test_a_random_teacher_at_the_students_size_accepts_the_images_size(tmp_path):
    section = TeacherSection(
        model="vit_tiny_patch16_224", size="student", args={**TEACHER, "dynamic_img_size": True}
    )
    made = create_random_teacher(section, tmp_path / "teacher", classes=10, image=(8, 1))
    assert made.size == "student" and Path(made.weights).exists()


@pytest.mark.parametrize("follows", [False, True])
def test_a_teacher_keeps_its_size_or_follows_the_growing_student(
    digits_root, teacher, tmp_path, follows
):
    """8 pixels in the first epoch of 2 steps, 12 from the second one on."""
    flags = [
        f"--data.train_pp={CROP}",
        f"--data.eval_pp={CROP}",
        "--model.image_size=12",
        "--model.args.dynamic_img_size=true",
        "--train.image_sizes={0: 8, 1: 12}",
    ]
    says = {"size": "student" if follows else None, "args": {**TEACHER, "dynamic_img_size": True}}
    flags = create_flags(digits_root, tmp_path, teacher, "grows", flags=flags, **says)
    _, _, parts = build(flags)
    sides = {"student": [], "teacher": []}
    task = parts.task
    for name, model in (("student", parts.state.model), ("teacher", task.teachers[0].model)):
        model.patch_embed.register_forward_pre_hook(
            lambda _, inputs, name=name: sides[name].append(inputs[0].shape[-1])
        )
    for batch in itertools.islice(iterate_batches(parts, 0), 3):
        task.loss(parts.state.model, batch)
    assert sides == {"student": [8, 8, 12], "teacher": [8, 8, 12] if follows else [12] * 3}
    parts.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICE_CASES)
@pytest.mark.parametrize("follows", [False, True])
def test_a_distilled_run_of_several_sizes_resumes_within_each(
    digits_root, teacher, tmp_path, follows, device
):
    """4 steps at 8 pixels, 4 at 12 and 4 at 8 again; from steps 2, 5, 6 and 11, bit for bit."""
    flags = [
        f"--data.train_pp={CROP}",
        f"--data.eval_pp={CROP}",
        "--model.image_size=12",
        "--model.args.dynamic_img_size=true",
        "--train.image_sizes={0: 8, 2: 12, 4: 8}",
        "--train.epochs=6",
        "--train.checkpoint_every_steps=1",
        "--train.keep_checkpoints=12",
    ]
    says = {"size": "student" if follows else None, "args": {**TEACHER, "dynamic_img_size": True}}

    def say(name: str) -> list[str]:
        return create_flags(
            digits_root, tmp_path, teacher, name, flags=flags, device=device, **says
        )

    whole = tmp_path / "seen" / "whole"
    assert main.main(say("whole")) == 0
    lines = [line for line in read_metrics(whole) if line["kind"] == "train"]
    last = load_file(whole / "checkpoints" / "step_00000012" / "model.safetensors")
    for step in (2, 5, 6, 11):
        part = Path(shutil.copytree(whole, whole.with_name(f"from{step}")))
        for later in range(step + 1, 13):
            shutil.rmtree(part / "checkpoints" / f"step_{later:08d}")
        assert main.main([*say(part.name), "--resume=auto"]) == 0
        found = load_file(part / "checkpoints" / "step_00000012" / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in last.items()), step
        again = read_losses(part, "kd")
        assert again == [line["loss/kd"] for line in lines]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"model": "resnet18", "args": {"in_chans": 1}, "keep_tokens": 0.5}, "not 'resnet18'"),
        (
            {
                "keep_tokens": 0.5,
                "flags": ["--model.args.class_token=false", "--model.args.global_pool=avg"],
            },
            "no vision transformer",
        ),
        (
            {"keep_tokens": 0.5, "flags": ["--model.args.patch_size=4"]},
            "the student has 2 x 2, the teacher 4 x 4",
        ),
        (
            {"keep_tokens": 0.5, "flags": ["--distill.views=independent"]},
            "is not supported with distill.views=independent",
        ),
        (
            {"model": "swin_tiny_patch4_window7_224", "args": {"in_chans": 1}, "keep_tokens": 0.5},
            "not 'swin_tiny_patch4_window7_224'",
        ),
        (
            {"keep_tokens": 0.5, "flags": ["--model.args.patch_drop_rate=0.5"]},
            "plain attention of all patches",
        ),
        (
            {"keep_tokens": 0.5, "flags": ["--model.name=vit_small_patch16_18x2_224"]},
            "'vit_small_patch16_18x2_224' with its model.args does not have",
        ),
        (
            {
                "keep_tokens": 0.5,
                "flags": [f"--data.train_pp={CROP}", "--model.args.dynamic_img_size=true"],
            },
            "of the student's own size, 8 x 8, but it sees 12 x 12; set model.image_size",
        ),
        (
            {"keep_tokens": 0.5, "size": 12, "args": {**TEACHER, "dynamic_img_size": True}},
            "of the teacher's own size, 8 x 8, but it sees 12 x 12; set img_size in its args",
        ),
        (
            {"keep_tokens": 0.5, "model": "ema", "flags": ["--train.ema=true"]},
            "args is not supported with the teacher 'ema'",
        ),
        ({"keep_tokens": 1.5}, "keep_tokens"),
        ({"size": "student"}, "needs train.image_sizes; set it"),
    ],
)
def test_images_a_teacher_cannot_take_are_refused_in_one_line(
    digits_root, teacher, tmp_path, says, words
):
    if says.get("model"):
        says = {**says, "weights": ""}
    with pytest.raises(UserError) as raised:
        check(load_config(create_flags(digits_root, tmp_path, teacher, "bad", **says)))
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_class_attention_of_other_models_than_vits_is_refused():
    from utils.config.sections import ModelSection

    model = create_model(ModelSection(name="resnet10t"), num_classes=3)
    with pytest.raises(UserError, match="is no vision transformer of timm with one"):
        ClassTokenScores(model, "resnet10t")
