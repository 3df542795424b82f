"""``prefill`` a prompt into a compact cache, ``decode`` from it, or ``generate`` in one call."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from memtrace import scopes
from tidekv import attention as attention_backends
from tidekv import budgets, compat, methods, schedules, selectors
from tidekv.caches import CompactCache
from tidekv.caches.compact import past_window
from tidekv.errors import InfeasibleError, check_choice
from tidekv.models import StockDecoder, check_family, decoder_of
from tidekv.names import SCORINGS
from tidekv.schedules import LayerMajor, Schedule, Task
from tidekv.selectors import Selector
from tidekv.selectors.base import Request


@dataclass(frozen=True)
class Prefill:
    """A prompt that was read.

    Attributes:
        cache: what decoding needs; a transformers ``Cache`` that grows as tokens are generated.
        logits: of the last prompt token, (B, V).
        prompt_tokens: S.
        rows: the budget: rows per layer and KV head, on average; S with no eviction.
        attention: the kernel that computed attention, in words.
        indices: kept positions by layer, if ``keep_indices``: (B, Hkv, rows), ascending; or a
            list of those of each head, (rows,), by prompt, where heads keep unequal numbers.
    """

    cache: CompactCache
    logits: torch.Tensor
    prompt_tokens: int
    rows: int
    attention: str
    indices: tuple[Any, ...] | None


def prefill(
    model: Any,
    input_ids: torch.Tensor,
    *,
    schedule: str | Schedule = "layer_major",
    selector: str | Selector | None = "snapkv",
    budget: int | float = 1024,
    evict: bool = True,
    cache: str | Callable[[int], CompactCache] = "full_precision",
    chunk_size: int | None = None,
    scoring: str = "blockwise",
    attention: str | None = None,
    attention_mask: torch.Tensor | None = None,
    keep_indices: bool = False,
    new_tokens: int | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> Prefill:
    """Read a prompt; keep ``budget`` rows of each layer.

    One call at a time for a model, which some families and schedules change while they run: another
    thread's call waits. The model's own ``forward`` doesn't, so leave it alone meanwhile.

    Args:
        model: a transformers causal language model of a supported family.
        input_ids: (B, S), all of one length.
        schedule: a name in :data:`tidekv.schedules.SCHEDULES`, or a schedule with its own
            parameters.
        selector: a name in :data:`tidekv.selectors.SELECTORS`, a selector with its own
            parameters, or None, which keeps every row.
        budget: rows per layer and KV head (int) or share of the prompt (float in (0, 1]).
        evict: False keeps every row (``selector``, ``budget`` and ``scoring`` are then unused).
        cache: how kept rows are held, see :func:`tidekv.methods.cache_of`.
        chunk_size: rows that a schedule advances at a time, if it has chunks.
        scoring: "blockwise" (bounded memory) or "dense" (reference).
        attention: one of :data:`tidekv.names.ATTENTIONS`; None = the model's own setting.
        attention_mask: (B, S); checked to be all ones, since padded batches are not supported.
            Without one every token counts, padding too.
        keep_indices: keep the positions of the kept rows.
        new_tokens: how many will be generated, if that is known: what can't be decoded so far is
            refused at once.
        on_layer: called with the index of each layer that is done, e.g. for a progress bar.

    Raises:
        InfeasibleError: something of this can't be done; nothing was allocated.
    """
    check_family(model)
    with _alone_with(model):
        made, task = _check(
            model,
            input_ids,
            schedule=schedules.make(schedule, chunk_size),
            selector=selectors.make(selector) if evict else None,
            budget=budget,
            cache=cache,
            scoring=scoring,
            attention=attention or model.config._attn_implementation,
            attention_mask=attention_mask,
            keep_indices=keep_indices,
            new_tokens=new_tokens,
            on_layer=on_layer,
        )
        with torch.no_grad(), scopes.phase("prefill"):
            filled = made.run(task)
    filled.cache.window = compat.sliding_window(model.config)
    return Prefill(
        cache=filled.cache,
        logits=filled.logits,
        prompt_tokens=task.prompt_tokens,
        rows=task.choice.request.rows if task.choice else task.prompt_tokens,
        attention=task.backend.kernel,
        indices=tuple(one.by_head() for one in filled.kept) if filled.kept else None,
    )


def decode(
    model: Any, input_ids: torch.Tensor, prefilled: Prefill, **generate_kwargs: Any
) -> torch.Tensor:
    """Continue with transformers' own ``generate``; takes all of its keyword arguments.

    One call at a time for a model, as :func:`prefill`: it stands in for the model's ``forward``
    for one step.

    The first token too is chosen by ``generate`` (its sampling, logits processors, streamers and
    stopping criteria apply), from the logits that ``prefill`` computed. Grows ``prefilled.cache``.

    Returns:
        (B, S + new), or what ``generate`` returns for the arguments given.

    Raises:
        InfeasibleError: the prefill isn't of this prompt, or was decoded from before, or can't be
            decoded so far, or the model is spread over devices.
    """
    check_family(model)
    with _alone_with(model):
        return _decode(model, input_ids, prefilled, **generate_kwargs)


def _decode(
    model: Any, input_ids: torch.Tensor, prefilled: Prefill, **generate_kwargs: Any
) -> torch.Tensor:
    _check_ids(input_ids)
    if not isinstance(prefilled, Prefill):
        raise InfeasibleError(
            f"decode continues from what prefill returned, not from a {type(prefilled).__name__}."
        )
    prompts, seen = len(prefilled.logits), prefilled.prompt_tokens
    # Beams of a single token leave no token in the cache, but more entries in its batch.
    if (prefilled.cache.batch_size(), prefilled.cache.get_seq_length()) != (prompts, seen):
        raise InfeasibleError("This prefill was decoded from already; call prefill again.")
    if input_ids.shape != (prompts, seen):
        raise InfeasibleError(
            f"The prefill is of {prompts} × {seen} tokens but input_ids has "
            f"{input_ids.shape[0]} × {input_ids.shape[1]}; pass the same input_ids to both."
        )
    if generate_kwargs.get("use_cache") is False:
        raise InfeasibleError("Decoding continues from the cache, so use_cache can't be False.")
    # Without a mask, generate takes padding tokens inside the prompt for padding.
    mask = generate_kwargs.pop("attention_mask", None)
    _check_mask(input_ids, mask)
    if len(_places(model)) > 1:
        raise InfeasibleError(
            "Decoding needs all of the model's weights on one device; bring them there with "
            "model.to(device)."
        )
    new_tokens = _new_tokens(model, seen, generate_kwargs)
    if new_tokens is not None:
        prefilled.cache.check_window(seen + new_tokens - 1)  # the last one is not read again
    prefilled.cache.to(model.device)  # from where it was parked
    if mask is None:
        with scopes.component("backend"):
            mask = torch.ones_like(input_ids)
    with scopes.phase("decode"), _first_logits(model, prefilled):
        result: torch.Tensor = model.generate(
            input_ids,
            attention_mask=mask,
            **{compat.cache_argument(model): prefilled.cache},
            **generate_kwargs,
        )
    return result


def generate(model: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """:func:`prefill`, then :func:`decode`; ``options`` go to whichever knows them.

    Up to 128 new tokens, unless the options or the model's generation config limit them.
    """
    check_family(model)
    _check_ids(input_ids)
    ours = {name: options.pop(name) for name in _PREFILL_OPTIONS & options.keys()}
    limited = options.keys() & {"max_new_tokens", "max_length", "generation_config"}
    if not limited and model.generation_config.max_new_tokens is None:
        options["max_new_tokens"] = 128
    new_tokens = _new_tokens(model, input_ids.shape[1], options)
    prefilled = prefill(model, input_ids, new_tokens=new_tokens, **ours)
    return decode(model, input_ids, prefilled, **options)


def _new_tokens(model: Any, prompt_tokens: int, options: Mapping[str, Any]) -> int | None:
    """How many tokens ``generate`` adds at most with these options; None: it has its own limit."""
    config = options.get("generation_config") or model.generation_config
    new: int | None = options.get("max_new_tokens", config.max_new_tokens)
    length: int | None = options.get("max_length", config.max_length)
    if new is None and length is not None:
        new = length - prompt_tokens
    return new if isinstance(new, int) else None  # what else there is transformers refuses


_turns: WeakKeyDictionary[Any, RLock] = WeakKeyDictionary()
_turns_change = Lock()


@contextmanager
def _alone_with(model: Any) -> Iterator[None]:
    """Wait until no other thread reads or answers a prompt with this model."""
    with _turns_change:
        turn = _turns.setdefault(model, RLock())
    with turn:
        yield


def _check_ids(input_ids: Any) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise InfeasibleError(
            f"input_ids must be a tensor of token ids, not a {type(input_ids).__name__}; a "
            "tokenizer's output has it as .input_ids."
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InfeasibleError(f"input_ids must be int64 or int32, not {input_ids.dtype}.")
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise InfeasibleError(
            f"input_ids must be (batch, prompt tokens) with at least one token, "
            f"not {tuple(input_ids.shape)}."
        )


def _check_vocabulary(model: Any, input_ids: torch.Tensor) -> None:
    """Of ids on the host only: to look at those of a device is to wait for it."""
    if input_ids.device.type != "cpu":
        return
    known = model.get_input_embeddings().num_embeddings
    with scopes.component("Temp"):
        least, most = (int(one) for one in input_ids.aminmax())
    if not 0 <= least <= most < known:
        raise InfeasibleError(
            f"Token ids must be in 0..{known - 1}, the model's vocabulary, not "
            f"{least if least < 0 else most}; use the model's own tokenizer."
        )


def _check_mask(input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Every token must count: rows of the cache stand at one position for the whole batch."""
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise InfeasibleError(
            f"attention_mask must be a tensor like input_ids, not a {type(mask).__name__}."
        )
    if mask is not None and (mask.shape != input_ids.shape or not bool((mask == 1).all())):
        raise InfeasibleError(
            "Padded batches are not supported; pass prompts of one length, or one at a time."
        )


