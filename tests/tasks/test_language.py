"""Next-token prediction on synthetic sequences, through main and in parts."""

from __future__ import annotations

import math

import pytest
import torch

import main
from big_vision.input.text.tokens import read_token_index
from datasets import create_loader
from job.check import check
from losses.tasks import chunked
from models.factory import export_model
from store.record.history import read_metrics
from tasks.language.task import Language
from tasks.teachers.taught import count_flops
from tests.support.language import create_language_argv, create_task, write_texts, write_tokens
from tools.prepare_dataset.__main__ import main as prepare
from utils.config.execution import RuntimeSection
from utils.config.load import load_config
from utils.errors import UserError
from utils.metrics import LoopMeter
from utils.runtime.launcher import create_runtime


def test_a_language_model_learns_to_copy_through_main(tmp_path):
    flags = ("--train.steps=60", "--train.logits_mib=0.01", "--data.eval_batch_size=48")
    assert main.main(create_language_argv(tmp_path, *flags)) == 0
    first, *_, last = read_metrics(tmp_path / "lang" / "a")
    config = load_config(create_language_argv(tmp_path))
    facts = create_loader(config.data, "eval", seed=0).facts
    assert first["loss/task"] == pytest.approx(math.log(facts.vocab_size), rel=0.05)
    assert facts.floor < last["loss"] < 0.95 * first["loss/task"]
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["examples"] == 100
    assert 100 / 5 < last["accuracy"] <= 100


def test_windows_have_the_configured_length(tmp_path):
    for length in (8, 12):
        config = load_config(create_language_argv(tmp_path, f"--data.sequence_length={length}"))
        batch = next(create_loader(config.data, "train", seed=0).batches())
        assert batch.tokens.shape == (16, length + 1)
        task = Language(config, None, {"eval": create_loader(config.data, "eval", seed=0)})
        assert task.unit == ("tokens", length)


def test_the_z_loss_adds_squares_of_the_log_normaliser(tmp_path):
    outputs = {}
    for weight in (0.0, 0.01):
        task, model, batch = create_task(tmp_path, f"--train.z_loss={weight}")
        outputs[weight] = task.loss(model, batch)
    logits = model.compute_logits(model(batch.tokens[:, :-1]))
    squares = (torch.logsumexp(logits, -1) ** 2).mean()
    torch.testing.assert_close(outputs[0.01].terms["z_loss"], squares.detach())
    wanted = outputs[0.0].total + 0.01 * squares
    torch.testing.assert_close(outputs[0.01].total, wanted)
    assert "z_loss" not in outputs[0.0].terms


def test_no_chunk_of_logits_exceeds_the_limit(tmp_path, monkeypatch):
    sizes = []
    count = chunked.count_next_tokens

    def record(logits, targets):
        sizes.append(logits.numel() * 4 / 2**20)
        return count(logits, targets)

    monkeypatch.setattr("tasks.language.task.count_next_tokens", record)
    task, model, batch = create_task(tmp_path, "--train.logits_mib=0.002")
    task.loss(model, batch)
    with torch.no_grad():
        task.count(model, batch)
    assert max(sizes) <= 0.002 and len(sizes) > 2


@pytest.mark.parametrize("limit", [0.002, 64])
def test_only_answer_tokens_are_learnt_and_evaluated(tmp_path, limit):
    """The second half of each window of copy, whatever the chunks of places."""
    flags = ("--data.name=copy,symbols=4,answers=1", f"--train.logits_mib={limit}")
    task, model, batch = create_task(tmp_path, *flags)
    logits = model.compute_logits(model(batch.tokens[:, :-1]))[:, 4:]
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.tokens[:, 5:].long().flatten()
    )
    found = task.loss(model, batch)
    torch.testing.assert_close(found.total, wanted)
    grads = [
        torch.autograd.grad(one.total if one is found else one, list(model.parameters()))
        for one in (found, wanted)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)
    with torch.no_grad():
        metrics = task.summarise(task.count(model, batch)).metrics
    assert metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    right = (logits.argmax(dim=-1) == batch.tokens[:, 5:]).float().mean().item()
    assert metrics["accuracy"] == pytest.approx(100 * right, abs=1e-3)


