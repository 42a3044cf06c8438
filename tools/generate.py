"""Lets a language model go on from a prompt.

    python -m tools.generate runs/transformer_text/RUN --prompt "def main(" --top-k 40
    python -m tools.generate runs/transformer_sequences/RUN --prompt "3 1 4 8" --temperature 0

RUN is a run's directory, an export, a checkpoint or a folder that transformers has saved. Text is
read and shown by the tokenizer that the run's data was made with, which lies in the dataset's
directory (--data, or as the run's configuration says); bytes need none, and a model of the Hub has
a tokenizer.json in its folder. A model of made-up sequences takes and gives numbers of tokens. It
keeps keys, values and states of what it has seen; on --device xla and cuda in room that is taken
once, so that one program serves all tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from models.run_folder import find_run_folder, read_run_config
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
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.generate")
    parser.add_argument("run", metavar=_RUN_KEY, help="run directory, export or checkpoint")
    parser.add_argument("--prompt", default="", help="what the model goes on from")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="default 200")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="divides the logits; 0: the likeliest token"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="likeliest alone; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="the fewest of the likeliest whose probabilities add up to P",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu", help="default cpu")
    parser.add_argument("--data", default="", metavar="DIR", help="directory of tokenizer.json")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Print the prompt and what follows."""
    print(show(arguments))


def show(arguments: argparse.Namespace) -> str:
    """The prompt and its continuation, as text or as numbers.

    Raises:
      UserError: no language model there, or a prompt or a flag that it cannot use.
    """
    _check_flags(arguments)
    model, facts = load_model(arguments.run)
    tokenizer = find_tokenizer(arguments, facts)
    prompt = encode_prompt(arguments.prompt, tokenizer, model.vocab_size)
    # The last token that is chosen is no input.
    _check_length(model, len(prompt) + arguments.max_tokens - 1)
    generator = torch.Generator().manual_seed(arguments.seed)
    choose = create_choice(arguments, generator)
    end = None if tokenizer is None else tokenizer.end
    if arguments.device == "cpu":
        found = generate(model, prompt, arguments.max_tokens, choose, end=end)
    else:
        runtime = place_model(model, arguments)
        found = generate_on_device(runtime, model, prompt, arguments.max_tokens, choose, end=end)
    if tokenizer is None:
        return " ".join(map(str, [*prompt, *found]))
    return tokenizer.decode([*prompt, *found])


def load_model(path: str) -> tuple[nn.Module, JsonMapping]:
    """A language model with the weights of a run, in eval mode, and what was written with them."""
    weights = open_weights(path, _RUN_KEY)
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
    """What the model's tokens mean; none: made-up sequences, whose tokens are numbers.

    Raises:
      UserError: the dataset is not where the run or --data says, or is of another tokenizer.
    """
    told = str(facts.get("tokenizer", ""))
    kind = told.partition(" ")[0]
    if not kind and (shared := load_shared_tokenizer(arguments.run)) is not None:
        return shared
    if not kind and arguments.data:
        raise UserError(
            f"--data ({arguments.data}) means nothing to a model of made-up sequences, whose "
            "tokens are numbers; leave it out"
        )
    if not kind:
        return None
    if kind == ByteTokenizer.kind and not arguments.data:
        return ByteTokenizer()
    directory = to_path(arguments.data, "--data") if arguments.data else _find_data(arguments.run)
    index = read_token_index(directory, "--data")
    if " ".join(filter(None, (index.tokenizer, index.tokenizer_hash))) != told:
        raise UserError(
            f"--data ({directory}) has the tokenizer '{index.tokenizer} {index.tokenizer_hash}', "
            f"the model learnt {told!r}; give the directory that it was trained on"
        )
    return load_tokenizer(kind, directory)


def load_shared_tokenizer(path: str) -> SharedTokenizer | None:
    """Load the tokenizer.json in the folder of a model of the Hub, or None if there is none."""
    weights = open_weights(path, _RUN_KEY)
    if not is_shared(weights.path):
        return None
    folder = open_folder(weights.location)
    if TOKENIZER_FILE not in folder.list_names():
        return None
    with folder.open_local(TOKENIZER_FILE) as file:
        return read_shared_tokenizer(file)


