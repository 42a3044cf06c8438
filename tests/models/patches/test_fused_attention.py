"""Attention by kernels: interpreted on XLA it is attention, as near to float32 as without them."""

from __future__ import annotations

import copy
import importlib.util
import json

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from job.check import check
from models.patches import fused_attention
from models.patches.fused_attention import (
    KernelAttention,
    choose_attention_kernel,
    is_dear,
    require_attention_kernel,
)
from models.patches.kernels_attention import choose_group
from models.patches.table import apply_patches
from tests.models.patches.test_patches import TINY, get_distance
from tests.support.tiny_parts import VIT_ARGS, create_config
from tests.test_parity import FORMS, Form, compare, run_form
from utils.errors import UserError

HAS_BOTH = all(importlib.util.find_spec(name) for name in ("jax", "torch_xla"))
needs_jax = pytest.mark.skipif(not HAS_BOTH, reason="needs jax and torch_xla: setup --tpu-compiler")


def create_layer(width: int, *, heads: int = 2, **arguments: object) -> nn.Module:
    """timm's attention with weights that make its softmax uneven."""
    torch.manual_seed(0)
    layer = Attention(heads * width, heads, qkv_bias=True, **arguments)
    with torch.no_grad():
        layer.qkv.weight.mul_(4.0)
    return nn.Sequential(layer)