def test_a_limit_below_one_token_is_refused(tmp_path):
    config = load_config(create_language_argv(tmp_path, "--train.logits_mib=0.0001"))
    with pytest.raises(
        UserError, match=r"train.logits_mib \(0.0001\) is too small for the logits of 5 tokens"
    ):
        check(config)


def test_counts_exclude_padding(tmp_path):
    task, model, batch = create_task(tmp_path)
    with torch.no_grad():
        whole = task.count(model, batch)
        blank = create_loader(task.config.data, "eval", seed=0)._reader.create_blank(5)
        padded = task.count(model, batch.append(blank))
    torch.testing.assert_close(padded, whole)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *(
            ((f"--model={name}",), f"model.name ('{name}') takes no tokens, which train.task=langu")
            for name in ("resnet18", "mlp", "mnist_cnn")
        ),
        (("--data.name=coppy",), "data.name ('coppy') is not a sequence; did you mean 'copy'?"),
        (("--data.name=copy,symbols",), "'symbols' does not describe a sequence"),
        (("--data.eval_split=val",), "data.eval_split ('val') is not a split of sequences"),
        (("--data.sequence_length=7",), "data.sequence_length (7) does not suit copy; make it a"),
        (("--model.args.kv_heads=3",), "model.args.kv_heads (3) does not divide model.args.heads"),
        (("--model.args.heads=5",), "model.args.heads (5) must cut model.args.width (32)"),
        (("--model.args.positions=none",), "model.args.positions ('none') must be one of rope"),
        (("--model.args.heads=0",), "model.args.heads (0) must be a whole number, 1 or more"),
        (("--model.args.kv_heads=0",), "model.args.kv_heads (0) must be a whole number"),
        (("--model.args.width=-8",), "model.args.width (-8) must be a whole number"),
        (("--model.args.width=32.0",), "model.args.width (32.0) must be a whole number"),
        (("--model.args.mlp_width=-3",), "model.args.mlp_width (-3) must be a whole number"),
        (("--model.args.mlp_width=0",), "model.args.mlp_width (0) must be a whole number"),
        (("--model.args.depth=0",), "model.args.depth (0) must be a whole number, 1 or more"),
        (("--model.args.depth=true",), "model.args.depth (True) must be a whole number"),
        (("--model.args.tied=maybe",), "model.args.tied ('maybe') must be true or false"),
        *(
            (
                (f"--model.args.rope_base={value}",),
                f"model.args.rope_base ({shown}) must be a number",
            )
            for value, shown in (("0", "0"), ("-5", "-5"), (".inf", "inf"), ("far", "'far'"))
        ),
        (
            ("--model.args.dept=3",),
            "model.args.dept (3) is no argument of 'transformer'; did you mean 'depth'",
        ),
        (
            ("--model=qwen3_5", "--model.args={chunks: 16}"),
            "model.args.chunks (16) is no argument of 'qwen3_5'; did you mean 'chunk'",
        ),
        (("--mixup=0.5",), "train.mixup_alpha (0.5) is not supported with train.task=language"),
    ],
)
def test_invalid_configurations_give_one_line(tmp_path, capsys, flags, words):
    assert main.main(create_language_argv(tmp_path, *flags, "--check")) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0]


def test_an_image_source_is_refused(tmp_path, capsys):
    flags = ("--data.source=synthetic", "--data.name=image_size=8", "--check")
    assert main.main(create_language_argv(tmp_path, *flags)) == 2
    assert "data.source (synthetic) has no tokens" in capsys.readouterr().err


def test_another_task_has_no_sequence_length(tmp_path, capsys):
    argv = create_language_argv(tmp_path, "--train.task=classify", "--check")
    assert main.main(argv) == 2
    assert (
        "sequence_length (8) is not supported with train.task=classify" in capsys.readouterr().err
    )


def test_the_same_weights_evaluate_to_the_same_score(tmp_path):
    """A seed gives a model, and a model in eval mode gives its numbers again."""
    task, model, batch = create_task(tmp_path)
    again = create_task(tmp_path)[1]
    assert torch.equal(task.count(model, batch), task.count(again, batch))


def test_flops_equal_those_counted_op_by_op(tmp_path):
    for flags in ((), ("--model.args.tied=false", "--model.args.kv_heads=4")):
        task, model, _ = create_task(tmp_path, *flags)
        counted = count_flops(task.config, task.facts, task)
        assert task.count_flops(model) == pytest.approx(counted["total"], rel=1e-6)


