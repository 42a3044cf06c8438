"""Language modelling: the next token of windows of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from big_vision.input.source import require_facts
from big_vision.input.text.windows import TokenFacts
from datasets import TokenBatch
from losses.base import LossOutput
from losses.tasks.chunked import (
    Score,
    choose_chunk,
    count_next_tokens,
    find_right_tokens,
    score_in_chunks,
)
from losses.weighted import WeightedLoss, create_weighted_loss
from models.teachers.tokens import TokenTeacher, create_token_teachers
from models.transformer import LanguageModel
from tasks.language.check import LanguageCheck, LanguageFacts
from tasks.language.teaching import TokenTeaching, count_answers, create_place_weights
from tasks.protocol import SumOver
from tasks.teachers.taught import CachedTask, Worth
from utils.json_types import JsonMapping
from utils.metrics import Evaluation
from utils.runtime.processes.sequence import count_sequence_parts

if TYPE_CHECKING:
    from engine import Plan, TrainState
    from tasks.protocol import Loaders
    from tasks.teachers.cache.rows import Columns
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

# e to more than this is no float.
_LARGEST_EXPONENT = 700.0


class Language(CachedTask[TokenBatch, TokenTeacher]):
    """Windows of tokens -> hidden states -> a loss over all positions, chunk by chunk."""

    score_name = "-loss"
    hint = "its weights and its dtype"
    check = LanguageCheck
    synthetic = "tasks.language.synthetic:SyntheticLanguage"
    facts: LanguageFacts
    losses: WeightedLoss
    teaching: TokenTeaching

    def __init__(self, config: RunConfig, facts: LanguageFacts, loaders: Loaders) -> None:
        self.config = config
        self.tokens = require_facts(loaders["eval"].facts, TokenFacts, config.data.source)
        self.unit = ("tokens", self.tokens.sequence_length)
        self.facts = facts
        self.losses = create_weighted_loss(config.distill)
        self.teaching = TokenTeaching(config, self.losses, self.tokens)
        self._devices = 1
        self._token_bytes = torch.tensor(self.tokens.token_bytes, dtype=torch.float32)
        self._places = len(self.tokens.judged) or self.tokens.sequence_length
        self._judged = create_place_weights(self.tokens)

    def to_device(self, runtime: Runtime) -> None:
        self._devices = runtime.local_devices
        self._token_bytes = runtime.upload(self.tokens.token_bytes)
        if self._judged is not None:
            self._judged = runtime.upload(self._judged.tolist())

    def prepare(self, student: nn.Module) -> None:
        self.losses.build(*self.facts.feature_shapes)

    def attach(self, runtime: Runtime, state: TrainState, plan: Plan, stream: JsonMapping) -> None:
        self.teaching.open(self, runtime, state, plan, stream)

    def wrap(self, model: nn.Module, weight: float) -> TokenTeacher:
        return TokenTeacher(model, weight=weight)

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossOutput:
        """Return mean nats of the next token with the z-loss, and the terms of the teachers."""
        z_weight = self.config.train.z_loss
        targets = batch.tokens[:, 1:]
        states = model(batch.tokens[:, :-1])
        lesson = self.teaching.begin(batch, self._judged)
        valid, names = batch.mask.float()[:, None], list[str]()

        def score(logits: Tensor, places: slice) -> tuple[Tensor, Tensor]:
            nats, normaliser = count_next_tokens(logits, targets[:, places])
            kept = self._judge(valid, places)
            nats, squares = (nats * kept).sum(), (normaliser * normaliser * kept).sum()
            task = nats + z_weight * squares
            terms = self.teaching.score(lesson, logits, targets[:, places], places)
            names[:] = ["task", "z_loss", *terms]
            total = self.losses.weigh({"task": task, **terms}, lesson.term_scales)
            return total, torch.stack([nats, squares, *terms.values()])

        total, sums = self.score_states(model, states, score, count_answers(self.config))
        count = valid.sum().clamp(min=1) * self._places
        total, terms = total / count, dict(zip(names, sums / count, strict=True))
        of_layers = self.teaching.score_layers(batch, states)
        if of_layers:
            total = total + self.losses.weigh(of_layers, lesson.term_scales)
            terms |= {name: value.detach() for name, value in of_layers.items()}
        if (balance := getattr(model, "balance_loss", None)) is not None:
            terms["balance"] = (balance * valid[:, 0]).sum() / valid.sum().clamp(min=1)
            total, terms["balance"] = total + terms["balance"], terms["balance"].detach()
        if not z_weight:
            del terms["z_loss"]
        return LossOutput(total, {**terms, "total": total.detach()})

    def count(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Return sums over valid windows: mean nats, share of correct tokens, mean bytes, and one.

        Float32 counts windows exactly up to 2^24, of which there are fewer than tokens.
        """
        targets = batch.tokens[:, 1:]
        valid = batch.mask.float()

        def score(logits: Tensor, places: slice) -> tuple[Tensor, Tensor]:
            nats, _ = count_next_tokens(logits, targets[:, places])
            is_right = find_right_tokens(logits, targets[:, places])
            judged = (self._judge(values, places) for values in (nats, is_right))
            sums = [(values.sum(dim=1) * valid).sum() for values in judged]
            return sums[0], torch.stack(sums)

        _, sums = self.score(model, batch, score)
        sums = [*sums.unbind(), self._count_bytes(targets, valid)]
        return torch.stack([*(value / self._places for value in sums), valid.sum()])

    def summarise(self, sums: Tensor) -> Evaluation:
        """Return `loss` in nats a token, `perplexity`, `accuracy` in percent; the score is -loss.

        Of text also `bits_per_byte`: of the very bytes that the predicted tokens stand for.
        """
        nats, right, size, windows = sums.tolist()
        share = 1.0 / max(windows, 1.0)
        loss = nats * share
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, _LARGEST_EXPONENT)),
            "accuracy": 100.0 * right * share,
            "examples": windows,
        }
        if size:
            metrics["bits_per_byte"] = nats / size / math.log(2)
        return Evaluation(metrics, -loss)

    def compute_cached_outputs(self, batch: TokenBatch, columns: Columns) -> tuple[Tensor, ...]:
        """Return [B, T, 2 k + 1] of each teacher, an output at each position, chunk by chunk."""
        limit, answers = self.config.train.logits_mib, count_answers(self.config)
        examples, (form,) = -(-len(batch) // self._devices), self.facts.answers
        chunk = choose_chunk(examples * answers, form.places, form.width, limit)
        return self.teaching.condense(batch, [column.top_k for column in columns], chunk)

    def rate_teacher(self, metrics: dict[str, float]) -> Worth:
        loss, limit = metrics["loss"], math.log(self.tokens.vocab_size)
        floor, advice = f"chance ({limit:.4f} nats a token)", "its weights and its tokenizer"
        return Worth(f"loss {loss:.4f}", loss >= limit, floor, advice)

    def compare(self, model: nn.Module, sum_over: SumOver) -> dict[str, float]:
        """Return the percentage of evaluation tokens predicted the same by each teacher."""
        count = partial(self._count_agreement, model)
        return self.teaching.compare_own("agreement", sum_over, count, scale=100.0)

    def create_inputs(self, examples: int) -> Tensor:
        return torch.zeros((examples, self.tokens.sequence_length), dtype=torch.int32)

    def create_teachers(self, device: str = "cpu") -> list[TokenTeacher]:
        return create_token_teachers(self.config.distill, self.tokens, device=device)

    def forward_for_tracing(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the logits of all tokens at once, which a step makes chunk by chunk."""
        assert isinstance(model, LanguageModel)
        return model.compute_logits(model(inputs))

    def count_flops(self, model: nn.Module) -> float | None:
        """Count three forward passes of the student, and one of each live teacher."""
        models: list[Any] = [model, *(teacher.model for teacher in self.teaching.teachers)]
        if not all(hasattr(module, "count_flops") for module in models):
            return None
        length = self.tokens.sequence_length
        student, *teachers = (module.count_flops(length) for module in models)
        return 3.0 * student + sum(teachers)

    def describe(self, metrics: Mapping[str, float]) -> str:
        bits = metrics.get("bits_per_byte")
        return (
            f"loss {metrics['loss']:.4f} nats a token, perplexity {metrics['perplexity']:.4g}, "
            f"{'' if bits is None else f'{bits:.4f} bits a byte, '}"
            f"accuracy {metrics['accuracy']:.2f}, {metrics['examples']:.0f} windows"
        )

    def _count_agreement(
        self, model: nn.Module, teacher: TokenTeacher, batch: TokenBatch
    ) -> Tensor:
        """Return shares of tokens, and windows, summed over valid windows."""
        states, valid = teacher(batch.tokens[:, :-1]), batch.mask.float()

        def score(logits: Tensor, places: slice) -> tuple[Tensor, Tensor]:
            answers = teacher.compute_logits(states[:, places])
            same = (logits.argmax(dim=-1) == answers.argmax(dim=-1)).float()
            count = (self._judge(same, places).sum(dim=1) * valid).sum()
            return count, count.reshape(1)

        hidden = model(batch.tokens[:, :-1])
        _, sums = self.score_states(model, hidden, score, answers=2)
        return torch.cat([sums / self._places, valid.sum().reshape(1)])

    def _judge(self, values: Tensor, places: slice) -> Tensor:
        """Return values [B, n or 1] of some positions, zeros where nothing is evaluated."""
        return values if self._judged is None else values * self._judged[places]

    def score(self, model: nn.Module, batch: TokenBatch, score: Score) -> tuple[Tensor, Tensor]:
        """Sum a score of logits [B, n, V] and their positions over the chunks of a batch."""
        return self.score_states(model, model(batch.tokens[:, :-1]), score)

    def score_states(
        self, model: nn.Module, hidden: Tensor, score: Score, answers: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Sum likewise over hidden states [B, T, C]; `answers` logits of a token exist at once."""
        examples, length = hidden.shape[:2]
        assert isinstance(model, LanguageModel | TokenTeacher)
        weight = model.head_weight
        limit, parts = self.config.train.logits_mib / answers, count_sequence_parts()
        own = choose_chunk(-(-examples // self._devices), length // parts, len(weight), limit)
        return score_in_chunks(
            hidden, weight, score, own * parts, devices=self._devices, parts=parts
        )

    def _count_bytes(self, targets: Tensor, valid: Tensor) -> Tensor:
        """Count bytes of text that the targets of valid windows stand for; 0 if unknown."""
        if not len(self._token_bytes):
            return torch.zeros_like(valid.sum())
        size = self._judge(self._token_bytes[targets.long()], slice(None))
        return (size.sum(dim=1) * valid).sum()
