"""Continues a prompt with a language model.

    python -m tools.generate runs/transformer_text/RUN --prompt "def main(" --top-k 40
    python -m tools.generate runs/transformer_sequences/RUN --prompt "3 1 4 8" --temperature 0

RUN is a run's directory, an export, a checkpoint or a folder of transformers. Text is converted by
the tokenizer of the run's data, which is in the dataset's directory (--data, by default that of the
run's configuration); bytes need none, and a model of the Hub has a tokenizer.json in its folder. A
model of synthetic sequences reads and prints numbers of tokens. Keys, values and states are cached;
with --device xla and cuda in caches of fixed size, so that one program serves all tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from big_vision.input.text.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    SharedTokenizer,
    TextTokenizer,
    load_tokenizer,
    read_shared_tokenizer,
)
from big_vision.input.text.tokens import read_token_index
from models.delta.kernels.operators import choose_kernels
from models.factory import build_model
from models.run_folder import find_run_folder, import_run_code, read_run_config
from models.transformer import FixedCache, LayerCache
from utils.config.devices import DEVICES
from utils.config.execution import RuntimeSection
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.programs import CommandLine, create_program_parser
from utils.runtime.choice import choose_device
from utils.runtime.launcher import create_runtime
from utils.runtime.start import get_start
from utils.storage.places import open_folder, to_path
from utils.weights.hub import is_shared
from utils.weights.load import load_weights
from utils.weights.opening import open_weights

if TYPE_CHECKING:
    from utils.runtime.base import Runtime

_RUN_KEY = "RUN"
_MAX_SEED = 2**63 - 1


def create_parser() -> argparse.ArgumentParser:
    """Create the parser."""
    parser = create_program_parser(__doc__, prog="python -m tools.generate")
    add = parser.add_argument
    add("run", metavar=_RUN_KEY, help="run directory, export or checkpoint")
    add("--prompt", default="", help="the text that the model continues")
    add("--max-tokens", type=int, default=200, metavar="N", help="default 200")
    temperature = "divides the logits; 0: the likeliest token"
    add("--temperature", type=float, default=1.0, help=temperature)
    add("--top-k", type=int, default=0, metavar="K", help="only the likeliest tokens; 0: all")
    top_p = "the fewest of the likeliest whose probabilities add up to P"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    add("--seed", type=int, default=0, help="of the draws (default 0)")
    add("--device", choices=tuple(DEVICES), default="cpu", help="default cpu")
    add("--data", default="", metavar="DIR", help="directory of tokenizer.json")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the prompt and its continuation, as text or as numbers."""
    _check_flags(arguments)
    model, facts = load_model(arguments.run)
    tokenizer = find_tokenizer(arguments, facts)
    prompt = encode_prompt(arguments.prompt, tokenizer, model.vocab_size)
    length = len(prompt) + arguments.max_tokens - 1  # the last token is no input
    if model.shape.positions != "rope" and length > model.sequence_length:
        raise UserError(
            f"--max-tokens and the prompt make {length} inputs, but the model has "
            f"{model.sequence_length} {model.shape.positions} positions; lower --max-tokens"
        )
    choose = create_choice(arguments, torch.Generator().manual_seed(arguments.seed))
    end = None if tokenizer is None else tokenizer.end
    runtime = None if arguments.device == "cpu" else place_model(model, arguments)
    new = generate(model, prompt, arguments.max_tokens, choose, end=end, runtime=runtime)
    tokens = [*prompt, *new]
    print(" ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens))


def load_model(path: str) -> tuple[Any, JsonMapping]:
    """Load a language model in eval mode; return it and the facts of its weights."""
    weights = open_weights(path, _RUN_KEY)
    import_run_code(weights)
    facts = weights.facts
    if "vocab_size" not in facts:
        raise UserError(
            f"{_RUN_KEY} ({path!r}) holds no language model; give a run of train.task=language"
        )
    sizes = {name: facts[name] for name in ("vocab_size", "sequence_length")}
    model = build_model(facts["model"], {**facts.get("args", {}), **sizes}, key=_RUN_KEY)
    load_weights(model, weights)
    return model.eval(), facts


def find_tokenizer(arguments: argparse.Namespace, facts: JsonMapping) -> TextTokenizer | None:
    """Find the tokenizer of a model; None for synthetic sequences, whose tokens are numbers."""
    name = str(facts.get("tokenizer", ""))
    kind = name.partition(" ")[0]
    if not kind and (shared := load_shared_tokenizer(arguments.run)) is not None:
        return shared
    if not kind and arguments.data:
        raise UserError(
            f"--data ({arguments.data}) is not supported with a model of synthetic sequences, "
            "which have no tokenizer; remove it"
        )
    if not kind:
        return None
    if kind == ByteTokenizer.kind and not arguments.data:
        return ByteTokenizer()
    directory = to_path(arguments.data, "--data") if arguments.data else _find_data(arguments.run)
    index = read_token_index(directory, "--data")
    if " ".join(filter(None, (index.tokenizer, index.tokenizer_hash))) != name:
        raise UserError(
            f"--data ({directory}) has the tokenizer '{index.tokenizer} {index.tokenizer_hash}', "
            f"the model learnt {name!r}; give the directory that it was trained on"
        )
    return load_tokenizer(kind, directory)


def load_shared_tokenizer(path: str) -> SharedTokenizer | None:
    """Load the tokenizer.json in the folder of a model of the Hub; None without such a file."""
    weights = open_weights(path, _RUN_KEY)
    if not is_shared(weights.path):
        return None
    folder = open_folder(weights.location)
    if TOKENIZER_FILE not in folder.list_names():
        return None
    with folder.open_local(TOKENIZER_FILE) as file:
        return read_shared_tokenizer(file)


def encode_prompt(text: str, tokenizer: TextTokenizer | None, vocab_size: int) -> list[int]:
    """Encode a prompt; an empty one becomes the token that separates texts."""
    if tokenizer is not None:
        tokens = tokenizer.encode(text.encode()).tolist()
        tokens = tokens or [end for end in (tokenizer.end,) if end is not None]
        if not tokens or max(tokens) >= vocab_size:
            raise UserError(
                f"--prompt ({text!r}) gives tokens {tokens[:8]}, but the model's tokens are 0 to "
                f"{vocab_size - 1}; use another prompt"
            )
        return tokens
    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() and int(word) < vocab_size for word in words):
        raise UserError(
            f"--prompt ({text!r}) must be numbers of tokens from 0 to {vocab_size - 1}, as in "
            "'3 1 4': this model has learnt synthetic sequences, or has no tokenizer.json"
        )
    return [int(word) for word in words]


