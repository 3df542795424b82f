"""What ``tidekv serve-trace`` does: a workload, one request after the other, in one process.

The model stays, caches and hidden states go: what is left after a request is what the allocator
keeps, or a leak. Run it under ``memtrace record`` to see which.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memtrace import scopes
from tidekv.engine import decode, prefill
from tidekv.errors import DeviceMemoryError, TidekvError
from tidekv.loading import encode, load_model
from tidekv.methods import CACHES
from tidekv.running import (
    IDS,
    Clock,
    Methods,
    budget_of,
    device_of,
    dtype_of,
    memory_errors,
    methods_of,
)
from tidekv.workloads import Request


@dataclass(frozen=True)
class Served:
    """What became of one request.

    Attributes:
        id, prompt_tokens, new_tokens: of the request; the tokens that there were.
        outcome: ``ok``, ``oom`` or ``error``.
        first_token_s, tokens_per_s: None where there was no first or no second token.
        error: what went wrong, in a sentence.
    """

    id: str
    prompt_tokens: int | None
    new_tokens: int
    outcome: str
    seconds: float
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """One line."""
        length = "" if self.prompt_tokens is None else f"{self.prompt_tokens:,} tokens, "
        if self.outcome != "ok":
            return f"{self.id}: {length}{self.outcome}: {self.error}"
        first = "" if self.first_token_s is None else f", first token {self.first_token_s:.2f} s"
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        return f"{self.id}: {length}{self.seconds:.2f} s{first}{speed}"


def serve(
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    begin: Callable[[], object] = lambda: None,
) -> Iterator[Served]:
    """Answer requests in their order; one that fails is told of, and the next one goes on.

    ``begin`` is called when the model is there. Arrivals are not waited for: what memory does
    doesn't depend on idle time.

    Raises:
        TidekvError: bad input, or no memory for the model.
    """
    methods = methods_of(arguments)
    with memory_errors():
        model, tokenizer = load_model(
            arguments.model,
            dtype=dtype_of(arguments.dtype),
            device=device_of(arguments.device),
            attention=arguments.attention,
        )
    begin()
    for request in requests:
        yield _answered(arguments, methods, model, tokenizer, request)


def _answered(
    arguments: argparse.Namespace, methods: Methods, model: Any, tokenizer: Any, request: Request
) -> Served:
    start = time.perf_counter()
    length = request.prompt_tokens
    try:
        with scopes.component(IDS):
            ids = _ids(request, model, tokenizer)
        length = ids.shape[1]
        with memory_errors(), scopes.request(request.id, prompt_tokens=length) as recorded:
            clock = Clock()
            clock.request = recorded
            new = _generate(arguments, methods, model, ids, request.new_tokens, clock)
            recorded.generated_tokens = new
    except TidekvError as error:
        outcome = "oom" if isinstance(error, DeviceMemoryError) else "error"
        seconds = time.perf_counter() - start
        return Served(request.id, length, 0, outcome, seconds, error=str(error))
    elapsed = clock.last - clock.first
    return Served(
        id=request.id,
        prompt_tokens=length,
        new_tokens=new,
        outcome="ok",
        seconds=time.perf_counter() - start,
        first_token_s=clock.first - start if new else None,
        tokens_per_s=(new - 1) / elapsed if new > 1 and elapsed > 0 else None,
    )


def _ids(request: Request, model: Any, tokenizer: Any) -> torch.Tensor:
    """Token ids of a request's prompt, (1, S), where the model is."""
    if request.prompt is not None:
        if tokenizer is None:
            raise TidekvError("the prompt is a text, and this model comes without a tokenizer.")
        return encode(tokenizer, request.prompt).to(model.device)
    seed = torch.Generator().manual_seed(0)
    shape = (1, request.prompt_tokens or 1)
    return torch.randint(model.config.vocab_size, shape, generator=seed).to(model.device)


def _generate(
    arguments: argparse.Namespace,
    methods: Methods,
    model: Any,
    ids: torch.Tensor,
    new_tokens: int,
    clock: Clock,
) -> int:
    """How many tokens were generated."""
    length = ids.shape[1]
    prefilled = prefill(
        model,
        ids,
        schedule=methods.schedule,
        selector=methods.selector,
        budget=_fitting(budget_of(arguments, length), length),
        cache=functools.partial(CACHES[arguments.cache], **methods.cache_parameters),
        scoring=arguments.scoring,
        attention=arguments.attention,
        new_tokens=new_tokens,
    )
    if not new_tokens:
        return 0
    output = decode(
        model, ids, prefilled, max_new_tokens=new_tokens, do_sample=False, streamer=clock
    )
    return int(output.shape[1]) - length


def _fitting(budget: int | float, length: int) -> int | float:
    """Of a prompt that is shorter than the budget, all rows are kept."""
    return min(budget, length) if isinstance(budget, int) else budget
