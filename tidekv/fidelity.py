"""How far a prefill's hidden states and next-token distributions are from those of one forward.

What is compared, at every position of the prompt:

- hidden states: the last layer's output after the final norm. Before it, the few positions with
  massive activations (the first token above all) would be most of the norm of all;
- next-token distributions: the model's own head on the same states.

A schedule computes these as it computes any prefill; the layer-major one, which needs the last
layer's output for the prompt's last row only, computes the other rows too, as it does in the layers
before. What a selector drops at the end of a layer is not seen by any row of the prompt under
layer-major, so TideKV must come out as Tide-NoEvict does, and is measured to show it.

Shapes: B batch, S prompt rows, n rows of a block, d hidden size, V vocabulary.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tidekv import budgets, selectors
from tidekv.engine import prefill
from tidekv.loading import load_model
from tidekv.methods import cache_of, name_of
from tidekv.models import StockDecoder, decoder_of
from tidekv.models.stock import Step
from tidekv.options import chosen
from tidekv.progress import progress_bar
from tidekv.running import check_prompt_tokens, device_of, dtype_of, memory_errors, read_prompt
from tidekv.schedules import (
    SCHEDULES,
    Chunked,
    Filled,
    LayerMajor,
    Online,
    Schedule,
    Task,
    WholePrompt,
)
from tidekv.selectors import SELECTORS, Recent, Request, Selector

#: Numbers of a block of logits, (n, V), that are worked on at a time.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Fidelity:
    """One line of the table.

    Attributes:
        method: as the paper names it.
        schedule: that ran.
        selector: None where nothing was evicted.
        relative_l2: ‖H - H*‖ / ‖H*‖ over all positions' hidden states, H* of one forward.
        cosine: between hidden states of a position, mean over positions.
        top1_agreement: share of positions with the same most likely next token. (In bfloat16 equal
            logits are common; the lowest token counts, under both.)
        js_divergence: of the next-token distributions, natural logarithm, mean over positions.
    """

    method: str
    schedule: str
    selector: str | None
    relative_l2: float
    cosine: float
    top1_agreement: float
    js_divergence: float


def js_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Jensen–Shannon divergence (natural logarithm) of distributions given by logits: (n, V) → (n).

    With m = (p + q) / 2 it is ½·KL(p‖m) + ½·KL(q‖m), in 0..ln 2. For u = (p - q) / (p + q),

        JS = ½ · Σ m · ((1 + u)·log(1 + u) + (1 - u)·log(1 - u)),

    where nothing cancels if p and q are nearly equal.
    """
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    u = (log_p - log_q).div_(2).tanh_()
    twice_m = log_p.exp_().add_(log_q.exp_())
    terms = torch.special.xlog1py(1 + u, u).add_(torch.special.xlog1py(1 - u, -u))
    return terms.mul_(twice_m).sum(-1).div_(4).clamp_(min=0)


class Comparison:
    """Means over positions that come block by block."""

    def __init__(self) -> None:
        self._positions = 0
        #: ‖H - H*‖², ‖H*‖², cosines, agreements, divergences
        self._sums = torch.zeros(5, dtype=torch.float64)

    def add(
        self,
        hidden: torch.Tensor,
        reference: torch.Tensor,
        logits: torch.Tensor,
        reference_logits: torch.Tensor,
    ) -> None:
        """
        Args:
            hidden, reference: (n, d).
            logits, reference_logits: (n, V).
        """
        hidden, reference = hidden.double(), reference.double()
        agree = logits.argmax(-1) == reference_logits.argmax(-1)
        parts = (
            (hidden - reference).square(),
            reference.square(),
            torch.cosine_similarity(hidden, reference, dim=-1),
            agree,
            js_divergence(logits.float(), reference_logits.float()),
        )
        self._sums += torch.stack([part.double().sum() for part in parts]).cpu()
        self._positions += len(hidden)

    def result(self, method: str, schedule: str, selector: str | None) -> Fidelity:
        """What was measured of a method."""
        squared, norm, *sums = self._sums.tolist()
        means = (one / self._positions for one in sums)
        return Fidelity(method, schedule, selector, math.sqrt(squared / norm), *means)


#: A method's name, schedule and selector.
_Run = tuple[str, Schedule, Selector | None]


def _runs(selector: str, chunk_size: int) -> list[_Run]:
    evicting = selectors.make(selector)
    assert evicting is not None
    return [
        ("Full-OneShot", WholePrompt(), None),
        ("Full-Chunked", Chunked(chunk_size=chunk_size), None),
        ("Tide-NoEvict", LayerMajor(chunk_size=chunk_size), None),
        ("TideKV", LayerMajor(chunk_size=chunk_size), evicting),
        (f"Block-{type(evicting).__name__}", Online(chunk_size=chunk_size), evicting),
        ("Block-recent", Online(chunk_size=chunk_size), Recent()),
    ]


