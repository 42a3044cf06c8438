"""Patches for XLA: the same names, shapes and numbers as timm, in every use that training makes."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.features import FeatureTap
from models.patches.attention import XlaPatchEmbed
from models.patches.convolution import TO_HWIO, TO_OIHW, HwioWeight, XlaBatchNorm2d
from models.patches.dense import XlaGelu, XlaLayerNorm, XlaLinear
from models.patches.families import XlaEvaAttention, XlaMaxVitAttention, XlaWindowAttention
from models.patches.fused_attention import KernelAttention
from models.patches.table import PATCHES, apply_patches
from utils.blocks import find_blocks
from utils.errors import UserError

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", TINY),
    "vit_scaled": ("vit_tiny_patch16_224", {**TINY, "init_values": 0.1}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", TINY),
    "dinov2_registers": ("vit_small_patch14_reg4_dinov2", TINY),
    "siglip": ("vit_base_patch16_siglip_224", TINY),
    "vit_qk_norm": (
        "vit_tiny_patch16_224",
        {**TINY, "qk_norm": True, "class_token": False, "global_pool": "avg"},
    ),
    "beit": ("beit_base_patch16_224", {**TINY, "init_values": 0.1}),
    "beit_shared_bias": (
        "beitv2_base_patch16_224",
        {
            **TINY,
            "use_abs_pos_emb": False,
            "use_shared_rel_pos_bias": True,
            "use_rel_pos_bias": False,
        },
    ),
    "resnet": ("resnet18", {"layers": (1, 1, 2, 1), "channels": (16, 32, 64, 128)}),
    "resnetv2_bit": ("resnetv2_50x1_bit", {"channels": (128, 128, 256, 256), "stem_chs": 32}),
    "regnet": ("regnety_002", {}),
    "efficientnet": ("test_efficientnet", {"drop_path_rate": 0.0, "drop_rate": 0.0}),
    "mobilenet": ("mobilenetv3_small_050", {"drop_rate": 0.0}),
    "convnext": ("convnext_atto", {"depths": (2, 2, 2, 2), "dims": (16, 32, 48, 64)}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 32,
            "window_size": 2,
            "embed_dim": 24,
            "depths": (1, 1, 1, 1),
            "num_heads": (2, 2, 2, 2),
            "drop_path_rate": 0.0,
        },
    ),
    "swin_shifted": (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": 32,
            "window_size": 2,
            "embed_dim": 24,
            "depths": (2,),
            "num_heads": (2,),
            "drop_path_rate": 0.0,
        },
    ),
    "eva02": ("eva02_tiny_patch14_224", {**TINY, "ref_feat_shape": (4, 4), "init_values": 0.1}),
    "eva02_apart": ("eva02_base_patch14_224", {**TINY, "ref_feat_shape": (4, 4)}),
    "cait": ("cait_xxs24_224", {**TINY, "depth": 1, "init_values": 0.1}),
    "xcit": ("xcit_nano_12_p8_224", {**TINY, "depth": 1}),
    "maxvit": (
        "maxvit_tiny_tf_224",
        {
            "img_size": 32,
            "embed_dim": (32, 32),
            "depths": (1, 1),
            "block_type": ("M", "M"),
            "stem_width": 8,
            "transformer_window_size": (2, 2),
            "transformer_grid_size": (2, 2),
        },
    ),
    "maxvit_rw": (
        "maxvit_nano_rw_256",
        {
            "img_size": 32,
            "embed_dim": (32,),
            "depths": (1,),
            "block_type": ("M",),
            "stem_width": 8,
            "transformer_window_size": (2, 2),
            "transformer_grid_size": (2, 2),
        },
    ),
    "nfnet": (
        "dm_nfnet_f0",
        {
            "depths": (1, 1, 1, 1),
            "channels": (32, 32, 32, 32),
            "stem_chs": 16,
            "group_size": 8,
            "drop_rate": 0.0,
        },
    ),
    "eva_halves": ("vit_small_patch16_dinov3", {**TINY, "dynamic_img_size": False}),
}
# Where a patch has something to do, if not in `vit_scaled`.
REACHED = {"batch_norm": "resnet", "convolution": "resnet", "grouped_convolution": "nfnet"}
SIDE, CLASSES = 32, 7
# At 32 pixels their last BatchNorms see one pixel an image, and timm errs alike.
LARGE_SIDES = {"efficientnet": 96, "mobilenet": 96}
# float32 against float32: both round.
TOLERANCE = 1e-5
# At random weights a rounding flips ReLUs: timm's own float32 gradients are as far from its float64
# ones as the patched ones are. Their equality shows in float64.
IN_FLOAT64 = {"resnetv2_bit"}
# Their convolutions in bfloat16 have no fast form on the CPU.
SLOW_IN_BFLOAT16 = {"regnet", "mobilenet", "efficientnet", "resnetv2_bit", "nfnet"}


def create_pair(family: str, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """timm's model with weights that use all its parts, and the same one patched."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=CLASSES, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, apply_patches(copy.deepcopy(model))


