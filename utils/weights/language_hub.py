"""Language models as transformers and fla save them: config.json in the words of `model.args`.

A variant is a row of `VARIANTS`: what its arguments are called, and what must be as models/delta/
has it. Its weights have the names of the files; where a file has a matrix of each expert, or
parts of what is one here, they are put together on the way in and cut apart on the way out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_CONVOLUTION = re.compile(r"(.*\.self_attn)\.([qkv])_conv1d\.weight")
_FORGET = re.compile(r"(.*\.self_attn)\.(f_a_proj\.weight|f_b_proj\.weight|dt_bias|A_log)")
_QWEN = {
    "depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_width": "head_dim", "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
}  # fmt: skip
_HYBRID = {
    **_QWEN, "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads", "linear_key_width": "linear_key_head_dim",
    "linear_value_width": "linear_value_head_dim", "conv_width": "linear_conv_kernel_dim",
}  # fmt: skip
_EXPERTS = {
    **{name: key for name, key in _HYBRID.items() if name != "mlp_width"},
    "experts": "num_experts", "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size", "shared_width": "shared_expert_intermediate_size",
    "balance": "router_aux_loss_coef",
}  # fmt: skip
_KIMI = {
    "depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "head_width": "qk_nope_head_dim", "shared_width": "qk_rope_head_dim",
    "value_width": "v_head_dim", "latent_width": "kv_lora_rank",
    "mlp_width": "intermediate_size", "tied": "tie_word_embeddings",
    "linear_heads": "linear_num_heads", "linear_width": "linear_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}  # fmt: skip
_RWKV = {
    "depth": "num_hidden_layers", "width": "hidden_size", "head_width": "head_dim",
    "mlp_width": "intermediate_size", "decay_rank": "decay_low_rank_dim",
    "rate_rank": "a_low_rank_dim", "value_rank": "v_low_rank_dim",
    "gate_rank": "gate_low_rank_dim",
}  # fmt: skip
_FIXED = {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6}
_FIXED_EXPERTS = {
    **_FIXED, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """How a model is called, and described, elsewhere.

    Attributes:
      model: its name here.
      kind: `model_type` of config.json.
      architecture: the class that it is of there.
      keys: its arguments here -> what they are called there.
      fixed: what must be so there, where it is told.
      turned: share of a head's channels that are turned by their places; none: no places.
      groups: layers come in groups, the last one of each full attention.
    """

    model: str
    kind: str
    architecture: str
    keys: Mapping[str, str]
    fixed: Mapping[str, object] = field(default_factory=lambda: _FIXED)
    turned: float | None = 0.25
    groups: bool = True


VARIANTS = (
    Variant("qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN,
            {**_FIXED, "use_sliding_window": False}, 1.0, groups=False),
    Variant("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM", _HYBRID),
    Variant("qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _EXPERTS, _FIXED_EXPERTS),
    Variant("qwen3_next", "qwen3_next", "Qwen3NextForCausalLM", _EXPERTS, _FIXED_EXPERTS),
    Variant("kimi_linear", "kimi_linear", "KimiLinearForCausalLM", _KIMI,
            {**_FIXED, "rms_norm_eps": 1e-5, "q_lora_rank": None}, None),
    Variant("rwkv7", "rwkv7", "RWKV7ForCausalLM", _RWKV,
            {"hidden_act": "sqrelu", "norm_eps": 1e-5, "norm_bias": True, "norm_first": True,
             "attn": None, "tie_word_embeddings": False}, None, groups=False),
)  # fmt: skip


def read_language_facts(said: JsonMapping, refuse: Callable[[str], UserError]) -> JsonObject | None:
    """What a config.json says, in the words of this program; none: it is no such model.

    Args:
      refuse: makes an error of what is wrong.

    Raises:
      UserError: it is one, of a form that models/delta/ does not have.
    """
    text = said.get("text_config")
    told = text if isinstance(text, dict) else said
    kind = str(told.get("model_type", "")).replace("rwkv7_fla", "rwkv7")
    variant = next((one for one in VARIANTS if one.kind == kind), None)
    if variant is None:
        return None
    for key, wanted in variant.fixed.items():
        if told.get(key, wanted) != wanted and not (wanted == [] and told[key] is None):
            raise refuse(f"{key} is {told[key]!r}, and {variant.model} has {wanted!r} alone")
    args: JsonObject = {name: told.get(key) for name, key in variant.keys.items()}
    if variant.model == "rwkv7" and args["mlp_width"] is None and told.get("hidden_size"):
        hidden = int(told["hidden_size"] * (told.get("hidden_ratio") or 4))
        args["mlp_width"] = -(-hidden // 32) * 32
    if "experts" in args:
        args["capacity_factor"] = told.get("capacity_factor") or _make_room(args)
    if "tied" in args:
        args["tied"] = bool(args["tied"] or said.get("tie_word_embeddings"))
    if variant.groups:
        args["full_every"] = _read_groups(told, refuse)
    if variant.turned is not None:
        args["rope_base"] = _read_base(told, variant, refuse)
    if variant.model == "kimi_linear" and set(told.get("mlp_layer_types") or [""]) != {"dense"}:
        raise refuse("it has experts, and kimi_linear has none")
    sizes = {"vocab_size": "vocab_size", "sequence_length": "max_position_embeddings"}
    facts = {name: told.get(key) for name, key in sizes.items()}
    if variant.model == "kimi_linear" and facts["sequence_length"] is None:
        facts["sequence_length"] = told.get("model_max_length")
    for name, value in {**args, **facts}.items():
        if value is None:
            key = {**variant.keys, **sizes}.get(name, name)
            raise refuse(f"{key} is missing, which model.args.{name} would be")
    return {"model": variant.model, "args": args, **facts}


def describe_language(facts: JsonMapping, architecture: object) -> JsonObject:
    """config.json of a model of this program.

    Args:
      facts: what its weights say: model, vocab_size, sequence_length.
      architecture: its shape, which has all arguments as attributes.

    Raises:
      UserError: there is no such model elsewhere.
    """
    variant = get_variant(str(facts["model"]))
    told: JsonObject = {
        "architectures": [variant.architecture], "model_type": variant.kind,
        "vocab_size": facts["vocab_size"], "max_position_embeddings": facts["sequence_length"],
        "dtype": "float32", **variant.fixed,
        **{key: getattr(architecture, name) for name, key in variant.keys.items()},
    }  # fmt: skip
    depth = told["num_hidden_layers"]
    if variant.turned is not None:
        turned = {"partial_rotary_factor": variant.turned} if variant.turned < 1 else {}
        base = architecture.rope_base
        told["rope_parameters"] = {"rope_type": "default", "rope_theta": base, **turned}
    if variant.groups:
        every = architecture.full_every
        told["layer_types"] = [
            "linear_attention" if (one + 1) % every else "full_attention" for one in range(depth)
        ]
    if "experts" in variant.keys:
        # Nobody else's: elsewhere experts have room for all.
        told["capacity_factor"] = architecture.capacity_factor
    if variant.model == "kimi_linear":
        told |= {"mlp_layer_types": ["dense"] * depth, "pad_token_id": None}
        told["num_key_value_heads"] = told["num_attention_heads"]
    return told


def get_variant(model: str) -> Variant:
    """How a model is called elsewhere.

    Raises:
      UserError: nobody else has it.
    """
    found = next((one for one in VARIANTS if one.model == model), None)
    if found is None:
        names = ", ".join(one.model for one in VARIANTS)
        raise UserError(
            f"{model} is no model of transformers or fla; those are {names}; export one of them"
        )
    return found


# ---- names


@dataclass(frozen=True)
class Pieces:
    """What a tensor is made of: rows of tensors one below the other, and rows stacked or one."""

    rows: tuple[tuple[str, ...], ...]
    stacked: bool = False


def find_pieces(names: Sequence[str]) -> dict[str, Pieces]:
    """The tensors of a model here, by name, and those of a file that make them.

    Towers of images and heads of further tokens are left out.
    """
    found: dict[str, Pieces] = {}
    experts: dict[str, dict[int, dict[str, str]]] = {}
    convolutions: dict[str, dict[str, str]] = {}
    for name in names:
        own = name.replace("model.language_model.", "model.", 1)
        # Where transformers saves Kimi Linear, dense layers are called what experts are.
        own = own.replace(".block_sparse_moe.", ".mlp.", 1)
        if own.startswith(("model.visual.", "mtp.", "model.mtp.")):
            continue
        if match := _EXPERT.fullmatch(own):
            place, number, part = match.groups()
            experts.setdefault(place, {}).setdefault(int(number), {})[part] = name
        elif match := _CONVOLUTION.fullmatch(own):
            convolutions.setdefault(match[1], {})[match[2]] = name
        else:
            match = _FORGET.fullmatch(own)
            found[f"{match[1]}.forget_gate.{match[2]}" if match else own] = Pieces(((name,),))
    for place, parts in convolutions.items():
        ordered = tuple(parts[one] for one in "qkv" if one in parts)
        found[f"{place}.conv1d.weight"] = Pieces((ordered,))
    for place, numbers in experts.items():
        ordered = [numbers[one] for one in sorted(numbers)]
        for target, wanted in (("gate_up_proj", ("gate_proj", "up_proj")),
                               ("down_proj", ("down_proj",))):  # fmt: skip
            rows = tuple(tuple(one[part] for part in wanted if part in one) for one in ordered)
            found[f"{place}.{target}"] = Pieces(rows, stacked=True)
    return found


def _make_room(args: JsonMapping) -> float:
    """The capacity of experts of which each takes all of a window, if it must."""
    experts, each = args["experts"], args["experts_per_token"]
    return max(2.0, experts / each) if experts and each else 2.0


def _read_groups(told: JsonMapping, refuse: Callable[[str], UserError]) -> int:
    kinds, depth = told.get("layer_types"), told.get("num_hidden_layers")
    if not isinstance(kinds, list) or not kinds:
        return int(told.get("full_attention_interval") or 4)
    full = [one == "full_attention" for one in kinds]
    every = full.index(True) + 1 if any(full) else len(full) + 1
    if len(full) != depth or full != [not (one + 1) % every for one in range(len(full))]:
        raise refuse("layer_types do not come in equal groups, each with full attention last")
    return every


def _read_base(told: JsonMapping, variant: Variant, refuse: Callable[[str], UserError]) -> object:
    """The base of rotary positions, or None; what stands in both places must agree."""
    bases = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = told.get(key) or {}
        rule = rope.get("rope_type") or rope.get("type") or "default"
        if rule != "default":
            raise refuse(f"{key} has rope_type {rule!r}, and {variant.model} has 'default' alone")
        factor = rope.get("partial_rotary_factor", told.get("partial_rotary_factor"))
        if factor not in (None, variant.turned):
            raise refuse(
                f"partial_rotary_factor is {factor:g}, and {variant.model} has "
                f"{variant.turned:g} alone"
            )
        bases.append(rope.get("rope_theta"))
    of_parameters, of_scaling = bases
    if None not in bases and of_parameters != of_scaling:
        raise refuse(
            f"rope_theta is {of_parameters:g} in rope_parameters and {of_scaling:g} in "
            "rope_scaling; leave one of them out"
        )
    given = of_scaling if of_parameters is None else of_parameters
    return told.get("rope_theta") if given is None else given