def find_all(
    layer: nn.Module, x: Tensor, form: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the gradient of the input, and those of the parameters as one vector.

    Args:
      form: plain (timm's own in float64), off or on; `on again`: computed again in the backward.
    """
    import torch_xla
    from torch_xla.utils.checkpoint import checkpoint

    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    device = "cpu" if form == "plain" else torch_xla.device()
    layer = copy.deepcopy(layer)
    if form == "plain":
        layer[0].fused_attn = False
        layer, x, weights = layer.double(), x.double(), weights.double()
    else:
        layer = apply_patches(layer).to(device)
        layer[0].kernel = form.split(maxsplit=1)[0]
    leaf = x.to(device).requires_grad_()
    is_low = dtype == torch.bfloat16 and form != "plain"
    with torch.autocast("xla", dtype=torch.bfloat16, enabled=is_low):
        output = checkpoint(layer, leaf, use_reentrant=True) if "again" in form else layer(leaf)
    (output * weights.to(device)).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in layer.parameters()])
    return output.detach().cpu(), leaf.grad.cpu(), gradients.cpu()


def hold_to_float64(width: int, tokens: int, dtype: torch.dtype, **arguments: object) -> None:
    """float32: within 1e-5. bfloat16: no further off than the patch without kernels."""
    layer = create_layer(width, **arguments)
    x = torch.randn((2, tokens, 2 * width), generator=torch.Generator().manual_seed(2))
    wanted = find_all(layer, x, "plain", dtype)
    usual, own, again = (find_all(layer, x, form, dtype) for form in ("off", "on", "on again"))
    assert all(torch.equal(one, other) for one, other in zip(own, again, strict=True))
    for found, before, true in zip(own, usual, wanted, strict=True):
        limit = 1e-5 if dtype == torch.float32 else 1.02 * get_distance(before, true)
        assert get_distance(found, true) < limit


@needs_jax
@pytest.mark.xla
def test_a_kernel_is_as_close_to_float32_as_the_patch_without_it():
    hold_to_float64(16, 21, torch.bfloat16)


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "tokens"), [(64, 197), (80, 257), (64, 577)])
def test_a_kernel_takes_the_shapes_of_vision_transformers(width, tokens, dtype):
    """With normalised queries and keys; 577 tokens are more than the queries of a block."""
    hold_to_float64(width, tokens, dtype, qk_norm=True, norm_layer=nn.LayerNorm)


def test_heads_of_a_program_divide_those_of_the_model():
    assert [choose_group(*sizes) for sizes in ((6, 64, 197), (12, 64, 197), (16, 80, 257))] == [
        6,
        6,
        4,
    ]
    assert choose_group(5, 80, 785) == 1


def test_auto_uses_kernels_if_scores_leave_the_chip(monkeypatch):
    """Of ViT-S/16: at 128 images a chip, not at 64; with and without a mesh."""
    for chips in (1, 8):
        monkeypatch.setattr(fused_attention, "count_chips", lambda chips=chips: chips)
        assert is_dear(128 * chips, 6, 197)
        assert not is_dear(64 * chips, 6, 197)


def test_auto_keeps_plain_attention_where_a_kernel_cannot_run(monkeypatch):
    """Few scores, a mask, examples that the mesh does not divide: none of them is an error."""
    layer = apply_patches(create_layer(8))[0]
    x, mask = torch.randn(3, 5, 16), torch.zeros(5, 5)
    wanted = layer(x)
    for choice, chips, given in (("auto", 1, None), ("auto", 1, mask), ("on", 2, None)):
        monkeypatch.setattr(fused_attention, "count_chips", lambda chips=chips: chips)
        layer.kernel = choice
        assert torch.equal(layer(x, attn_mask=given), wanted)
    with pytest.raises(UserError, match=r"model\.attention_kernel \(on\) has no masks"):
        layer(x, attn_mask=mask)


def test_models_without_a_kernel_are_refused_by_name(monkeypatch):
    plain = timm.create_model("vit_tiny_patch16_224", **TINY)
    vit = apply_patches(copy.deepcopy(plain))
    with pytest.raises(UserError, match=r"needs runtime\.device=xla, and this is cuda"):
        require_attention_kernel(torch.device("cuda"), vit)
    choose_attention_kernel("auto", torch.device("cpu"), vit)
    choose_attention_kernel("on", torch.device("cpu"), vit)
    assert {m.kernel for m in vit.modules() if isinstance(m, KernelAttention)} == {"off"}
    monkeypatch.setattr(fused_attention, "takes_kernels", lambda device: True)
    monkeypatch.setattr(fused_attention.importlib.util, "find_spec", lambda name: True)
    beit = apply_patches(timm.create_model("beit_base_patch16_224", **TINY))
    drops = apply_patches(timm.create_model("vit_tiny_patch16_224", **TINY, attn_drop_rate=0.1))
    for model, reason in (
        (beit, "BEiT's relative positions"),
        (drops, "attn_drop_rate"),
        (nn.Linear(2, 2), "this model has none"),
    ):
        with pytest.raises(UserError, match=reason):
            require_attention_kernel(torch.device("cpu"), model)
    for model in (plain, vit):
        require_attention_kernel(torch.device("cpu"), model)
    choose_attention_kernel("on", torch.device("cpu"), vit)
    assert {m.kernel for m in vit.modules() if isinstance(m, KernelAttention)} == {"on"}


@pytest.mark.parametrize(
    ("device", "flags", "words"),
    [
        ("cpu", (), r"needs runtime\.device=xla, and this is cpu"),
        (
            "xla",
            ("--model.skip_patches=[gelu, attention_kernel]",),
            r"and model\.skip_patches \(\[gelu, attention_kernel\]\) leaves them out",
        ),
        ("xla", ("--model.skip_patches=[attention]",), r"skip_patches \(\[attention\]\) leaves"),
        (
            "xla",
            ("--model.xla_patches=false",),
            r"and model\.xla_patches \(False\) leaves them out",
        ),
        ("xla", ("--runtime.compile=true",), r"and runtime\.compile \(True\) leaves them out"),
        ("xla", ('--model.args={"attn_drop_rate": 0.1}',), r"model\.args has attn_drop_rate"),
    ],
)
def test_the_check_names_the_key_that_excludes_a_kernel(
    device, flags, words, tmp_path, monkeypatch
):
    """Before a run directory is announced, and by the key that is at fault."""
    monkeypatch.setattr(fused_attention.importlib.util, "find_spec", lambda name: True)
    config = create_config(tmp_path, "--model.attention_kernel=on", *flags, device=device)
    with pytest.raises(UserError, match=rf"model\.attention_kernel \(on\) .*{words}"):
        check(config, device)


def test_the_check_accepts_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_attention.importlib.util, "find_spec", lambda name: True)
    check(create_config(tmp_path, "--model.attention_kernel=on", device="xla"), "xla")


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
def test_a_run_with_kernels_trains_alike_on_a_mesh(tmp_path):
    """Each device its own examples, in one graph, with and without remat."""
    two = f"--model.args={json.dumps({**VIT_ARGS, 'depth': 2})}"
    wanted = run_form(tmp_path / "cpu", Form("cpu"), (two,))
    for name, flags in (("plain", ()), ("again", ("--train.remat=true",))):
        flags = (two, "--model.attention_kernel=on", *flags)
        found = run_form(tmp_path / name, FORMS["mesh 4"], flags)
        compare(found, wanted)
        assert found[-1]["graphs_train"] == 1


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
def test_the_loop_over_layers_takes_kernels():
    """`train.scan_layers` traces one block with tensors that hold nothing."""
    import torch_xla
    from torch_xla.experimental.scan_layers import scan_layers

    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(32, 2, qkv_bias=True) for _ in range(2)])
    x, results = torch.randn(4, 21, 32), []
    for kernel in ("off", "on"):
        own = apply_patches(copy.deepcopy(blocks)).to(torch_xla.device())
        for block in own:
            block.attn.kernel = kernel
        leaf = x.to(torch_xla.device()).requires_grad_()
        is_loop = kernel == "on"
        output = scan_layers(list(own), leaf, is_layer_pure=True) if is_loop else own(leaf)
        output.square().sum().backward()
        torch_xla.sync()
        results.append([output.detach(), leaf.grad, *(p.grad for p in own.parameters())])
    for one, other in zip(*results, strict=True):
        assert get_distance(one.cpu(), other.cpu()) < 1e-5
