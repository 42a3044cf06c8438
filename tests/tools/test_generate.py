"""The sampler: its cache, its distributions, its output for a trained model, its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import main
from big_vision.input.text.sequences import SEQUENCES, draw_uniform, parse_sequence_name
from models.delta.kernels.operators import choose_kernels
from models.delta.layers.qwen import create_qwen3
from models.transformer import Transformer
from tests.models.delta.test_qwen import create as create_hybrid
from tests.models.delta.test_rwkv import create as create_rwkv
from tests.support.language import LEARNING, create_language_argv, write_texts
from tools.export.__main__ import main as export
from tools.export.language import write_folder
from tools.generate import compute_probs, generate, load_model, take_likeliest
from tools.generate import main as run_tool
from tools.prepare_dataset.__main__ import main as prepare
from utils.config.execution import RuntimeSection
from utils.runtime.launcher import create_runtime

SHAPES = ({}, {"kv_heads": 2}, {"positions": "learned"}, {"positions": "sinusoidal", "tied": False})


def create_model(**shape) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(11, 24, depth=2, width=32, heads=4, **shape).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)  # no longer nearly uniform
    return model


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_cached_logits_equal_those_without_a_cache(shape):
    model, tokens = create_model(**shape), torch.randint(0, 11, (2, 20))
    whole = model.compute_logits(model(tokens))
    cache = model.create_cache()
    sizes = [7, 1, 1, 4, 1, 6]
    parts = [model.compute_logits(model(part, cache)) for part in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert cache[0].length == 20


def test_greedy_generation_takes_the_likeliest_next_token():
    model, prompt = create_model(kv_heads=2), [3, 1, 4]
    found = generate(model, prompt, 9, lambda logits: int(logits.argmax()))
    for _ in found:
        with torch.no_grad():
            logits = model.compute_logits(model(torch.tensor([prompt]))[:, -1])
        prompt = [*prompt, int(logits.argmax())]
    assert prompt[3:] == found and len(found) == 9


def test_a_cache_of_fixed_size_gives_the_same_tokens():
    """On the CPU's runtime; of drawn tokens the host has the logits."""
    runtime, prompt = create_runtime(RuntimeSection(device="cpu")), [3, 1, 4, 1]
    for shape in SHAPES:
        model = create_model(**shape)
        wanted = generate(model, prompt, 9, take_likeliest)
        assert generate(model, prompt, 9, take_likeliest, runtime=runtime) == wanted

        def second(logits):
            return int(logits.topk(2).indices[1])

        wanted = generate(model, prompt, 9, second)
        assert generate(model, prompt, 9, second, runtime=runtime) == wanted
        stopped = generate(model, prompt, 9, second, end=wanted[3], runtime=runtime)
        assert stopped == wanted[: wanted.index(wanted[3])]


@pytest.mark.xla
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3_5", "xla"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("qwen3_5", "pallas"),
                ("kimi_linear", "xla"),
                ("qwen3_next", "xla"),
                ("rwkv7", "xla"),
                ("rwkv7", "pallas"),
            )
        ),
    ],
)
def test_a_device_runs_one_program_for_all_tokens_and_matches_the_cpu(name, kernels):
    pytest.importorskip("torch_xla")
    model = create_rwkv() if name == "rwkv7" else create_hybrid(name)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)  # no longer one token for all
    prompt, count = [3, 1, 4, 1], 7
    wanted = generate(model, prompt, count, take_likeliest)
    assert len(set(wanted)) > 2
    runtime = create_runtime(RuntimeSection(device="xla"))
    runtime.prepare(model)
    if kernels == "pallas":
        pytest.importorskip("jax", reason="needs jax: setup --tpu-compiler")
        choose_kernels(kernels, runtime.device, model)
    before = runtime.counters()
    assert generate(model, prompt, count, take_likeliest, runtime=runtime) == wanted
    after = runtime.counters()
    gained = {key: after[key] - before[key] for key in after}
    # The prompt's and the step's; of each token one number.
    assert gained == {"graphs": 2, "host_reads": count, "host_ops": 0}


def test_nothing_follows_an_end_token():
    model = create_model()
    answers = iter([5, 7, 10, 3])
    assert generate(model, [1], 4, lambda _: next(answers), end=10) == [5, 7]


