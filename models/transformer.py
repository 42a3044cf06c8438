"""A decoder of text: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

`forward` returns hidden states; the task applies the head's weight to them chunk by chunk, so that
the logits of all tokens never exist at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.errors import UserError
from utils.json_types import JsonValue
from utils.runtime.processes.sequence import deal_sequence, gather_sequence
from utils.weights.meaning import Meaning, ModelArguments

_POSITIONS = ("rope", "learned", "sinusoidal")
_INIT_STD = 0.02
_MLP_MULTIPLE = 32


@dataclass(frozen=True)
class TransformerShape(ModelArguments):
    """`model.args` of a decoder."""

    depth: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int | None = None  # each shared by heads / kv_heads queries; default `heads`
    mlp_width: int | None = None  # of SwiGLU; default 8/3 of the width, in multiples of 32
    positions: str = "rope"  # or learned or sinusoidal
    tied: bool = True  # the head's weight is the embedding's
    rope_base: float = 10_000.0  # wavelengths of the rotation go up to 2 pi times this

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.width % self.heads or self.width // self.heads % 2:
            raise UserError(
                f"model.args.heads ({self.heads}) must cut model.args.width ({self.width}) into "
                "heads of an even size; change one of them"
            )
        if self.heads % self.num_kv_heads:
            raise UserError(
                f"model.args.kv_heads ({self.kv_heads}) does not divide model.args.heads "
                f"({self.heads}); choose a divisor, or leave it out"
            )
        if self.positions not in _POSITIONS:
            raise UserError(
                f"model.args.positions ({self.positions!r}) must be one of {', '.join(_POSITIONS)}"
            )

    def _check_numbers(self) -> None:
        """Raise a UserError for values of another type, and sizes below 1."""
        for name in ("depth", "width", "heads", "kv_heads", "mlp_width"):
            value, may_lack = getattr(self, name), name in ("kv_heads", "mlp_width")
            if value is None and may_lack:
                continue
            if type(value) is not int or value < 1:
                text = f"model.args.{name} ({value!r}) must be a whole number, 1 or more"
                raise UserError(text + ", or leave it out" * may_lack)
        if type(self.tied) is not bool:
            raise UserError(f"model.args.tied ({self.tied!r}) must be true or false")
        if type(self.rope_base) not in (int, float) or not 1 < self.rope_base < math.inf:
            raise UserError(
                f"model.args.rope_base ({self.rope_base!r}) must be a number above 1; 10000 is "
                "usual"
            )

    @property
    def head_width(self) -> int:
        """Size of one head."""
        return self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_width(self) -> int:
        """Size of the layer inside SwiGLU."""
        return self.mlp_width or -(-8 * self.width // (3 * _MLP_MULTIPLE)) * _MLP_MULTIPLE

    def list_meanings(self) -> dict[str, Meaning]:
        values = {"heads": self.heads, "kv_heads": self.num_kv_heads}
        if self.positions != "learned":
            values |= {"positions": self.positions, "rope_base": self.rope_base}
        return {name: Meaning(value, ("blocks.*.attention.*",)) for name, value in values.items()}


class LayerCache:
    """Keys and values of the tokens that one block has seen, each [B, kv heads, N, D]."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int | Tensor:
        """Tokens seen so far."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens; return all of them."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class FixedCache(LayerCache):
    """A cache of fixed size for a prompt at once, then single tokens.

    One program serves all steps: the tokens seen are counted on the device, and keys and values are
    written in place.

    Args:
      room: tokens that it can hold.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._length: Any = 0

    @property
    def length(self) -> int | Tensor:
        """Tokens seen so far: 0, or an int64 [1] on the device."""
        return self._length

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values; return the prompt's, later the whole cache, to be masked."""
        count = keys.shape[2]
        if self.keys is None or self.values is None:
            rest = [0, 0, 0, self.room - count]
            self.keys, self.values = functional.pad(keys, rest), functional.pad(values, rest)
            self._length = torch.full((1,), count, device=keys.device)
            return keys, values
        self.keys.index_copy_(2, self._length, keys)
        self.values.index_copy_(2, self._length, values)
        # Not in place: callers may hold the tensor of the length before.
        self._length = self._length + count
        return self.keys, self.values


def create_mask(start: int | Tensor, q: Tensor, k: Tensor) -> Tensor | None:
    """Create bool [N, M]: the keys [B, H, M, D] that each query [B, H, N, D] may see.

    Args:
      start: tokens before the first query; None is returned for 0, where the mask is a triangle.
    """
    if isinstance(start, int) and not start:
        return None
    rows, columns = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    return columns <= rows[:, None] + start


def attend_step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of one query a head, [B, H, 1, D], over keys and values of fewer, [B, G, M, D].

    Heads that share keys are rows of one product, and queries are scaled in place of keys, so that
    keys and values are never copied.

    Args:
      mask: keys that are seen, bool [1, M]; None for all.
    """
    rows = q.squeeze(2).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    mixed = functional.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=1.0)
    return mixed.flatten(1, 2).unsqueeze(2)


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """In the type of x."""
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class CausalAttention(nn.Module):
    """Self-attention of each token to those before it and itself.

    Source: grouped queries, Ainslie et al. 2023, arXiv:2305.13245.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.width, shape.num_kv_heads * shape.head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]; with a cache the tokens follow those that it has seen."""
        start = 0 if cache is None else cache.length
        q, k = self.split_heads(self.query(x)), self.split_heads(self.key(x))
        v = self.split_heads(self.value(x))
        if self.shape.positions == "rope":
            q, k = (rotate(heads, start, self.shape.rope_base) for heads in (q, k))
        if cache is not None:
            k, v = cache.append(k, v)
        q, k, v = deal_sequence(q, 2), gather_sequence(k), gather_sequence(v)
        mixed = self.attend(q, k, v, start)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, N, H * D] -> [B, H, N, D]."""
        return x.unflatten(2, (-1, self.shape.head_width)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int | Tensor) -> Tensor:
        """[B, heads, N, D]: values mixed for N tokens after `start` others."""
        mask = create_mask(start, q, k)
        grouped = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )


