"""Qwen3, Qwen3.5, Kimi Linear: transformers' numbers, cached as uncached, trained through main."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

import main
from models.delta.layers.gated import ShortConvolution
from models.delta.layers.kimi import create_kimi
from models.delta.layers.qwen import Qwen, create_hybrid, create_qwen3
from models.delta.layers.qwen_next import create_hybrid_of_experts, create_next
from models.factory import create_model
from models.remat import scan_blocks
from models.transformer import attend_step
from store.record.history import read_metrics
from tests.support.language import LANGUAGE, create_language_argv
from tools.generate import generate, load_model
from utils.config.sections import ModelSection
from utils.errors import UserError

VOCAB = 61
DENSE = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 16, "mlp_width": 48}
HYBRID = {
    **DENSE,
    "depth": 4,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_width": 8,
    "linear_value_width": 12,
    "chunk": 8,
}
KIMI = {
    "depth": 4,
    "width": 32,
    "heads": 4,
    "head_width": 12,
    "mlp_width": 48,
    "shared_width": 6,
    "value_width": 10,
    "latent_width": 20,
    "linear_heads": 2,
    "linear_width": 8,
    "chunk": 8,
}
# Room for all: what transformers drops is nothing.
EXPERTS = {
    **{key: value for key, value in HYBRID.items() if key != "mlp_width"},
    "experts": 8,
    "experts_per_token": 2,
    "expert_width": 12,
    "shared_width": 20,
    "capacity_factor": 4.0,
}
KINDS = {
    "qwen3": (create_qwen3, DENSE),
    "qwen3_5": (create_hybrid, HYBRID),
    "kimi_linear": (create_kimi, KIMI),
    "qwen3_next": (create_next, EXPERTS),
    "qwen3_5_moe": (create_hybrid_of_experts, EXPERTS),
}
SLOW = ("kimi_linear", "qwen3_next", "qwen3_5_moe")
CLOSE = {"rtol": 0, "atol": 1e-5}


def create(name: str, **changes) -> Qwen:
    factory, shape = KINDS[name]
    torch.manual_seed(3)
    model = factory(VOCAB, 16, **{**shape, **changes}).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Gates that forget little: of strong ones transformers' own gradient is roundings.
            parameter += 0.05 * torch.randn_like(parameter) - 3.0 * key.endswith("A_log")
    return model


def draw_tokens(count: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, count), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", KINDS)
def test_cached_hidden_states_equal_those_without_a_cache(name):
    """A prompt in two parts, the second with a state before it, then single tokens."""
    model, tokens = create(name), draw_tokens(30)
    with torch.no_grad():
        wanted, cache = model(tokens), model.create_cache()
        parts = [tokens[:, :11], tokens[:, 11:28], tokens[:, 28:29], tokens[:, 29:]]
        found = torch.cat([model(part, cache) for part in parts], dim=1)
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_decoding_step_of_attention_equals_that_with_repeated_keys():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, *one, 12, generator=draw).double() for one in ((6, 1), (3, 9), (3, 9))
    )
    mask = torch.arange(9)[None] <= 4
    known = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, *known, attn_mask=mask)
    torch.testing.assert_close(attend_step(q, k, v, mask), wanted)


def test_three_of_four_layers_cache_a_state_of_fixed_size():
    model = create("qwen3_5")
    cache = model.create_cache()
    assert [type(one).__name__ for one in cache] == ["DeltaCache"] * 3 + ["LayerCache"]
    for count in (5, 9):
        model(draw_tokens(count), cache)
        assert cache[0].state.shape == (2, 4, 8, 12)
        assert cache[0].tail.shape == (2, 3, 2 * 16 + 48)
    assert cache[3].length == 14


def test_models_take_the_precision_of_products():
    """`model.args.products`: of rules alone, so that logits differ by what it rounds."""
    tokens = draw_tokens(20)
    for name in ("qwen3_5", "kimi_linear"):
        with torch.no_grad():
            wanted = create(name)(tokens)
            found = {x: create(name, products=x)(tokens) for x in ("bfloat16", "bfloat16x3")}
        rough, fine = ((x - wanted).abs().max() / wanted.abs().max() for x in found.values())
        assert 1e-4 < rough < 0.1 and 0 < fine < 1e-2 * rough
    with pytest.raises(UserError, match=r"^model\.args\.products \('fp8'\) is unknown; use one of"):
        create("qwen3_5", products="fp8")


def test_no_token_depends_on_later_ones():
    model, tokens = create("qwen3_5"), draw_tokens(20)
    other = tokens.clone()
    other[:, 13:] = (other[:, 13:] + 1) % VOCAB
    first, second = model(tokens), model(other)
    assert torch.equal(first[:, :13], second[:, :13])
    assert not torch.equal(first[:, 13], second[:, 13])


def test_layers_that_differ_are_scanned_as_equal_groups():
    """What is compiled once is a group; weights keep their names, a cache goes layer by layer."""
    model, tokens = create("qwen3_5", depth=8), draw_tokens(9)
    wanted, names = model(tokens), list(model.state_dict())
    chains = []
    assert (
        scan_blocks(model, lambda blocks, x: chains.append(blocks) or run_in_turn(blocks, x)) == 2
    )
    assert torch.equal(model(tokens), wanted)
    assert [len(one) for one in chains[0]] == [4, 4]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(tokens, model.create_cache()), wanted, **CLOSE)
    with pytest.raises(UserError, match=r"train\.scan_layers needs a chain of equal blocks"):
        scan_blocks(create("qwen3_5", depth=6), run_in_turn)


def run_in_turn(blocks, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def test_a_short_convolution_equals_torchs():
    short = ShortConvolution(6, 4)
    x = torch.randn(2, 9, 6)
    conv = torch.nn.functional.conv1d(x.mT, short.weight, padding=3, groups=6)[..., :9]
    torch.testing.assert_close(short(x)[0], conv.mT)
    start, tail = short(x[:, :2])
    rest, _ = short(x[:, 2:], tail)
    torch.testing.assert_close(torch.cat([start, rest], dim=1), conv.mT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "model.args.depth (0) must be a whole number, 1 or more"),
        ({"tied": 1}, "model.args.tied (1) must be true or false"),
        ({"kv_heads": 3}, "model.args.kv_heads (3) does not divide model.args.heads (4)"),
        ({"head_width": 12}, "model.args.head_width (12) leaves 3 channels to rotate"),
        ({"linear_key_heads": 3}, "model.args.linear_key_heads (3) does not divide"),
        ({"chunk": 24}, "model.args.chunk (24) must be a power of two from 2 to 256"),
        ({"solver": "lu"}, "model.args.solver ('lu') is unknown; use one of auto, triang"),
        ({"rope_base": 0.5}, "model.args.rope_base (0.5) must be a number above 1"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError) as caught:
        create("qwen3_5", **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("key", ["kv_heads", "rope_base"])
def test_latent_attention_has_no_heads_of_keys_and_no_positions(key):
    with pytest.raises(UserError, match=rf"model.args.{key} \(2\) is not supported by kimi"):
        create("kimi_linear", **{key: 2})


def create_argv(folder, name, *flags, device="cpu"):
    own = (f"--model={name}", f"--model.args={json.dumps(KINDS[name][1])}")
    argv = create_language_argv(folder, *own, "--data.sequence_length=20", *flags, device=device)
    # The sizes of the other model there, which Kimi Linear has not all of.
    return [one for one in argv if one not in LANGUAGE or "--model.args" not in one]


def read_losses(folder, run="a"):
    return [one["loss/task"] for one in read_metrics(folder / "lang" / run) if "loss/task" in one]


def check_going_on(create, name, tmp_path):
    """From its checkpoint, with recomputed blocks, to the bits of a whole run; and it generates."""
    flags = ("--train.steps=16", "--train.checkpoint_every_steps=8", "--train.keep_checkpoints=9")
    assert main.main(create(tmp_path, name, *flags)) == 0
    wanted, folder = read_losses(tmp_path), tmp_path / "lang" / "a"
    assert wanted[-1] < wanted[0] - 0.05
    again = (f"--run.resume={folder}/checkpoints/step_00000008", "--train.remat=true")
    assert main.main(create(tmp_path, name, *flags, *again)) == 0
    assert read_losses(tmp_path) == wanted
    model, _ = load_model(str(folder))
    assert len(generate(model, [1, 2, 3], 5, lambda logits: int(logits.argmax()))) == 5


@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_a_hybrid_trains_through_main_and_resumes(name, tmp_path):
    check_going_on(create_argv, name, tmp_path)


@pytest.mark.slow
@pytest.mark.xla
def test_a_hybrid_trains_on_xla_as_on_native_pytorch_with_remat_and_a_loop(tmp_path):
    """One graph of training, none of it on the host."""
    pytest.importorskip("torch_xla")
    steps = ("--train.steps=6", "--runtime.graph_budget=6")
    assert main.main(create_argv(tmp_path / "cpu", "qwen3_5", *steps)) == 0
    wanted = read_losses(tmp_path / "cpu")
    for name, flags in (("plain", ()), ("remat", ("--train.remat=true",))):
        argv = create_argv(tmp_path / name, "qwen3_5", *steps, *flags, device="xla")
        assert main.main(argv) == 0
        assert read_losses(tmp_path / name) == pytest.approx(wanted, rel=1e-4)
    pairs = (*steps, "--model.args.full_every=2")
    assert main.main(create_argv(tmp_path / "pairs", "qwen3_5", *pairs)) == 0
    scan = (*pairs, "--train.scan_layers=true")
    assert main.main(create_argv(tmp_path / "groups", "qwen3_5", *scan, device="xla")) == 0
    wanted = read_losses(tmp_path / "pairs")
    assert read_losses(tmp_path / "groups") == pytest.approx(wanted, rel=1e-4)
    dense = create_argv(tmp_path / "dense", "qwen3", *steps)
    assert main.main(dense) == 0
    scan = create_argv(tmp_path / "scan", "qwen3", *steps, "--train.scan_layers=true", device="xla")
    assert main.main(scan) == 0
    wanted = read_losses(tmp_path / "dense")
    assert read_losses(tmp_path / "scan") == pytest.approx(wanted, rel=1e-4)


def create_transformers_model(name: str, model: Qwen):
    """The same model of transformers, with the same weights under the same names."""
    hub = pytest.importorskip("transformers")
    config_class, model_class = CLASSES_OF_HUB[name]
    sizes = _list_hub_sizes(name, asdict(model.shape))
    hub_model = getattr(hub, model_class)(getattr(hub, config_class)(**sizes))
    weights = model.state_dict()
    if model.shape.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    hub_model.load_state_dict(weights, strict=True)
    return hub_model.eval()


CLASSES_OF_HUB = {
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}


def _list_hub_sizes(name: str, shape: dict) -> dict:
    """The keyword arguments of transformers' configuration."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": shape["width"],
        "num_hidden_layers": shape["depth"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_width"],
        "intermediate_size": shape["mlp_width"],
        "tie_word_embeddings": shape["tied"],
        "attn_implementation": "eager",
    }
    if name == "kimi_linear":
        del sizes["head_dim"]
        return sizes | {
            "num_key_value_heads": shape["heads"],
            "kv_lora_rank": shape["latent_width"],
            "qk_nope_head_dim": shape["head_width"],
            "qk_rope_head_dim": shape["shared_width"],
            "v_head_dim": shape["value_width"],
            "linear_head_dim": shape["linear_width"],
            "linear_num_heads": shape["linear_heads"],
            "mlp_layer_types": ["dense"] * 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "pad_token_id": None,
        }
    rope = {"rope_type": "default", "rope_theta": shape["rope_base"]}
    if name == "qwen3":
        return sizes | {"rope_parameters": rope}
    sizes |= {
        "linear_num_key_heads": shape["linear_key_heads"],
        "linear_num_value_heads": shape["linear_value_heads"],
        "linear_key_head_dim": shape["linear_key_width"],
        "linear_value_head_dim": shape["linear_value_width"],
        "rope_parameters": rope | {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]},
    }
    if name == "qwen3_5":
        return sizes
    return sizes | {
        "num_experts": shape["experts"],
        "moe_intermediate_size": shape["expert_width"],
        "num_experts_per_tok": shape["experts_per_token"],
        "shared_expert_intermediate_size": shape["shared_width"],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *((one, tied) for one in ("qwen3", "qwen3_5") for tied in (True, False)),
        ("kimi_linear", False),
        ("qwen3_next", False),
        ("qwen3_5_moe", False),
    ],
)
def test_logits_and_gradients_equal_transformers(name, tied):
    model, tokens = create(name, tied=tied), draw_tokens(21)
    twin = create_transformers_model(name, model)
    wanted, found = twin(tokens).logits, model.compute_logits(model(tokens))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    for logits in (wanted, found):
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
    theirs = dict(twin.named_parameters())
    for key, parameter in model.named_parameters():
        scale = float(theirs[key].grad.abs().max())
        torch.testing.assert_close(parameter.grad, theirs[key].grad, rtol=0, atol=2e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_weights_saved_by_transformers_load_into_a_run(name, tmp_path):
    """`model.weights` takes the file of a folder as the Hub has it, under the names in it."""
    model, tokens = create(name), draw_tokens(9)
    create_transformers_model(name, model).save_pretrained(tmp_path)
    section = ModelSection(
        name=name, args=KINDS[name][1], weights=str(tmp_path / "model.safetensors")
    )
    found = create_model(section, vocab_size=VOCAB, sequence_length=16).eval()
    assert torch.equal(found(tokens), model(tokens))


@pytest.mark.slow
def test_a_hybrid_learns_from_full_attention_by_logits_and_hidden_states(tmp_path):
    """The conversion of one into the other: what the student's layers give, and its logits."""
    steps = ("--train.steps=60", "--run.run_id=teacher")
    assert main.main(create_argv(tmp_path, "qwen3", *steps)) == 0
    terms = [{"name": "kd"}, {"name": "fitnet", "layers": {"model.layers.3": "model.layers.1"}}]
    flags = (
        "--train.steps=40",
        f"--teacher_path={tmp_path / 'lang' / 'teacher'}",
        f"--distill.losses={json.dumps(terms)}",
        "--distill.alpha=0.9",
    )
    assert main.main(create_argv(tmp_path, "qwen3_5", *flags)) == 0
    lines = [one for one in read_metrics(tmp_path / "lang" / "a") if "loss/kd" in one]
    for name in ("loss/kd", "loss/fitnet"):
        assert lines[-1][name] < 0.7 * lines[0][name]