def test_mfu_is_reported_where_the_peak_is_known(monkeypatch):
    runtime = create_runtime(RuntimeSection(device="cpu"))
    meter = LoopMeter(runtime, 8, 10, "tokens", flops_per_unit=1e9)
    meter.end_step(1, 500, 0.0)
    assert "mfu" not in meter.take(1)
    monkeypatch.setattr(type(runtime), "describe", lambda self: {"hardware": "Tesla T4"})
    meter = LoopMeter(runtime, 8, 10, "tokens", flops_per_unit=1e9)
    meter.end_step(2, 500, 0.0)
    facts = meter.take(2)
    assert facts["mfu"] == pytest.approx(facts["tokens_per_s"] * 1e9 / 8.1e12)


def test_metrics_cover_all_tokens_on_any_number_of_ranks(tmp_path):
    """Against float64 over every predicted token of a text of BPE, whose tokens have many sizes."""
    write_texts(tmp_path / "files", 40)
    argv = ["text", "--from", str(tmp_path / "files"), "--out", str(tmp_path), "--name=bpe"]
    assert prepare([*argv, "--tokenizer=bpe", "--vocab-size=300"]) == 0
    flags = ("--data.source=tokens", f"--data.root={tmp_path}", "--data.name=bpe")
    task, model, _ = create_task(tmp_path, *flags)
    index, found = read_token_index(tmp_path / "bpe"), []
    for ranks in (1, 2):
        sums = torch.zeros(4)
        for rank in range(ranks):
            loader = create_loader(task.config.data, "eval", seed=0, shard=(rank, ranks))
            with torch.no_grad():
                sums += sum(task.count(model, batch) for batch in loader.batches())
        found.append(task.summarise(sums).metrics)
    tokens = loader.load_examples(range(loader.num_examples)).tokens.long()
    targets = tokens[:, 1:]
    with torch.no_grad():
        logits = model.compute_logits(model(tokens[:, :-1])).double()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    size = torch.tensor(index.token_bytes)[targets].double().mean()
    assert size > 1.2
    wanted = {
        "loss": nats.item(),
        "perplexity": nats.exp().item(),
        "examples": len(tokens),
        "accuracy": 100 * (logits.argmax(-1) == targets).double().mean().item(),
        "bits_per_byte": (nats / size / math.log(2)).item(),
    }
    for metrics in found:
        assert metrics == pytest.approx(wanted, rel=1e-5)


def test_weights_of_another_vocabulary_are_refused(tmp_path, capsys):
    task, model, _ = create_task(tmp_path)
    weights = export_model(model.state_dict(), task.facts.export, tmp_path)
    flags = (f"--model.weights={weights}", "--check")
    assert main.main(create_language_argv(tmp_path, *flags)) == 0
    capsys.readouterr()
    other = "--data.name=copy,symbols=6,num_examples=640,num_held_out=100"
    assert main.main(create_language_argv(tmp_path, *flags, other)) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "is of another model" in error[0]
    assert "embedding.weight" in error[0]


def test_a_constant_model_predicts_at_most_one_token(tmp_path):
    """Equal logits name the first token of all, which stands at few places."""
    task, model, batch = create_task(tmp_path)
    with torch.no_grad():
        model.head_weight.zero_()
        accuracy = task.summarise(task.count(model, batch)).metrics["accuracy"]
    share = (batch.tokens[:, 1:] == 0).float().mean().item()
    assert accuracy == pytest.approx(100 * share) and 0 < accuracy < 50


@pytest.mark.parametrize("kind", ["sequences", "tokens"])
def test_evaluation_on_training_windows_warns(tmp_path, capsys, kind):
    flags = ()
    if kind == "tokens":
        write_tokens(tmp_path, "bytes")
        flags = ("--data.source=tokens", f"--data.root={tmp_path}", "--data.name=bytes")
    for split, warns in (("train", True), ("validation", False)):
        argv = create_language_argv(tmp_path, *flags, f"--data.eval_split={split}", "--check")
        assert main.main(argv) == 0
        told = capsys.readouterr()
        assert ("its score measures memorisation" in told.out + told.err) == warns