@torch.no_grad()
def generate(
    model: Any,
    prompt: Sequence[int],
    count: int,
    choose: Callable[[Tensor], int],
    *,
    end: int | None = None,
    runtime: Runtime | None = None,
) -> list[int]:
    """Generate up to `count` tokens after a prompt, each from the cache and the last token.

    Args:
      choose: logits [V] -> token.
      end: token that ends the text; it is not returned.
      runtime: of a model on an accelerator. Caches then have a fixed size, so that one program
        serves the prompt and one every token; of a step the token is read if the likeliest is
        taken, else the logits, from which the host draws.
    """
    cache = model.create_cache()
    if runtime is not None:
        size = len(prompt) + count
        cache = [FixedCache(size) if type(layer) is LayerCache else layer for layer in cache]
    device = next(model.parameters()).device
    generated, tokens = list[int](), torch.tensor([list(prompt)])
    while len(generated) < count:
        inputs = tokens.to(device) if runtime is None else runtime.tensor_to_device(tokens)
        result = model.compute_logits(model(inputs, cache)[:, -1])[0]
        if runtime is not None:
            result = result.argmax() if choose is take_likeliest else result
            runtime.finish_step()
            result = result.cpu()  # host read: the input of the next step
        token = choose(result) if result.dim() else int(result)
        if token == end:
            break
        generated.append(token)
        tokens = torch.tensor([[token]])
    return generated