_PREFILL_OPTIONS = frozenset(inspect.getfullargspec(prefill).kwonlyargs) - {"new_tokens"}


def _check(
    model: Any,
    input_ids: torch.Tensor,
    *,
    schedule: Schedule,
    selector: Selector | None,
    budget: int | float,
    cache: str | Callable[[int], CompactCache],
    scoring: str,
    attention: str,
    attention_mask: torch.Tensor | None,
    keep_indices: bool,
    new_tokens: int | None,
    on_layer: Callable[[int], None] | None,
) -> tuple[Schedule, Task]:
    """Everything that can be wrong with a request, before anything is allocated."""
    _check_ids(input_ids)
    decoder = decoder_of(model, _device(model, schedule))
    check_choice("scoring", scoring, SCORINGS)
    empty = _made_cache(methods.cache_of(schedule, selector, cache), decoder, selector)
    backend = attention_backends.decide(
        attention,
        dtype=decoder.dtype,
        device=decoder.device,
        head_dim=decoder.head_dim,
        softcap=decoder.softcap,
    )
    _check_mask(input_ids, attention_mask)
    if model.training:
        raise InfeasibleError(
            "The model is in training mode, where dropout applies; call model.eval() first."
        )
    prompt_tokens = input_ids.shape[1]
    window = compat.sliding_window(model.config)
    if window is not None and window < prompt_tokens:
        raise InfeasibleError(
            f"The model has layers with a sliding window of {window} tokens, shorter than the "
            f"prompt ({prompt_tokens}); use a shorter prompt, or a model with full attention."
        )
    choice = None
    if selector is not None:
        rows = budgets.rows(budget, prompt_tokens)
        request = Request(len(decoder.layers), prompt_tokens, rows, scoring)
        selector.check(request)
        fewer = rows < prompt_tokens or selector.head_budgets
        if window is not None and fewer and prompt_tokens + (new_tokens or 0) - 1 > window:
            raise past_window(window)
        choice = selector.begin(request)
    _check_vocabulary(model, input_ids)  # last: looking makes two numbers
    return schedule, Task(decoder, input_ids, choice, backend, empty, keep_indices, on_layer)


