"""What ``tidekv run`` does: load, prefill, decode, and measure."""

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer
from transformers.generation.streamers import BaseStreamer

from memtrace import scopes
from memtrace.sizes import format_size
from tidekv import budgets, options, schedules
from tidekv.arguments import flag_of
from tidekv.engine import Prefill, decode, prefill
from tidekv.errors import DeviceMemoryError, TidekvError, check_choice
from tidekv.loading import PRESETS, encode, load_model
from tidekv.methods import CACHES, cache_of
from tidekv.names import DTYPES
from tidekv.progress import progress_bar
from tidekv.schedules import SCHEDULES, LayerMajor, Schedule
from tidekv.selectors import SELECTORS, Selector

#: The memtrace component of a prompt's token ids.
IDS = "backend/ids"
#: Parameters of a schedule that are flags of their own.
_FLAGS = ("piece_rows", "stream_weights", "host_bridge", "park_caches")


@dataclass(frozen=True)
class Outcome:
    """One answered prompt; the keys of ``run --json``, which ``tidekv --help`` documents."""

    model: str
    dtype: str
    device: str
    schedule: str
    schedule_parameters: dict[str, Any]
    selector: str
    selector_parameters: dict[str, Any]
    cache: str
    cache_parameters: dict[str, Any]
    attention: str
    attention_kernel: str
    scoring: str
    chunk_size: int | None
    prompt_tokens: int
    generated_tokens: int
    rows_kept: int
    cache_bytes: int
    prefill_s: float
    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None
    text: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        """One line; of a prompt that was only read, also how."""
        kept = (
            f"kept {self.rows_kept:,} of {self.prompt_tokens:,} rows per layer and KV head "
            f"({format_size(self.cache_bytes)})"
        )
        first, speed = self.time_to_first_token_s, self.decode_tokens_per_s
        if first is None:
            how = f"{self.schedule}, {self.selector}, {self.cache}; {self.attention_kernel}"
            return f"prefill {self.prefill_s:.2f} s ({how}) · {kept}"
        return (
            f"first token {first:.2f} s · {'-' if speed is None else f'{speed:.1f}'} tokens/s · "
            f"{kept}"
        )


@dataclass(frozen=True)
class Methods:
    """What was chosen on the command line."""

    schedule: Schedule
    selector: Selector | None
    cache_parameters: dict[str, Any]


def methods_of(arguments: argparse.Namespace) -> Methods:
    """The schedule, the selector and the cache, checked against each other.

    Raises:
        TidekvError: one isn't there, has no such parameter, or they don't go together.
    """
    schedule, selector = _schedule(arguments), _selector(arguments)
    cache_of(schedule, selector, arguments.cache)
    return Methods(schedule, selector, _cache_parameters(arguments))


def budget_of(arguments: argparse.Namespace, prompt_tokens: int) -> int | float:
    """The budget that was asked for, else the default one or the whole prompt."""
    if arguments.budget is not None:
        return arguments.budget
    return budgets.default(prompt_tokens)


def run(arguments: argparse.Namespace, *, stream: bool) -> Outcome:
    """Answer the prompt of ``tidekv run``; ``stream`` prints the text as it is generated.

    Raises:
        TidekvError: bad input, or no device memory left.
    """
    if arguments.max_new_tokens < 0:
        raise TidekvError(f"--max-new-tokens must be at least 0, not {arguments.max_new_tokens}.")
    if arguments.batch < 1 or (arguments.batch > 1 and arguments.prompt_tokens is None):
        raise TidekvError(
            f"--batch {arguments.batch} is no number of prompts; use 1, or more with "
            "--prompt-tokens."
        )
    with memory_errors():
        loaded = load(arguments)
        with scopes.component(IDS):
            input_ids = beside_embeddings(loaded.model, _prompt(arguments, loaded))
        return _answer(arguments, loaded, input_ids, stream)


@dataclass(frozen=True)
class Loaded:
    """What reads a prompt; ``tokenizer`` None: the model comes without one."""

    methods: Methods
    model: Any
    tokenizer: Any


