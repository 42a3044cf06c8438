"""Language models as saved by transformers and fla: config.json, and one or several weight files.

A row of `VARIANTS` holds the names of a model's arguments there, and the settings that
models/delta/ requires. Weights have the names of the files; matrices of single experts, and parts
of one tensor here, are joined when read and split when written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint.fit import Kind
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.storage.folder import Folder
from utils.weights.facts import WeightFacts
from utils.weights.source import SafetensorsWeights, Weights

INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_CONVOLUTION = re.compile(r"(.*\.self_attn)\.([qkv])_conv1d\.weight")
_FORGET = re.compile(r"(.*\.self_attn)\.(f_a_proj\.weight|f_b_proj\.weight|dt_bias|A_log)")
_QWEN = {
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
}
_HYBRID = {
    **_QWEN,
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_width": "linear_key_head_dim",
    "linear_value_width": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
_EXPERTS = {
    **{name: key for name, key in _HYBRID.items() if name != "mlp_width"},
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
    "balance": "router_aux_loss_coef",
}
_KIMI = {
    "depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "head_width": "qk_nope_head_dim", "shared_width": "qk_rope_head_dim",
    "value_width": "v_head_dim", "latent_width": "kv_lora_rank",
    "mlp_width": "intermediate_size", "tied": "tie_word_embeddings",
    "linear_heads": "linear_num_heads", "linear_width": "linear_head_dim",
    "conv_width": "linear_conv_kernel_dim"
}  # fmt: skip
_RWKV = {
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "head_width": "head_dim",
    "mlp_width": "intermediate_size",
    "decay_rank": "decay_low_rank_dim",
    "rate_rank": "a_low_rank_dim",
    "value_rank": "v_low_rank_dim",
    "gate_rank": "gate_low_rank_dim",
}
_FIXED: JsonObject = {"hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6}
_FIXED_EXPERTS = _FIXED | {"norm_topk_prob": True, "decoder_sparse_step": 1}
_FIXED_EXPERTS |= {"mlp_only_layers": []}
Refuse = Callable[[str], UserError]  # a reason -> the error of config.json


@dataclass(frozen=True)
class Variant:
    """Names and settings of a model in config.json."""

    model: str  # its name here
    kind: str  # `model_type` of config.json
    architecture: str  # its class in transformers or fla
    keys: Mapping[str, str]  # its arguments here -> their names in config.json
    # Required values, if they are set.
    fixed: JsonMapping = field(default_factory=lambda: _FIXED)
    # Share of a head's channels with rotary positions; None: no positions.
    rotary: float | None = 0.25
    groups: bool = True  # whether layers come in groups, each with full attention in its last layer


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
             "attn": None, "tie_word_embeddings": False}, None, groups=False)
)  # fmt: skip


def read_language_facts(said: JsonMapping, refuse: Refuse) -> JsonObject | None:
    """Read config.json as facts of this program; None for other models, `refuse` for settings."""
    text = said.get("text_config")
    config = text if isinstance(text, dict) else said
    kind = str(config.get("model_type", "")).replace("rwkv7_fla", "rwkv7")
    variant = next((row for row in VARIANTS if row.kind == kind), None)
    if variant is None:
        return None
    for key, wanted in variant.fixed.items():
        if config.get(key, wanted) != wanted and not (wanted == [] and config[key] is None):
            raise refuse(f"{key} is {config[key]!r}, but {variant.model} needs {wanted!r}")
    args: JsonObject = {name: config.get(key) for name, key in variant.keys.items()}
    if variant.model == "rwkv7" and args["mlp_width"] is None and config.get("hidden_size"):
        hidden = int(config["hidden_size"] * (config.get("hidden_ratio") or 4))
        args["mlp_width"] = -(-hidden // 32) * 32
    if "experts" in args:
        experts, each = args["experts"], args["experts_per_token"]
        # Room for all tokens of a window in each expert.
        room = max(2.0, experts / each) if experts and each else 2.0
        args["capacity_factor"] = config.get("capacity_factor") or room
    if "tied" in args:
        args["tied"] = bool(args["tied"] or said.get("tie_word_embeddings"))
    if variant.groups:
        args["full_every"] = _read_groups(config, refuse)
    if variant.rotary is not None:
        args["rope_base"] = _read_base(config, variant, refuse)
    if variant.model == "kimi_linear" and set(config.get("mlp_layer_types") or [""]) != {"dense"}:
        raise refuse("it has experts, which kimi_linear does not support")
    sizes = {"vocab_size": "vocab_size", "sequence_length": "max_position_embeddings"}
    facts = {name: config.get(key) for name, key in sizes.items()}
    if variant.model == "kimi_linear" and facts["sequence_length"] is None:
        facts["sequence_length"] = config.get("model_max_length")
    for name, value in {**args, **facts}.items():
        if value is None:
            key = {**variant.keys, **sizes}.get(name, name)
            raise refuse(f"{key} is missing, which sets model.args.{name}")
    return {"model": variant.model, "args": args, **facts}


def describe_language(facts: JsonMapping, architecture: Any) -> JsonObject:
    """Return the config.json of a model by its facts and shape; a UserError without a variant."""
    model = str(facts["model"])
    variant = next((row for row in VARIANTS if row.model == model), None)
    if variant is None:
        names = ", ".join(row.model for row in VARIANTS)
        raise UserError(
            f"{model} is not a model of transformers or fla; those are {names}; export one of them"
        )
    config: JsonObject = {
        "architectures": [variant.architecture],
        "model_type": variant.kind,
        "vocab_size": facts["vocab_size"],
        "max_position_embeddings": facts["sequence_length"],
        "dtype": "float32",
        **variant.fixed,
        **{key: getattr(architecture, name) for name, key in variant.keys.items()},
    }
    depth = config["num_hidden_layers"]
    if variant.rotary is not None:
        share = {"partial_rotary_factor": variant.rotary} if variant.rotary < 1 else {}
        base = architecture.rope_base
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": base, **share}
    if variant.groups:
        kinds = ("full_attention", "linear_attention")
        every = architecture.full_every
        config["layer_types"] = [kinds[bool((i + 1) % every)] for i in range(depth)]
    if "experts" in variant.keys:
        # A key of this program: elsewhere experts have room for all tokens.
        config["capacity_factor"] = architecture.capacity_factor
    if variant.model == "kimi_linear":
        config |= {"mlp_layer_types": ["dense"] * depth, "pad_token_id": None}
        config["num_key_value_heads"] = config["num_attention_heads"]
    return config


@dataclass(frozen=True)
class Pieces:
    """Parts of a tensor: each row is concatenated along dimension 0; several rows are stacked."""

    rows: tuple[tuple[str, ...], ...]
    stacked: bool = False


def find_pieces(names: Sequence[str]) -> dict[str, Pieces]:
    """Map tensor names of a model here to the tensors of a file that they consist of.

    Image towers and heads for further tokens are ignored.
    """
    pieces: dict[str, Pieces] = {}
    experts: dict[str, dict[int, dict[str, str]]] = {}
    convolutions: dict[str, dict[str, str]] = {}
    for name in names:
        own = name.replace("model.language_model.", "model.", 1)
        # transformers saves the dense layers of Kimi Linear under the name of experts.
        own = own.replace(".block_sparse_moe.", ".mlp.", 1)
        if own.startswith(("model.visual.", "mtp.", "model.mtp.")):
            continue
        if match := _EXPERT.fullmatch(own):
            layer, number, part = match.groups()
            experts.setdefault(layer, {}).setdefault(int(number), {})[part] = name
        elif match := _CONVOLUTION.fullmatch(own):
            convolutions.setdefault(match[1], {})[match[2]] = name
        else:
            match = _FORGET.fullmatch(own)
            pieces[f"{match[1]}.forget_gate.{match[2]}" if match else own] = Pieces(((name,),))
    for layer, parts in convolutions.items():
        row = tuple(parts[part] for part in "qkv" if part in parts)
        pieces[f"{layer}.conv1d.weight"] = Pieces((row,))
    targets = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for layer, numbers in experts.items():
        ordered = [numbers[number] for number in sorted(numbers)]
        for target, wanted in targets.items():
            rows = tuple(tuple(have[part] for part in wanted if part in have) for have in ordered)
            pieces[f"{layer}.{target}"] = Pieces(rows, stacked=True)
    return pieces


def _read_groups(config: JsonMapping, refuse: Refuse) -> int:
    kinds, depth = config.get("layer_types"), config.get("num_hidden_layers")
    if not isinstance(kinds, list) or not kinds:
        return int(config.get("full_attention_interval") or 4)
    full = [kind == "full_attention" for kind in kinds]
    every = full.index(True) + 1 if any(full) else len(full) + 1
    if len(full) != depth or full != [not (i + 1) % every for i in range(len(full))]:
        raise refuse("layer_types do not come in equal groups, each with full attention last")
    return every


def _read_base(config: JsonMapping, variant: Variant, refuse: Refuse) -> float | None:
    """Return the base of rotary positions, or None; both places that may hold it must agree."""
    bases = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        rule = rope.get("rope_type") or rope.get("type") or "default"
        if rule != "default":
            raise refuse(f"{key} has rope_type {rule!r}, but {variant.model} needs 'default'")
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if factor not in (None, variant.rotary):
            raise refuse(
                f"partial_rotary_factor is {factor:g}, but {variant.model} needs {variant.rotary:g}"
            )
        bases.append(rope.get("rope_theta"))
    of_parameters, of_scaling = bases
    if None not in bases and of_parameters != of_scaling:
        raise refuse(
            f"rope_theta is {of_parameters:g} in rope_parameters and {of_scaling:g} in "
            "rope_scaling; remove one of them"
        )
    given = of_scaling if of_parameters is None else of_parameters
    return config.get("rope_theta") if given is None else given


class LanguageWeights(Weights):
    """A folder of .safetensors files with names of transformers or fla; `facts` of config.json."""

    def __init__(self, path: str, key: str, folder: Folder, facts: WeightFacts) -> None:
        super().__init__(path, key)
        self._folder, self._facts, self.location = folder, facts, str(folder)

    @property
    def facts(self) -> WeightFacts:
        return self._facts

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        kinds = {name: kind for part in self._parts for name, kind in part.kinds.items()}
        return {name: _join_kinds(pieces, kinds) for name, pieces in self._find(kinds).items()}

    def read_tensors(self) -> dict[str, Tensor]:
        parts = [part.read_tensors() for part in self._parts]
        tensors = {name: tensor for part in parts for name, tensor in part.items()}
        self._check_tied_head(tensors)
        return {name: join(pieces, tensors) for name, pieces in self._find(tensors).items()}

    def update_hash(self, digest: hashlib._Hash) -> None:
        for part in self._parts:
            part.update_hash(digest)

    @cached_property
    def _parts(self) -> list[SafetensorsWeights]:
        names = self._folder.list_names()
        files = [FILE] if FILE in names else self._read_index()
        missing = [file for file in files if file not in names]
        if missing:
            raise UserError(
                f"{self.key} ({self.path!r}): {INDEX} names {missing[0]}, which is missing; copy "
                "the whole folder"
            )
        return [SafetensorsWeights(self.path, self.key, self._folder, file, {}) for file in files]

    def _read_index(self) -> list[str]:
        try:
            index = json.loads(self._folder.read_text(INDEX))
            return sorted({str(file) for file in index["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.key} ({self.path!r}): neither {FILE} nor a readable {INDEX} is there; copy "
                "the whole folder"
            ) from error

    def _find(self, names: Iterable[str]) -> dict[str, Pieces]:
        pieces = find_pieces(list(names))
        if self._facts["args"].get("tied"):
            pieces.pop("lm_head.weight", None)
        return pieces

    def _check_tied_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse a tied head that is stored with other numbers than the embedding."""
        head = tensors.get("lm_head.weight")
        own = self._find(tensors).get("model.embed_tokens.weight")
        if head is None or own is None or not self._facts["args"].get("tied"):
            return
        if not torch.equal(head, join(own, tensors)):
            raise UserError(
                f"{self.key} ({self.path!r}): config.json has tie_word_embeddings true, but "
                "lm_head.weight is not the embedding; set it to false there"
            )