def _made_cache(
    make: Callable[[int], CompactCache], decoder: StockDecoder, selector: Selector | None
) -> CompactCache:
    """A cache of the model's layers, with nothing in it."""
    layers = len(decoder.layers)
    try:
        made = make(layers)
    except TypeError as error:
        raise InfeasibleError(f"The cache can't be made for {layers} layers: {error}.") from error
    if not isinstance(made, CompactCache) or len(made.layers) != layers:
        raise InfeasibleError(
            f"What makes a cache must return a CompactCache of {layers} layers, or one of its "
            f"kinds, not a {type(made).__name__} of {len(getattr(made, 'layers', ()))}."
        )
    for layer in made.layers:
        unequal = selector is not None and selector.head_budgets
        layer.check(head_size=decoder.head_dim, unequal_heads=unequal)
    return made


def _places(module: torch.nn.Module) -> list[str]:
    """The devices that parameters are on."""
    return sorted({str(one.device) for one in module.parameters()})


def _device(model: Any, schedule: Schedule) -> torch.device | None:
    """Where the prompt is computed; None: where the model is.

    Raises:
        InfeasibleError: weights are elsewhere, and nobody says that they shall come, or there is
            no such device.
    """
    if not isinstance(schedule, LayerMajor) or schedule.device is None:
        places = _places(model)
        if len(places) > 1:
            raise InfeasibleError(
                f"The model's weights are on {' and '.join(places)}; bring them to one device, or "
                "use layer_major with a device that parts of it visit."
            )
        return None
    try:
        device = torch.empty(0, device=schedule.device).device  # with its number
    except (RuntimeError, AssertionError) as error:  # the latter of a PyTorch without CUDA
        raise InfeasibleError(
            f"There is no device {str(schedule.device)!r} here; use one that PyTorch sees."
        ) from error
    layers = _places(model.base_model.layers)
    if layers != [str(device)] and not schedule.stream_weights:
        raise InfeasibleError(
            f"The model's layers are on {' and '.join(layers)}, not on {device}; use "
            "stream_weights=True, or bring them there."
        )
    return device