def run(model: nn.Module, images: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients by name, in the order of files."""
    output = model(images)
    output = sum(output) if isinstance(output, tuple) else output
    (output.double() * weights).sum().backward()
    held = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, HwioWeight)}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output, {n: g.permute(TO_OIHW) if n in held else g for n, g in gradients.items()}


def get_distance(value: Tensor, other: Tensor) -> float:
    """Relative distance in the Euclidean norm."""
    other = other.double()
    return ((value.double() - other).norm() / other.norm().clamp(min=1e-30)).item()


def create_inputs(seed: int = 0, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Images and the weights of the logits' sum."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn((8, 3, side, side), generator=generator)
    return images, torch.randn((8, CLASSES), generator=generator, dtype=torch.float64)


def flatten(gradients: dict[str, Tensor]) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_gives_timms_outputs_and_gradients(family):
    model, patched = create_pair(family)
    images, weights = create_inputs(side=LARGE_SIDES.get(family, SIDE))
    if family in IN_FLOAT64:
        model, patched, images = model.double(), patched.double(), images.double()
    wanted, gradients = run(model.train(), images, weights)
    found, own = run(patched.train(), images, weights)
    assert get_distance(found, wanted) < TOLERANCE
    assert own.keys() == gradients.keys()
    assert get_distance(flatten(own), flatten(gradients)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(IN_FLOAT64))
def test_gradients_sensitive_to_rounding_are_as_close_as_timms(family):
    model, patched = create_pair(family)
    images, weights = create_inputs()
    _, truth = run(copy.deepcopy(model).double().train(), images.double(), weights)
    usual, own = (run(one.train(), images, weights)[1] for one in (model, patched))
    usual, own = (get_distance(flatten(one), flatten(truth)) for one in (usual, own))
    assert own < 3 * usual


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_equal_timms_and_load_both_ways(family):
    model, patched = create_pair(family)
    table = [(name, value.shape, value.dtype) for name, value in model.state_dict().items()]
    state = patched.state_dict()
    assert [(name, value.shape, value.dtype) for name, value in state.items()] == table
    assert [n for n, _ in patched.named_parameters()] == [n for n, _ in model.named_parameters()]
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    other, other_patched = create_pair(family, seed=1)
    other.load_state_dict(state)
    other_patched.load_state_dict(model.state_dict())
    images, _ = create_inputs()
    with torch.no_grad():
        truth = copy.deepcopy(model).double().eval()(images.double())
        wanted = model.eval()(images)
        assert torch.equal(other.eval()(images), wanted)
        usual, own = (
            get_distance(found, truth) for found in (wanted, other_patched.eval()(images))
        )
    assert own < 3 * usual


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW_IN_BFLOAT16)) for f in FAMILIES],
)
def test_bfloat16_is_nearly_as_close_to_float32_as_timms(family):
    model, patched = create_pair(family)
    images, weights = create_inputs(side=LARGE_SIDES.get(family, SIDE))
    truth, slopes = run(copy.deepcopy(model).train(), images, weights)
    distances = []
    for one in (model.train(), patched.train()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, gradients = run(one, images, weights)
        gradient = get_distance(flatten(gradients), flatten(slopes))
        distances.append((get_distance(output, truth), gradient))
    (usual, usual_gradient), (own, own_gradient) = distances
    assert own < 2 * usual + 1e-3
    assert own_gradient < 2.5 * usual_gradient


def test_every_layer_of_the_families_is_patched():
    _, vit = create_pair("vit")
    kinds = {type(module) for module in vit.modules()}
    assert {KernelAttention, XlaPatchEmbed, XlaLinear, XlaLayerNorm, XlaGelu} <= kinds
    assert not kinds & {nn.Linear, nn.LayerNorm, nn.GELU}
    own = {"eva02": XlaEvaAttention, "swin": XlaWindowAttention, "maxvit_rw": XlaMaxVitAttention}
    for family, kind in own.items():
        assert kind in {type(module) for module in create_pair(family)[1].modules()}
    _, resnet = create_pair("resnet")
    kinds = [type(module) for module in resnet.modules()]
    assert nn.Conv2d not in kinds
    assert XlaBatchNorm2d in kinds


def test_fused_attention_is_off_in_unpatched_classes():
    model = apply_patches(timm.create_model("vit_tiny_patch16_224", **TINY, block_fn=get_block()))
    flags = [m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")]
    assert flags
    assert not any(flags)


def get_block():
    """A block of timm whose attention is part of itself."""
    from timm.models.vision_transformer import ParallelScalingBlock

    return ParallelScalingBlock


def test_masks_and_causal_attention_equal_timms():
    model, patched = create_pair("vit")
    attention, own = model.blocks[0].attn, patched.blocks[0].attn
    attention.fused_attn = False
    tokens = torch.randn(2, 5, 32)
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    allowed |= torch.eye(5, dtype=torch.bool)
    bias = torch.randn(2, 4, 5, 5)
    for arguments in ({"attn_mask": allowed}, {"attn_mask": bias}, {"is_causal": True}):
        assert get_distance(own(tokens, **arguments), attention(tokens, **arguments)) < TOLERANCE


def test_a_learnable_mask_gets_its_gradient():
    model, patched = create_pair("vit")
    tokens = torch.randn(2, 5, 32)
    gradients = []
    for attention in (model.blocks[0].attn, patched.blocks[0].attn):
        attention.fused_attn = False
        bias = torch.zeros(5, 5, requires_grad=True)
        attention(tokens, attn_mask=bias).square().sum().backward()
        gradients.append(bias.grad)
    assert get_distance(gradients[1], gradients[0]) < TOLERANCE


def test_attention_dropout_keeps_the_mean():
    attention = apply_patches(timm.create_model("vit_tiny_patch16_224", **TINY, attn_drop_rate=0.5))
    attention = attention.blocks[0].attn
    torch.manual_seed(0)
    tokens = torch.randn(1, 5, 32)
    drawn = attention.train()(tokens.expand(400, 5, 32))
    assert drawn.std(dim=0).max() > 0.001
    error = (drawn.mean(dim=0) - attention.eval()(tokens)[0]).abs().max()
    assert error < 6 * drawn.std(dim=0).max() / 20


def test_attention_dropout_does_not_drop_the_mask():
    """Only the first token may be looked at: what is drawn is its value, doubled, or nothing."""
    patched = apply_patches(timm.create_model("vit_tiny_patch16_224", **TINY, attn_drop_rate=0.5))
    attention = patched.blocks[0].attn
    tokens, mask = torch.randn(1, 5, 32), torch.full((1, 1, 5, 5), float("-inf"))
    mask[..., 0] = 0.0
    torch.manual_seed(0)
    drawn = attention.train()(tokens.expand(400, 5, 32), attn_mask=mask)
    error = (drawn.mean(dim=0) - attention.eval()(tokens, attn_mask=mask)[0]).abs().max()
    assert error < 6 * drawn.std(dim=0).max() / 20
    # Other tokens' values must not reach the result, whatever they are.
    tokens[:, 1:] += 100.0
    torch.manual_seed(0)
    moved = attention.train()(tokens.expand(400, 5, 32), attn_mask=mask)
    torch.testing.assert_close(moved, drawn)


@pytest.mark.parametrize("family", ["vit", "resnet", "convnext"])
def test_recomputed_blocks_give_the_same_gradients(family):
    _, patched = create_pair(family)
    images, weights = create_inputs()
    _, wanted = run(copy.deepcopy(patched).eval(), images, weights)
    blocks = [m for m in patched.modules() if type(m).__name__ in ("Block", "BasicBlock")]
    blocks += [m for m in patched.modules() if type(m).__name__ == "ConvNeXtBlock"]
    assert blocks
    for block in blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    _, found = run(patched.eval(), images, weights)
    assert torch.equal(flatten(found), flatten(wanted))


@pytest.mark.parametrize("family", ["vit", "beit", "convnext", "swin_shifted", "eva02"])
def test_repeated_blocks_are_found_in_patched_models(family):
    """`train.remat` looks for blocks of one class."""
    counts = [[len(blocks) for blocks in find_blocks(one)] for one in create_pair(family)]
    assert counts[0] == counts[1] != []


@pytest.mark.parametrize("family", ["beit_shared_bias", "resnet", "convnext", "swin", "maxvit"])
def test_every_layer_that_timm_calls_can_be_tapped(family):
    """All at once, as terms on several layers want it."""
    images = create_inputs()[0][:2]
    wanted, found = (tap_all(model, images) for model in create_pair(family))
    assert wanted.keys() <= found.keys()
    for path, value in wanted.items():
        assert found[path].shape == value.shape, path
        assert get_distance(found[path], value) < 10 * TOLERANCE, path


def tap_all(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Outputs of all modules by path."""
    tap = FeatureTap(model, [path for path, _ in model.named_modules() if path], "student")
    with torch.no_grad():
        model.eval()(images)
    return tap.take()


@pytest.mark.parametrize("family", ["vit", "deit_distilled", "vit_qk_norm", "siglip", "beit"])
def test_a_single_tapped_layer_gives_timms_outputs(family):
    """One hook alone leaves all the other products in their patched form."""
    images = create_inputs()[0][:2]
    model, patched = create_pair(family)
    for path, wanted in tap_all(model, images).items():
        taken: list[Tensor] = []
        handle = patched.get_submodule(path).register_forward_hook(
            lambda _module, _inputs, output, taken=taken: taken.append(output)
        )
        with torch.no_grad():
            patched.eval()(images)
        handle.remove()
        calls = 2 if (family, path) == ("deit_distilled", "head_drop") else 1  # once a head
        assert len(taken) == calls, path
        assert get_distance(taken[-1], wanted) < 10 * TOLERANCE, path


@pytest.mark.parametrize("family", ["vit", "resnet", "convnext"])
def test_float32_weight_gradients_differ_only_by_rounding(family):
    model, patched = create_pair(family)
    images, weights = create_inputs()
    results = []
    for is_fp32 in (False, True):
        one = apply_patches(copy.deepcopy(model), fp32_weight_gradients=is_fp32).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = one(images)
        (output.double() * weights).sum().backward()
        results.append(flatten({n: p.grad for n, p in one.named_parameters()}))
    assert not torch.equal(results[0], results[1])
    assert get_distance(results[1], results[0]) < 0.02
    assert patched is not model


def test_float32_weight_gradients_of_convolutions_are_products_in_float32():
    layer = apply_patches(nn.Sequential(nn.Conv2d(4, 3, 3)), fp32_weight_gradients=True)[0]
    assert isinstance(layer, HwioWeight)
    x, gradient = torch.randn(64, 4, 8, 8), torch.randn(64, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    output.backward(gradient.bfloat16())
    weight = torch.zeros(3, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    wanted = nn.functional.conv2d(x.bfloat16().double(), weight)
    wanted.backward(gradient.bfloat16().double())
    assert get_distance(layer.weight.grad.permute(TO_OIHW), weight.grad) < 1e-6


@pytest.mark.parametrize("family", ["vit", "vit_scaled", "beit", "convnext"])
def test_the_residual_stream_has_the_compute_type(family):
    """Without the patch float32 scales and positions make all of it float32 again."""
    name, arguments = FAMILIES[family]
    model = timm.create_model(name, num_classes=CLASSES, **arguments)
    kinds = ("Block", "ConvNeXtBlock")
    found = {}
    for skip in ((), ("residual_stream",)):
        patched, seen = apply_patches(copy.deepcopy(model), skip=skip), set()
        for module in patched.modules():
            if type(module).__name__ in kinds:
                module.register_forward_hook(lambda _m, _i, o, seen=seen: seen.add(o.dtype))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            patched.eval()(create_inputs()[0][:2])
        found[skip] = seen
    assert found[()] == {torch.bfloat16}
    assert found["residual_stream",] == {torch.float32}


def test_float32_weight_gradients_are_products_in_float32():
    layer = apply_patches(nn.Sequential(nn.Linear(64, 3)), fp32_weight_gradients=True)[0]
    x, gradient = torch.randn(512, 64), torch.randn(512, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    output.backward(gradient.bfloat16())
    wanted = gradient.bfloat16().double().T @ x.bfloat16().double()
    assert get_distance(layer.weight.grad, wanted) < 1e-6


def test_convolution_weights_are_stored_as_hwio():
    model, patched = create_pair("resnet")
    weight = patched.layer1[0].conv1.weight
    assert torch.equal(weight, model.layer1[0].conv1.weight.permute(TO_HWIO))
    assert weight.is_contiguous()
    assert weight.requires_grad


def test_batch_norm_keeps_timms_running_statistics():
    model, patched = create_pair("resnet")
    for seed in range(3):
        images, _ = create_inputs(seed)
        for one in (model, patched):
            one.train()(images)
    for name, value in model.named_buffers():
        found = dict(patched.named_buffers())[name]
        assert torch.allclose(found.double(), value.double(), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("skipped", PATCHES)
def test_each_patch_can_be_left_out(skipped):
    model, everything = create_pair(REACHED.get(skipped, "vit_scaled"))
    patched = apply_patches(copy.deepcopy(model), skip=[skipped])
    pairs = zip(patched.modules(), everything.modules(), strict=True)
    assert any(describe(one) != describe(other) for one, other in pairs)
    images, weights = create_inputs()
    wanted, gradients = run(model.train(), images, weights)
    found, own = run(patched.train(), images, weights)
    assert get_distance(found, wanted) < TOLERANCE
    assert get_distance(flatten(own), flatten(gradients)) < TOLERANCE


def describe(module: nn.Module) -> list[str]:
    """Names of the classes that a module is made of, and groups that it computes as one."""
    joined = getattr(module, "joined_groups", 1)
    return [str(joined), *(kind.__name__ for kind in type(module).__mro__)]


def test_an_unknown_patch_is_refused_with_a_similar_name():
    with pytest.raises(UserError, match=r"model.skip_patches \('gelus'\).*'gelu'"):
        apply_patches(nn.Sequential(), skip=["gelus"])


def test_patching_twice_changes_nothing():
    _, patched = create_pair("resnet")
    before = {name: value.clone() for name, value in patched.state_dict().items()}
    kinds = [type(module) for module in patched.modules()]
    apply_patches(patched)
    assert [type(module) for module in patched.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in patched.state_dict().items())


def test_the_gelu_fit_is_within_its_stated_error():
    from torch.nn import functional

    from models.patches.dense import compute_gelu_slope, evaluate_fit

    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    value, slope = evaluate_fit(x)
    exact = x.clone().requires_grad_()
    functional.gelu(exact).sum().backward()
    assert (value - functional.gelu(x)).abs().max() < 2.7e-5
    assert (slope - exact.grad).abs().max() < 1.3e-4
    upcast = x.float()
    assert (compute_gelu_slope(upcast).double() - exact.grad).abs().max() < 1e-5