def rotate(heads: Tensor, start: int | Tensor, base: float) -> Tensor:
    """Rotate heads [B, H, N, D] by position: pairs (i, i + D/2) by position / base^(2i/D).

    The angles are computed at each use: a table would have to pass through a loop over blocks, and
    costs more to read.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    half = heads.shape[-1] // 2
    angles = get_angles(start, heads.shape[2], half, base=base, device=heads.device)
    return rotate_pairs(heads, *angles, dim=-1)


def rotate_pairs(heads: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """Rotate pairs of the halves of a dimension, in float32 inside."""
    first, second = heads.float().chunk(2, dim=dim)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=dim)
    return turned.to(heads.dtype)


def get_angles(
    start: int | Tensor, count: int, half: int, *, base: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Float32 cosines and sines [count, half] of the positions from `start` on."""
    position = torch.arange(count, device=device, dtype=torch.float32) + start
    step = torch.arange(half, device=device, dtype=torch.float32) / -half
    angle = position[:, None] * torch.pow(torch.full_like(step, base), step)
    return torch.cos(angle), torch.sin(angle)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)). Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden_width, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden_width, bias=False)
        self.down = nn.Linear(shape.hidden_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to its input."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RmsNorm(shape.width), RmsNorm(shape.width)
        self.attention, self.mlp = CausalAttention(shape), SwiGlu(shape)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        x = x + self.attention(self.attention_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Tokens [B, N] -> hidden states [B, N, C], whose product with `head_weight` is the logits."""

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, C]."""
        raise NotImplementedError

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocab_size] of hidden states; for a few tokens at a time."""
        return functional.linear(hidden, self.head_weight.to(hidden.dtype)).float()


class Transformer(LanguageModel):
    """Decoder of equal blocks.

    Args:
      vocab_size: of the task's data.
      sequence_length: limit of learned and sinusoidal positions; rotary ones have none.
      shape: fields of `TransformerShape`.
    """

    def __init__(self, vocab_size: int, sequence_length: int, **shape: JsonValue) -> None:
        super().__init__()
        self.shape = TransformerShape.parse(shape)
        self.vocab_size, self.sequence_length = vocab_size, sequence_length
        width = self.shape.width
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.Sequential(*(DecoderBlock(self.shape) for _ in range(self.shape.depth)))
        self.norm = RmsNorm(width)
        self.head = None if self.shape.tied else nn.Linear(width, vocab_size, bias=False)
        if self.shape.positions == "learned":
            self.places = nn.Parameter(torch.zeros(sequence_length, width))
        elif self.shape.positions == "sinusoidal":
            self.register_buffer("places", self._create_waves(), persistent=False)
        self._initialise()

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, cache: list[LayerCache] | None = None) -> Tensor:
        """Normalised hidden states [B, N, C] of tokens, int [B, N].

        Args:
          cache: of the tokens before, one for each block; it grows.
        """
        x = deal_sequence(self.embed(tokens, cache[0].length if cache else 0), 1)
        if cache is None:
            return self.norm(self.blocks(x))
        for block, layer in zip(self.blocks, cache, strict=True):
            x = block(x, layer)
        return self.norm(x)

    def embed(self, tokens: Tensor, start: int | Tensor) -> Tensor:
        """[B, N, C] of tokens whose first one has the position `start`."""
        x = self.embedding(tokens)
        if self.shape.positions == "rope":
            return x
        if isinstance(start, int):
            return x + self.places[start : start + tokens.shape[1]]
        return x + self.places[torch.arange(tokens.shape[1], device=x.device) + start]

    def count_flops(self, length: int) -> float:
        """Count the FLOPs of one window's forward pass: products, a causal attention in full."""
        weights = sum(p.numel() for p in self.blocks.parameters() if p.dim() > 1)
        weights += self.head_weight.numel()
        shape = self.shape
        return 2.0 * length * weights + 4.0 * shape.depth * length * length * shape.width

    def create_cache(self) -> list[LayerCache]:
        """Create an empty cache for each block."""
        return [LayerCache() for _ in self.blocks]

    def _create_waves(self) -> Tensor:
        """Sines and cosines of the positions. Source: Vaswani et al. 2017, arXiv:1706.03762."""
        half = self.shape.width // 2
        cos, sin = get_angles(0, self.sequence_length, half, base=self.shape.rope_base)
        return torch.cat([sin, cos], dim=1)

    def _initialise(self) -> None:
        """Draw normal weights; those that add to the stream are scaled by its number of terms."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            adds = name.endswith(("out.weight", "down.weight"))
            scale = (2 * self.shape.depth) ** -0.5 if adds else 1.0
            nn.init.normal_(parameter, std=_INIT_STD * scale)