@contextmanager
def _first_logits(model: Any, prefilled: Prefill) -> Iterator[None]:
    """Answer the model's next ``forward``, for the last prompt token, with the known logits.

    ``generate`` has no way to be given them. The cache reports one token fewer until then, so
    ``generate`` feeds exactly the last token; the forward that it calls does not run.
    """
    forward, cache = model.forward, prefilled.cache
    replaced = vars(model).get("forward")  # as compiled models and accelerate's hooks have

    @functools.wraps(forward)  # generate inspects the signature
    def replay(*args: Any, **kwargs: Any) -> Any:
        if cache.pending == 0:
            return forward(*args, **kwargs)
        if kwargs["input_ids"].shape[1] != 1:
            raise InfeasibleError(
                "The first step of generate must be of one token; assisted decoding is "
                "not supported."
            )
        cache.pending = 0
        copies = kwargs["input_ids"].shape[0] // prefilled.logits.shape[0]
        if copies > 1:  # beams and return sequences
            cache.batch_repeat_interleave(copies)
        logits = prefilled.logits.to(kwargs["input_ids"].device)
        logits = logits.repeat_interleave(copies, dim=0).unsqueeze(1)
        return compat.output_with_cache(logits, cache)

    cache.pending = 1
    model.forward = replay
    try:
        yield
    finally:
        cache.pending = 0
        if replaced is None:
            del model.forward
        else:
            model.forward = replaced