def load(arguments: argparse.Namespace) -> Loaded:
    """The methods, and the model where they want it.

    Raises:
        TidekvError: bad input.
    """
    methods = methods_of(arguments)  # checked before the model is loaded
    dtype, device = dtype_of(arguments.dtype), device_of(arguments.device)
    schedule = methods.schedule
    streams = isinstance(schedule, LayerMajor) and schedule.stream_weights
    on_host = streams or arguments.host_embeddings
    untrained = arguments.untrained or arguments.model in PRESETS
    if isinstance(schedule, LayerMajor) and on_host:
        methods = replace(methods, schedule=replace(schedule, device=device))
    model, tokenizer = load_model(
        arguments.model,
        dtype=dtype,
        device="cpu" if on_host else device,
        attention=arguments.attention,
        weights="empty" if arguments.untrained or (on_host and untrained) else "random",
    )
    if on_host:
        _place_layers(model, device, streams=streams, pinned=not untrained)
    return Loaded(methods, model, tokenizer)


def read(
    arguments: argparse.Namespace,
    loaded: Loaded,
    input_ids: torch.Tensor,
    on_layer: Callable[[], None],
) -> Prefill:
    """Prefill (B, S) as the command line says; ``on_layer`` is called after each layer."""
    return prefill(
        loaded.model,
        input_ids,
        schedule=loaded.methods.schedule,
        selector=loaded.methods.selector,
        budget=budget_of(arguments, input_ids.shape[1]),
        cache=functools.partial(CACHES[arguments.cache], **loaded.methods.cache_parameters),
        scoring=arguments.scoring,
        attention=arguments.attention,
        new_tokens=arguments.max_new_tokens,
        on_layer=lambda _: on_layer(),
    )


def _place_layers(model: Any, device: str, *, streams: bool, pinned: bool) -> None:
    """Bring the layers of a model on the host to where they run, or make them ready to go there."""
    layers = model.base_model.layers
    if not streams:
        layers.to(device)
    elif torch.device(device).type == "cuda" and pinned:
        for weight in layers.parameters():  # copies overlap with computing from pinned memory only
            weight.data = weight.data.pin_memory()


def _answer(
    arguments: argparse.Namespace, loaded: Loaded, input_ids: torch.Tensor, stream: bool
) -> Outcome:
    methods, model, tokenizer = loaded.methods, loaded.model, loaded.tokenizer
    prompt_tokens = input_ids.shape[1]
    printer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    shown = stream and tokenizer is not None and len(input_ids) == 1
    clock = Clock(printer if shown else None)
    output = input_ids
    with scopes.request("run", prompt_tokens=prompt_tokens) as request:
        clock.request = request
        start = time.perf_counter()
        with progress_bar("Prefill", total=model.config.num_hidden_layers) as done:
            prefilled = read(arguments, loaded, input_ids, done)
        device = prefilled.logits.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ready = time.perf_counter()
        cache_bytes = prefilled.cache.nbytes()
        if arguments.max_new_tokens:
            model.to(device)  # what of it was on the host during the prefill
            output = decode(
                model,
                input_ids.to(device),
                prefilled,
                max_new_tokens=arguments.max_new_tokens,
                do_sample=False,
                streamer=clock,
            )
        request.generated_tokens = output.shape[1] - prompt_tokens
    new = output[0, prompt_tokens:]  # of a batch the first one stands for all
    elapsed = clock.last - clock.first
    return Outcome(
        model=arguments.model,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        schedule=arguments.schedule,
        schedule_parameters=options.chosen(methods.schedule),
        selector=arguments.selector,
        selector_parameters=options.chosen(methods.selector) if methods.selector else {},
        cache=arguments.cache,
        cache_parameters=methods.cache_parameters,
        attention=arguments.attention,
        attention_kernel=prefilled.attention,
        scoring=arguments.scoring,
        chunk_size=getattr(methods.schedule, "chunk_size", None),
        prompt_tokens=prompt_tokens,
        generated_tokens=len(new),
        rows_kept=prefilled.rows,
        cache_bytes=cache_bytes,
        prefill_s=ready - start,
        time_to_first_token_s=clock.first - start if len(new) else None,
        decode_tokens_per_s=(len(new) - 1) / elapsed if len(new) > 1 else None,
        text=None if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True),
    )


class Clock(BaseStreamer):
    """Notes when the first and the last token came; passes tokens on to ``printer``.

    ``request``: whose first token it is, for a recorder.
    """

    def __init__(self, printer: BaseStreamer | None = None) -> None:
        self.first = self.last = 0.0
        self.request = scopes.Request()
        self._printer = printer
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1  # the first call brings the prompt
        self.last = time.perf_counter()
        if self._calls == 2:
            self.first = self.last
            self.request.first_token()
        if self._printer is not None:
            self._printer.put(value)

    def end(self) -> None:
        if self._printer is not None:
            self._printer.end()