def place_model(model: nn.Module, arguments: argparse.Namespace) -> Runtime:
    """Move the model to a device, with the kernels that `model.kernels` of its run chooses."""
    section = RuntimeSection(device=arguments.device)
    get_start(choose_device(section)).prepare_environment()
    runtime = create_runtime(section)
    runtime.prepare(model)
    folder = find_run_folder(arguments.run)
    choice = {} if folder is None else read_run_config(folder, _RUN_KEY)["model"]
    choose_kernels(choice.get("kernels", "auto"), runtime.device, model, is_asked=False)
    return runtime


def take_likeliest(logits: Tensor) -> int:
    """Return the likeliest token of logits [V]."""
    return int(logits.argmax())


def create_choice(
    arguments: argparse.Namespace, generator: torch.Generator
) -> Callable[[Tensor], int]:
    """Create the choice of a token from logits [V]: the likeliest, or drawn by `compute_probs`."""
    if arguments.temperature == 0:
        return take_likeliest

    def draw(logits: Tensor) -> int:
        probs = compute_probs(logits, arguments.temperature, arguments.top_k, arguments.top_p)
        return int(torch.multinomial(probs, 1, generator=generator))

    return draw


def compute_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Compute [V] probabilities of tokens to draw from.

    Args:
      top_k: number of likeliest tokens; 0: all.
      top_p: then the fewest of the likeliest whose probabilities add up to this.

    Source: Holtzman et al. 2020, arXiv:1904.09751, section 3.1 (top-p).
    """
    # The largest becomes 0: a temperature near 0 then divides without an inf - inf.
    scaled = (logits.double() - logits.max().double()) / temperature
    values, order = scaled.sort(descending=True, stable=True)
    if 0 < top_k < len(values):
        values[top_k:] = -torch.inf
    probs = values.softmax(dim=0)
    before = probs.cumsum(dim=0) - probs
    probs = torch.where(before < top_p, probs, 0.0)
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse values outside of their ranges, and those without effect."""
    is_warm = 0 <= arguments.temperature < math.inf
    rules = (
        ("--temperature", arguments.temperature, is_warm, "0 or more, and no infinity"),
        ("--seed", arguments.seed, 0 <= arguments.seed <= _MAX_SEED, f"from 0 to {_MAX_SEED}"),
        ("--top-k", arguments.top_k, arguments.top_k >= 0, "0 or more"),
        ("--top-p", arguments.top_p, 0 < arguments.top_p <= 1, "above 0 and at most 1"),
        ("--max-tokens", arguments.max_tokens, arguments.max_tokens > 0, "1 or more"),
    )
    for flag, value, is_right, rule in rules:
        if not is_right:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UserError(f"{flag} ({shown}) must be {rule}; change it")
    if arguments.temperature == 0 and (arguments.top_k or arguments.top_p != 1):
        flag = f"--top-k ({arguments.top_k})" if arguments.top_k else f"--top-p ({arguments.top_p})"
        raise UserError(
            f"{flag} is not supported with --temperature 0, which takes the likeliest token; "
            "remove one of them"
        )
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt ({arguments.prompt!r}) is no UTF-8 at position {error.start}; correct it"
        ) from error


def _find_data(run: str) -> Path:
    """Return the dataset's directory in the configuration beside the weights."""
    folder = find_run_folder(run)
    if folder is None:
        raise UserError(f"{_RUN_KEY} ({run!r}) has no configuration of its data; give --data DIR")
    data = read_run_config(folder, _RUN_KEY)["data"]
    return to_path(data["root"], f"data.root of {_RUN_KEY} ({run})") / data["name"]


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