def compare(
    model: Any,
    input_ids: torch.Tensor,
    *,
    selector: str = "snapkv",
    budget: int | float = 1024,
    chunk_size: int = 512,
    on_layer: Callable[[int], None] | None = None,
) -> list[Fidelity]:
    """Full-OneShot, Full-Chunked, Tide-NoEvict, TideKV, and evicting after every chunk.

    Args:
        model: a transformers causal language model of a supported family.
        input_ids: (B, S).
        selector: of TideKV, and of the first of the two that evict after every chunk; the other
            keeps the last rows.
        budget: rows per layer and KV head (int) or share of the prompt (float in (0, 1]).
        chunk_size: rows that a schedule advances at a time.
        on_layer: called with the index of each layer that is done, of each method.

    Raises:
        InfeasibleError: this can't be done.
    """
    runs = _runs(selector, chunk_size)
    prompt_tokens = input_ids.shape[1]
    request = Request(
        model.config.num_hidden_layers, prompt_tokens, budgets.rows(budget, prompt_tokens)
    )
    for _, schedule, evicts in runs:  # before the first of them runs
        schedule.check()
        cache_of(schedule, evicts, "full_precision")
        if evicts is not None:
            evicts.check(request)
    compared, reference = [], None
    for method, schedule, evicts in runs:
        states = final_states(
            model, input_ids, schedule, selector=evicts, budget=budget, on_layer=on_layer
        )
        if reference is None:
            reference = states
        chosen_by = None if evicts is None else name_of(SELECTORS, type(evicts))
        measured = _measure(model, states, reference)
        compared.append(measured.result(method, name_of(SCHEDULES, type(schedule)), chosen_by))
    return compared


def final_states(
    model: Any, input_ids: torch.Tensor, schedule: Schedule, **options: Any
) -> torch.Tensor:
    """The last layer's output for every row, before the final norm, under a schedule: (B, S, d).

    Args:
        options: of :func:`tidekv.prefill`.

    Raises:
        InfeasibleError: as :func:`tidekv.prefill` has it.
    """
    shape = (*input_ids.shape, model.config.hidden_size)
    states = torch.empty(shape, dtype=model.dtype, device=model.device)

    class Recorded(type(schedule)):  # type: ignore[misc]
        def run(self, task: Task) -> Filled:
            with _recording(task.decoder, states):
                return super().run(task)

    recorded = Recorded(**chosen(schedule))
    prefill(model, input_ids, schedule=recorded, **options)
    return states


@contextmanager
def _recording(decoder: StockDecoder, states: torch.Tensor) -> Iterator[None]:
    """Note what comes out of the last layer, for all rows."""
    advance, last = decoder.step, len(decoder.layers) - 1

    def step(step: Step, hidden: torch.Tensor) -> None:
        advance(step, hidden)
        if step.index == last:
            states[:, step.span.start : step.span.stop] = hidden

    def whole_prompt(_: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape == states.shape:  # the model's own forward
            states.copy_(args[0])

    decoder.step = decoder.project = step  # type: ignore[method-assign]
    decoder.last_row = lambda step, hidden: None  # type: ignore[method-assign]
    handle = decoder.final_norm.register_forward_pre_hook(whole_prompt)
    try:
        yield
    finally:
        handle.remove()


def _measure(model: Any, states: torch.Tensor, reference: torch.Tensor) -> Comparison:
    """Compare states (B, S, d) block by block: there is no room for logits (B, S, V)."""
    decoder, comparison = decoder_of(model), Comparison()
    rows = max(_BLOCK // model.config.vocab_size, 1)
    with torch.no_grad(), decoder.running():
        for blocks in zip(
            *(one.flatten(0, 1).split(rows) for one in (states, reference)), strict=True
        ):
            # Rows as prompts of one token: the head answers for the last row of each prompt.
            alone = [block.unsqueeze(1) for block in blocks]
            comparison.add(
                *(decoder.final_norm(one).squeeze(1) for one in alone),
                *(decoder.logits(one) for one in alone),
            )
    return comparison


@dataclass(frozen=True)
class Report:
    """What ``tidekv fidelity`` prints; the keys of its ``--json``."""

    model: str
    dtype: str
    device: str
    prompt_tokens: int
    budget: int
    selector: str
    chunk_size: int
    methods: list[Fidelity]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """For people to read."""
        return (
            f"{self.model}, {self.dtype}, {self.prompt_tokens:,} prompt tokens, chunks of "
            f"{self.chunk_size}, {self.budget:,} rows kept per layer and KV head\n\n"
            f"{as_table(self.methods)}"
        )


def run(arguments: argparse.Namespace) -> Report:
    """Load and compare, as ``tidekv fidelity`` asks.

    Raises:
        TidekvError: bad input, or no device memory left.
    """
    check_prompt_tokens(arguments.prompt_tokens)
    dtype, device = dtype_of(arguments.dtype), device_of(arguments.device)
    with memory_errors():
        model, tokenizer = load_model(arguments.model, dtype=dtype, device=device)
        input_ids = read_prompt(arguments.prompt_file, arguments.model, tokenizer).to(device)
        input_ids = input_ids[:, : arguments.prompt_tokens]
        runs = len(_runs(arguments.selector, arguments.chunk_size))
        with progress_bar("Fidelity", total=runs * model.config.num_hidden_layers) as done:
            compared = compare(
                model,
                input_ids,
                selector=arguments.selector,
                budget=arguments.budget,
                chunk_size=arguments.chunk_size,
                on_layer=lambda _: done(),
            )
    return Report(
        arguments.model,
        str(model.dtype).removeprefix("torch."),
        str(input_ids.device),
        input_ids.shape[1],
        budgets.rows(arguments.budget, input_ids.shape[1]),
        arguments.selector,
        arguments.chunk_size,
        compared,
    )


def as_table(compared: Sequence[Fidelity]) -> str:
    """One line a method."""
    lines = [f"{'':<14}{'relative L2':>13}{'cosine':>10}{'top-1':>8}{'JS (nats)':>12}"]
    lines += [
        f"{one.method:<14}{one.relative_l2:>13.2e}{one.cosine:>10.6f}{one.top1_agreement:>8.4f}"
        f"{one.js_divergence:>12.2e}"
        for one in compared
    ]
    return "\n".join(lines)