def encode_prompt(text: str, tokenizer: TextTokenizer | None, vocab_size: int) -> list[int]:
    """Tokens of a prompt; an empty one begins where a text begins.

    Raises:
      UserError: it is no list of tokens, where numbers are wanted.
    """
    if tokenizer is not None:
        tokens = tokenizer.encode(text.encode()).tolist()
        tokens = tokens or [end for end in (tokenizer.end,) if end is not None]
        if not tokens or max(tokens) >= vocab_size:
            raise UserError(
                f"--prompt ({text!r}) gives tokens {tokens[:8]}, of which the model knows 0 to "
                f"{vocab_size - 1}; write another prompt"
            )
        return tokens
    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() and int(word) < vocab_size for word in words):
        raise UserError(
            f"--prompt ({text!r}) must be numbers of tokens from 0 to {vocab_size - 1}, as in "
            "'3 1 4': this model has learnt made-up sequences, or no tokenizer.json lies with it"
        )
    return [int(word) for word in words]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    choose: Callable[[Tensor], int],
    *,
    end: int | None = None,
) -> list[int]:
    """Up to `count` tokens that follow a prompt; each is computed from the cache and the last one.

    Args:
      choose: logits [V] -> token.
      end: token behind which nothing follows; it is not given.
    """
    cache, found = model.create_cache(), []
    device = next(model.parameters()).device
    tokens = torch.tensor([list(prompt)], device=device)
    while len(found) < count:
        hidden = model(tokens, cache)[:, -1]
        token = choose(model.compute_logits(hidden)[0])
        if token == end:
            break
        found.append(token)
        tokens = torch.tensor([[token]], device=device)
    return found


def place_model(model: nn.Module, arguments: argparse.Namespace) -> Runtime:
    """The model on a device, computed as `model.kernels` of its run says.

    Raises:
      UserError: there is no such device, or there are no such kernels.
    """
    section = RuntimeSection(device=arguments.device)
    get_start(choose_device(section)).prepare_environment()
    runtime = create_runtime(section)
    runtime.prepare(model)
    folder = find_run_folder(arguments.run)
    choice = {} if folder is None else read_run_config(folder, _RUN_KEY)["model"]
    choose_kernels(choice.get("kernels", "auto"), runtime.device, model, is_asked=False)
    return runtime


@torch.no_grad()
def generate_on_device(
    runtime: Runtime,
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    choose: Callable[[Tensor], int],
    *,
    end: int | None = None,
) -> list[int]:
    """What `generate` gives, by one program for the prompt and one for each token.

    Of a step the token alone is read where the likeliest is taken, else the logits, from which the
    host draws.
    """
    room = len(prompt) + count
    cache = [FixedCache(room) if type(x) is LayerCache else x for x in model.create_cache()]
    found, tokens = [], torch.tensor([list(prompt)])
    while len(found) < count:
        hidden = model(runtime.tensor_to_device(tokens), cache)[:, -1]
        seen = model.compute_logits(hidden)[0]
        if choose is take_likeliest:
            seen = seen.argmax()
        runtime.finish_step()
        told = seen.cpu()  # host read: what the next step begins with
        token = choose(told) if told.dim() else int(told)
        if token == end:
            break
        found.append(token)
        tokens = torch.tensor([[token]])
    return found


def take_likeliest(logits: Tensor) -> int:
    """Of logits [V]."""
    return int(logits.argmax())


def create_choice(
    arguments: argparse.Namespace, generator: torch.Generator
) -> Callable[[Tensor], int]:
    """How a token is chosen from logits [V]: the likeliest, or drawn from `compute_law`."""
    if arguments.temperature == 0:
        return take_likeliest

    def draw(logits: Tensor) -> int:
        law = compute_law(logits, arguments.temperature, arguments.top_k, arguments.top_p)
        return int(torch.multinomial(law, 1, generator=generator))

    return draw


def compute_law(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """[V] probabilities of tokens to draw from.

    Args:
      top_k: the likeliest so many alone; 0: all.
      top_p: then the fewest of the likeliest whose probabilities add up to this.

    Source: Holtzman et al. 2020, arXiv:1904.09751, section 3.1 (top-p).
    """
    # The largest becomes 0: a temperature near 0 then divides without an inf - inf.
    scaled = (logits.double() - logits.max().double()) / temperature
    values, order = scaled.sort(descending=True, stable=True)
    if 0 < top_k < len(values):
        values[top_k:] = -torch.inf
    law = values.softmax(dim=0)
    before = law.cumsum(dim=0) - law
    law = torch.where(before < top_p, law, 0.0)
    return torch.zeros_like(law).scatter(0, order, law / law.sum())


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse values outside of their ranges, and those that would do nothing."""
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
            f"{flag} means nothing to --temperature 0, which takes the likeliest token; leave one "
            "of them out"
        )
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--prompt ({arguments.prompt!r}) is no UTF-8 at place {error.start}; write it as UTF-8"
        ) from error


def _check_length(model: nn.Module, length: int) -> None:
    if model.shape.positions != "rope" and length > model.sequence_length:
        raise UserError(
            f"--max-tokens and the prompt make {length} inputs, but the model knows "
            f"{model.sequence_length} {model.shape.positions} positions; lower --max-tokens"
        )


def _find_data(run: str) -> Path:
    """The dataset's directory, as the configuration beside the weights names it."""
    folder = find_run_folder(run)
    if folder is None:
        raise UserError(f"{_RUN_KEY} ({run!r}) says nothing of its data; give --data DIR")
    data = read_run_config(folder, _RUN_KEY)["data"]
    return to_path(data["root"], f"data.root of {_RUN_KEY} ({run})") / data["name"]


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