def _join_kinds(pieces: Pieces, kinds: Mapping[str, Kind]) -> Kind:
    row = [kinds[name] for name in pieces.rows[0]]
    shape, dtype = row[0]
    if shape:
        shape = (sum(part[0] for part, _ in row), *shape[1:])
    return ((len(pieces.rows), *shape) if pieces.stacked else shape), dtype


def join(pieces: Pieces, tensors: Mapping[str, Tensor]) -> Tensor:
    """Join the tensors of a file into one tensor of a model here."""
    rows = [
        tensors[row[0]] if len(row) == 1 else torch.cat([tensors[name] for name in row])
        for row in pieces.rows
    ]
    return torch.stack(rows) if pieces.stacked else rows[0]


def split(name: str, tensor: Tensor, model: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a file that `find_pieces` would join into this one of a model."""
    layer, _, kind = name.rpartition(".")
    if model == "qwen3_next" and kind in ("gate_up_proj", "down_proj") and tensor.dim() == 3:
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for number, matrix in enumerate(tensor):
            for part, chunk in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{layer}.{number}.{part}.weight", chunk
    elif model == "kimi_linear" and name.endswith(".self_attn.conv1d.weight"):
        start = layer.removesuffix(".conv1d")
        for part, chunk in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{start}.{part}_conv1d.weight", chunk
    else:
        yield name.replace(".forget_gate.", "."), tensor