@contextmanager
def memory_errors() -> Iterator[None]:
    """
    Raises:
        DeviceMemoryError: where PyTorch finds no memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # On the CPU, PyTorch says it with a plain RuntimeError.
        plain = not isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if plain and "memory" not in str(error):
            raise
        # On the CPU the place in PyTorch's own code stands before.
        said = str(error).rpartition("DefaultCPUAllocator: ")[2]
        reason = (said or "Out of memory").partition(". ")[0]
        raise DeviceMemoryError(
            f"{reason}; use --schedule layer_major, a smaller --chunk-size or a shorter prompt."
        ) from error


def _schedule(arguments: argparse.Namespace) -> Schedule:
    """The schedule with the parameters given on the command line."""
    name = arguments.schedule
    check_choice("schedule", name, SCHEDULES)
    made = SCHEDULES[name]
    known = options.parameters(made)
    flags = {one: getattr(arguments, one) for one in _FLAGS if getattr(arguments, one) is not None}
    flag = next((one for one in flags if one not in known), None)
    if arguments.host_embeddings and "device" not in known:
        flag = "host_embeddings"
    if flag is not None:
        raise TidekvError(
            f"The schedule {name} has no {flag_of(flag)}; drop it, or use --schedule layer_major."
        )
    pairs = [*arguments.schedule_option, *(f"{one}={value}" for one, value in flags.items())]
    given = options.parse(f"schedule {name}", made, pairs)
    return schedules.make(made(**given), arguments.chunk_size)


def _selector(arguments: argparse.Namespace) -> Selector | None:
    """The selector with the parameters given on the command line."""
    name = arguments.selector
    if name == "none":
        if arguments.selector_option:
            raise TidekvError("--selector-option needs a selector; drop it, or name one.")
        return None
    check_choice("selector", name, [*SELECTORS, "none"])
    made = SELECTORS[name]
    return made(**options.parse(f"selector {name}", made, arguments.selector_option))


def _cache_parameters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the cache's layers, as given on the command line or by default."""
    name = arguments.cache
    check_choice("cache", name, CACHES)
    made = CACHES[name].layer_class
    given = options.parse(f"cache {name}", made, arguments.cache_option)
    made(**given)  # checks them
    return options.defaults(made) | given


def dtype_of(name: str | None) -> torch.dtype | None:
    """
    Raises:
        TidekvError: no floating-point type has this name.
    """
    if name is None:
        return None
    check_choice("dtype", name, DTYPES)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def device_of(name: str) -> str:
    """The name of a device that is there.

    Raises:
        TidekvError: it isn't.
    """
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise TidekvError(f"There is no device {name!r}; use cpu or cuda.") from error
    if kind not in ("cpu", "cuda"):
        raise TidekvError(f"Device {name!r} can't answer a prompt; use cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TidekvError("This PyTorch sees no CUDA device; use --device cpu.")
    return name


def _prompt(arguments: argparse.Namespace, loaded: Loaded) -> torch.Tensor:
    """Token ids of the prompt, (B, S)."""
    if arguments.prompt_tokens is None:
        return read_prompt(arguments.prompt_file, arguments.model, loaded.tokenizer)
    check_prompt_tokens(arguments.prompt_tokens)
    return random_prompt(loaded.model, arguments.batch, arguments.prompt_tokens)


def random_prompt(model: Any, batch: int, tokens: int) -> torch.Tensor:
    """Token ids (B, S), the same ones each time."""
    seed = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, tokens), generator=seed)


def beside_embeddings(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Token ids where they are looked up: on the host, if that is where the embeddings are."""
    return input_ids.to(model.get_input_embeddings().weight.device)


def check_prompt_tokens(number: int | None) -> None:
    """
    Raises:
        TidekvError: no prompt has this number of tokens.
    """
    if number is not None and not 1 <= number < 1 << 63:
        raise TidekvError(f"--prompt-tokens must be at least 1 and below 2⁶³, not {number}.")


def read_prompt(file: Path, model: str, tokenizer: Any) -> torch.Tensor:
    """Token ids of a file's text, (1, S).

    Args:
        model: the name of the model whose tokenizer it is.

    Raises:
        TidekvError: the file is no text, or there is no tokenizer.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TidekvError(
            f"The prompt file {file} can't be read as UTF-8 text ({error})."
        ) from error
    if tokenizer is None:
        raise TidekvError(
            f"{model} comes without a tokenizer, which text needs; use run --prompt-tokens N, or "
            "another model."
        )
    return encode(tokenizer, text)