def test_sampling_obeys_top_k_top_p_and_temperature():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    close = torch.testing.assert_close
    close(compute_probs(logits, 1.0, 0, 1.0), logits.double().exp())
    close(compute_probs(logits, 1.0, 2, 1.0), torch.tensor([0, 4, 0, 3]).double() / 7)
    close(compute_probs(logits, 1.0, 0, 0.6), torch.tensor([0, 4, 0, 3]).double() / 7)
    close(compute_probs(logits, 1.0, 0, 0.75), torch.tensor([0, 4, 2, 3]).double() / 9)
    squares = torch.tensor([1, 16, 4, 9]).double()
    close(compute_probs(logits, 0.5, 0, 1.0), squares / squares.sum())


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e300])
def test_any_temperature_gives_probabilities(temperature):
    logits = torch.tensor([3.0, -80.0, 3.5, 0.0])
    law = compute_probs(logits, temperature, 10**30, 1.0)
    wanted = [0.25] * 4 if temperature > 1 else [0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(law, torch.tensor(wanted).double())


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    """A run that has learnt to copy, with learned positions."""
    folder = tmp_path_factory.mktemp("copy")
    flags = (
        "--train.steps=260",
        *LEARNING,
        "--model.args.width=64",
        "--data.name=copy,symbols=4,num_examples=4000,num_held_out=100",
        "--train.log_every_steps=100",
        "--train.eval_every_epochs=9",
        "--train.checkpoint_every_epochs=9",
    )
    assert main.main(create_language_argv(folder, *flags)) == 0
    return folder / "lang" / "a"


def test_a_model_that_has_learnt_to_copy_copies(copied, capsys):
    shape = parse_sequence_name("copy,symbols=4")
    windows = SEQUENCES["copy"].make(draw_uniform(3, torch.arange(5).numpy(), 9), shape)
    for window in windows.tolist():
        prompt = " ".join(map(str, window[:5]))
        argv = [str(copied), "--prompt", prompt, "--max-tokens=4", "--temperature=0"]
        assert run_tool(argv) == 0
        assert capsys.readouterr().out.split() == list(map(str, window))


def test_a_seed_draws_the_same_text_again(copied, capsys):
    told = []
    for seed in (0, 0, 1):
        argv = [str(copied), "--prompt=1", "--max-tokens=8", "--top-k=3", f"--seed={seed}"]
        assert run_tool(argv) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt=9 9"], "must be numbers of tokens from 0 to 4"),
        (["--prompt=ab"], "this model has learnt synthetic sequences"),
        (["--prompt=1", "--max-tokens=30"], "the model has 8 learned positions"),
        (["--prompt=1", "--temperature=-1"], "--temperature (-1) must be 0 or more"),
        (["--prompt=1", "--temperature=inf"], "--temperature (inf) must be 0 or more, and no inf"),
        (["--prompt=1", "--temperature=nan"], "--temperature (nan) must be 0 or more"),
        (["--prompt=1", f"--seed={'9' * 23}"], f"--seed ({'9' * 23}) must be from 0 to 9223372"),
        (["--prompt=1", "--seed=-1"], "--seed (-1) must be from 0 to"),
        (["--prompt=1", f"--top-k=-{'9' * 400}"], "must be 0 or more; change it"),
        (
            ["--prompt=1", "--temperature=0", "--top-k=3"],
            "--top-k (3) is not supported with --temp",
        ),
        (
            ["--prompt=1", "--temperature=0", "--top-p=0.5"],
            "--top-p (0.5) is not supported with --t",
        ),
        (["--prompt=\udcff\udcfe"], "--prompt ('\\udcff\\udcfe') is no UTF-8 at position 0"),
        (
            ["--prompt=1", "--data=/nowhere"],
            "--data (/nowhere) is not supported with a model of synth",
        ),
        (["--prompt=1", "--top-p=0"], "--top-p (0) must be above 0 and at most 1"),
        (["--prompt=1", "--max-tokens=0"], "--max-tokens (0) must be 1 or more"),
    ],
)
def test_impossible_requests_give_one_line(copied, capsys, flags, words):
    assert run_tool([str(copied), *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and words in error[0]


def test_text_is_continued_with_the_tokenizer_of_the_data(tmp_path, capsys):
    write_texts(tmp_path / "files", 12)
    for kind, flags in (("byte", []), ("bpe", ["--vocab-size=280"])):
        argv = ["text", "--from", str(tmp_path / "files"), "--out", str(tmp_path)]
        assert prepare([*argv, f"--tokenizer={kind}", *flags]) == 0
        own = (
            "--data.source=tokens",
            f"--data.root={tmp_path}",
            f"--data.name=text_{kind}",
            "--train.steps=5",
            f"--run.run_id={kind}",
        )
        assert main.main(create_language_argv(tmp_path, *own)) == 0
        capsys.readouterr()
        assert run_tool([str(tmp_path / "lang" / kind), "--prompt=wörd", "--max-tokens=5"]) == 0
        assert capsys.readouterr().out.startswith("wörd")
        # By URL, and from a place within the run, its data are found as well.
        for run in (
            f"file://{tmp_path}/lang/{kind}",
            tmp_path / "lang" / kind / "student.safetensors",
        ):
            assert run_tool([str(run), "--prompt=wörd", "--max-tokens=5"]) == 0
            assert capsys.readouterr().out.startswith("wörd")
    argv = [str(tmp_path / "lang" / "byte"), "--data=/nowhere"]
    assert run_tool(argv) == 2
    assert "--data: /nowhere holds no tokens.json" in capsys.readouterr().err
    argv = [str(tmp_path / "lang" / "bpe"), f"--data={tmp_path / 'text_byte'}"]
    assert run_tool(argv) == 2
    assert "has the tokenizer 'byte '" in capsys.readouterr().err


def test_an_image_model_is_refused(capsys):
    argv = ["tests/fixtures/old_runs/plain", "--prompt=1"]
    assert run_tool(argv) == 2
    assert "holds no language model" in capsys.readouterr().err


@pytest.fixture
def shared(tmp_path) -> Path:
    """A small Qwen3 as transformers saves it, without a tokenizer."""
    torch.manual_seed(0)
    sizes = {"depth": 1, "width": 16, "heads": 2, "kv_heads": 1, "head_width": 8, "mlp_width": 24}
    facts = {"model": "qwen3", "vocab_size": 53, "sequence_length": 32}
    (tmp_path / "qwen").mkdir()
    write_folder(create_qwen3(53, 32, **sizes), facts, tmp_path / "qwen")
    return tmp_path / "qwen"


def write_tokenizer(folder: Path) -> Tokenizer:
    words = ["<|endoftext|>", "<|im_start|>", *(f"word{number}" for number in range(51))]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="word0")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_folder_of_transformers_uses_its_own_tokenizer(shared, capsys):
    flags = ["--temperature=0", "--max-tokens=4"]
    assert run_tool([str(shared), "--prompt=2 7", *flags]) == 0  # numbers, for it has none
    numbers = capsys.readouterr().out.split()
    assert run_tool([f"local-dir:{shared}", "--prompt=2 7", *flags]) == 0
    assert capsys.readouterr().out.split() == numbers
    tokenizer = write_tokenizer(shared)
    assert run_tool([str(shared), "--prompt=word0 word5", *flags]) == 0
    wanted = tokenizer.decode([int(one) for one in numbers], skip_special_tokens=False)
    assert capsys.readouterr().out.strip() == wanted
    assert run_tool([str(shared), "--prompt=<|im_start|> word5", *flags]) == 0
    assert capsys.readouterr().out.startswith("<|im_start|> word5")


def test_an_unreadable_tokenizer_leaves_token_numbers(shared, capsys, caplog):
    assert run_tool([str(shared), "--prompt=two words"]) == 2
    assert "or has no tokenizer.json" in capsys.readouterr().err
    (shared / "tokenizer.json").write_text("{}")
    assert run_tool([str(shared), "--prompt=2 7", "--max-tokens=2"]) == 0
    assert "tokenizer.json cannot be read" in caplog.text
    assert len(capsys.readouterr().out.split()) == 4


def test_image_programs_name_the_program_for_language_models(shared, tmp_path, capsys):
    argv = [str(shared), "--to", "onnx", "--out", str(tmp_path / "out")]
    assert export(argv) == 2
    told = capsys.readouterr().err
    assert "holds a language model; give one that classifies images" in told
    assert "tools.export --to transformers" in told


def test_a_language_model_with_nan_outputs_is_not_exported(shared, tmp_path, capsys):
    model, facts = load_model(str(shared))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(3e38)  # finite, and no sum of it is
    write_folder(model, facts, shared)
    assert export([str(shared), "--to", "transformers", "--out", str(tmp_path / "out")]) == 2
    assert "gives logits that are not finite" in capsys.readouterr().err
