"""Own models by name; all others are timm's."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from utils.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from utils.weights.meaning import ArgumentTable

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "cifar_resnet32x4": "models.cifar_resnet:create_resnet32x4",
        "cifar_resnet8x4": "models.cifar_resnet:create_resnet8x4",
        "delta_rules": "models.delta.layers.decoder:create_rules",
        "kimi_linear": "models.delta.layers.kimi:create_kimi",
        "qwen3_5": "models.delta.layers.qwen:create_hybrid",
        "qwen3": "models.delta.layers.qwen:create_qwen3",
        "qwen3_5_moe": "models.delta.layers.qwen_next:create_hybrid_of_experts",
        "qwen3_next": "models.delta.layers.qwen_next:create_next",
        "rwkv7": "models.delta.layers.rwkv:create_rwkv",
        "linear": "models.mlp:LinearRegression",
        "mlp": "models.mlp:MLP",
        "mnist_cnn": "models.mnist_cnn:MnistCnn",
        "simkd": "models.reused_head:ReusedClassifier",
        "vit_s16_sincos2d": "models.sincos_vit:create_vit_s16",
        "transformer": "models.transformer:Transformer",
    },
)

# Classes of the arguments of models where some change the meaning of tensors of the same shapes.
ARGUMENTS: ArgumentTable = Registry(
    "arguments of model",
    {
        "delta_rules": "models.delta.layers.decoder:RuleShape",
        "kimi_linear": "models.delta.layers.kimi:KimiShape",
        "qwen3_5": "models.delta.layers.qwen:HybridShape",
        "qwen3": "models.delta.layers.qwen:QwenShape",
        "qwen3_5_moe": "models.delta.layers.qwen_next:ExpertShape",
        "qwen3_next": "models.delta.layers.qwen_next:ExpertShape",
        "rwkv7": "models.delta.layers.rwkv:RwkvShape",
        "mlp": "models.mlp:MLPShape",
        "vit_s16_sincos2d": "models.sincos_vit:SincosArguments",
        "transformer": "models.transformer:TransformerShape",
    },
)


def takes_argument(name: str, argument: str) -> bool:
    """Return whether an own model has an argument, such as `vocab_size`."""
    return name in MODELS and argument in inspect.signature(MODELS.get(name)).parameters


def list_taking(argument: str) -> list[str]:
    """List the own models with an argument; imports all of them."""
    return [name for name in MODELS if takes_argument(name, argument)]
