"""What ``tidekv run`` does: load, prefill, decode, and measure."""

import argparse
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from memtrace import scopes
from memtrace.sizes import format_size
from tidekv import selectors
from tidekv.engine import Prefill, decode, prefill
from tidekv.errors import DeviceMemoryError, TidekvError, check_choice
from tidekv.loading import encode, load_model
from tidekv.progress import progress_bar
from tidekv.selectors import SELECTORS, Selector

_DEFAULT_BUDGET = 1024  # rows, or the whole prompt where it is shorter
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Outcome:
    """One answered prompt; the keys of ``run --json``, which ``tidekv --help`` documents."""

    model: str
    dtype: str
    device: str
    schedule: str
    selector: str
    attention: str
    scoring: str
    chunk_size: int
    prompt_tokens: int
    generated_tokens: int
    rows_kept: int
    cache_bytes: int
    time_to_first_token_s: float
    decode_tokens_per_s: float | None
    text: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        speed = self.decode_tokens_per_s
        return (
            f"first token {self.time_to_first_token_s:.2f} s · "
            f"{'-' if speed is None else f'{speed:.1f}'} tokens/s · "
            f"kept {self.rows_kept:,} of {self.prompt_tokens:,} rows per layer and KV head "
            f"({format_size(self.cache_bytes)})"
        )


def run(arguments: argparse.Namespace, *, stream: bool) -> Outcome:
    """Answer the prompt of ``tidekv run``; ``stream`` prints the text as it is generated.

    Raises:
        TidekvError: bad input, or no device memory left.
    """
    selector = _selector(arguments)
    if arguments.max_new_tokens < 1:
        raise TidekvError(f"--max-new-tokens must be at least 1, not {arguments.max_new_tokens}.")
    dtype = None
    if arguments.dtype is not None:
        check_choice("dtype", arguments.dtype, _DTYPES)
        dtype = _DTYPES[arguments.dtype]
    device = _device(arguments.device)
    try:
        model, tokenizer = load_model(
            arguments.model, dtype=dtype, device=device, attention=arguments.attention
        )
        input_ids = _prompt(arguments, model, tokenizer).to(device)
        return _answer(arguments, model, tokenizer, input_ids, selector, stream)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise  # on the CPU, PyTorch says it with a plain RuntimeError
        reason = (str(error) or "Out of memory").partition(". ")[0]
        raise DeviceMemoryError(
            f"{reason}; use --schedule layer_major, a smaller --chunk-size or a shorter prompt."
        ) from error


def _answer(
    arguments: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    selector: Selector | None,
    stream: bool,
) -> Outcome:
    prompt_tokens = input_ids.shape[1]
    printer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock = _Clock(printer if stream and tokenizer is not None else None)
    with scopes.request("run", prompt_tokens=prompt_tokens) as request:
        start = time.perf_counter()
        with progress_bar("Prefill", total=model.config.num_hidden_layers) as done:
            prefilled: Prefill = prefill(
                model,
                input_ids,
                schedule=arguments.schedule,
                selector=selector,
                budget=arguments.budget or min(_DEFAULT_BUDGET, prompt_tokens),
                chunk_size=arguments.chunk_size,
                cache=arguments.cache,
                scoring=arguments.scoring,
                attention=arguments.attention,
                on_layer=lambda _: done(),
            )
        cache_bytes = prefilled.cache.nbytes()
        output = decode(
            model,
            input_ids,
            prefilled,
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            streamer=clock,
        )
        request.generated_tokens = output.shape[1] - prompt_tokens
    new = output[0, prompt_tokens:]
    elapsed = clock.last - clock.first
    return Outcome(
        model=arguments.model,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        schedule=arguments.schedule,
        selector=arguments.selector,
        attention=arguments.attention,
        scoring=arguments.scoring,
        chunk_size=arguments.chunk_size,
        prompt_tokens=prompt_tokens,
        generated_tokens=len(new),
        rows_kept=prefilled.rows,
        cache_bytes=cache_bytes,
        time_to_first_token_s=clock.first - start,
        decode_tokens_per_s=(len(new) - 1) / elapsed if len(new) > 1 else None,
        text=None if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True),
    )


class _Clock(BaseStreamer):
    """Notes when the first and the last token came; passes tokens on to ``printer``."""

    def __init__(self, printer: BaseStreamer | None) -> None:
        self.first = self.last = 0.0
        self._printer = printer
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1  # the first call brings the prompt
        self.last = time.perf_counter()
        if self._calls == 2:
            self.first = self.last
        if self._printer is not None:
            self._printer.put(value)

    def end(self) -> None:
        if self._printer is not None:
            self._printer.end()


def _selector(arguments: argparse.Namespace) -> Selector | None:
    """The selector with the parameters given on the command line."""
    given = {
        name: getattr(arguments, name)
        for name in ("window", "sinks")
        if getattr(arguments, name) is not None
    }
    if arguments.selector == "none":
        if given:
            raise TidekvError(f"--{next(iter(given))} needs a selector; drop it, or name one.")
        return None
    check_choice("selector", arguments.selector, [*SELECTORS, "none"])
    chosen: Any = SELECTORS[arguments.selector]
    unknown = given.keys() - {field.name for field in fields(chosen)}
    if unknown:
        raise TidekvError(f"The selector {arguments.selector} has no --{min(unknown)}; drop it.")
    return selectors.make(chosen(**given))


def _device(name: str) -> str:
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise TidekvError(f"There is no device {name!r}; use cpu or cuda.") from error
    if kind not in ("cpu", "cuda"):
        raise TidekvError(f"Device {name!r} can't answer a prompt; use cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TidekvError("This PyTorch sees no CUDA device; use --device cpu.")
    return name


def _prompt(arguments: argparse.Namespace, model: Any, tokenizer: Any) -> torch.Tensor:
    """Token ids of the prompt, (1, S)."""
    if arguments.prompt_tokens is not None:
        if arguments.prompt_tokens < 1:
            raise TidekvError(f"--prompt-tokens must be at least 1, not {arguments.prompt_tokens}.")
        seed = torch.Generator().manual_seed(0)
        shape = (1, arguments.prompt_tokens)
        return torch.randint(model.config.vocab_size, shape, generator=seed)
    try:
        text = arguments.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TidekvError(
            f"The prompt file {arguments.prompt_file} can't be read as UTF-8 text ({error})."
        ) from error
    if tokenizer is None:
        raise TidekvError(
            f"{arguments.model} comes without a tokenizer; use --prompt-tokens N instead."
        )
    return encode(tokenizer, text)
