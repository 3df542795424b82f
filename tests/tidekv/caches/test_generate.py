"""Plain ``generate`` with each cache: the tokens that the reference chooses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.tidekv.caches.reference import (
    FakeQuantised,
    Kept,
    ask,
    full_cache,
    generate,
    reference,
    store,
)
from tidekv.caches import CompactCache, QuantisedCache, RaggedCache

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "several": {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3},
    "several beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}


@dataclass
class Case:
    """A cache that holds what was kept of ``ids``, and what it is compared to."""

    model: Any
    ids: torch.Tensor
    kept: Kept
    cache: CompactCache

    def fill(self, cache: CompactCache | None = None) -> CompactCache:
        cache = cache or self.cache
        store(cache, full_cache(self.model, self.ids), self.kept)
        return cache

    def next(self, **way: Any) -> torch.Tensor:
        """12 more tokens behind the prompt and one more."""
        return generate(self.model, _repeated(self.cache, way), self._fed(), **way)

    def expected(self, **way: Any) -> torch.Tensor:
        if isinstance(self.cache, QuantisedCache):
            fake = self.fill(FakeQuantised(3, group=8, residual=16))
            return generate(self.model, _repeated(fake, way), self._fed(), **way)
        full = _repeated(full_cache(self.model, self.ids), way)
        with reference(self.model, self.kept):
            return generate(self.model, full, self._fed(), **way)

    def _fed(self) -> torch.Tensor:
        return torch.cat((self.ids, self.ids[:, :1]), dim=1)


def _repeated(cache: Any, way: dict[str, Any]) -> Any:
    """As the engine does for beams and returned sequences."""
    copies = way.get("num_beams", 1) if way.get("num_beams") else way.get("num_return_sequences", 1)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


@pytest.fixture(params=["compact", "layers differ", "ragged", "quantised", "no eviction"])
def case(request: Any, stock: Callable[..., Any], prompt: Any, evenly: Any, unevenly: Any) -> Case:
    ids = prompt(60, 2)
    kept, cache = {
        "compact": lambda: (evenly(60, 30, 30, 30, batch=2), CompactCache(3)),
        "layers differ": lambda: (evenly(60, 40, 3, 25, batch=2), CompactCache(3)),
        "ragged": lambda: (unevenly(60, 2), RaggedCache(3)),
        "quantised": lambda: (
            evenly(60, 40, 3, 25, batch=2),
            QuantisedCache(3, group=8, residual=16),
        ),
        "no eviction": lambda: (
            evenly(60, 60, 60, 60, batch=2),
            QuantisedCache(3, group=8, residual=16),
        ),
    }[request.param]()
    return Case(stock(), ids, kept, cache)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_reference(case, way):
    case.fill()
    expected = case.expected(**WAYS[way])
    assert torch.equal(case.next(**WAYS[way]), expected)
    assert case.cache.get_seq_length() == 60 + 12
    case.cache.reset()
    assert case.cache.get_seq_length() == case.cache.nbytes() == 0
    assert case.cache.rows() == [0, 0, 0]
    case.fill()
    assert torch.equal(case.next(**WAYS[way]), expected)


def test_logits_depend_on_what_is_kept(case):
    """Else the tests above would show nothing."""
    full, tokens = full_cache(case.model, case.ids), case.ids[:, :9]
    logits = ask(case.model, full, tokens)
    unlike = (ask(case.model, case.fill(), tokens) - logits).norm() / logits.norm()
    assert unlike > 0.01


def test_after_reset_a_prompt_is_read_again(case):
    case.fill()
    case.next(**WAYS["beams"])
    case.cache.reset()
    actual = ask(case.model, case.cache, case.ids)
    torch.testing.assert_close(actual, ask(case.model, CompactCache(3), case.ids))


def test_tokens_that_were_guessed_wrong_are_removed(case):
    if isinstance(case.cache, QuantisedCache):
        pytest.skip("what is quantised depends on the tokens that came and went")
    case.fill()
    right, wrong = case.ids[:, :6], case.ids[:, 10:20]
    expected = ask(case.model, case.fill(type(case.cache)(3)), right)
    ask(case.model, case.cache, right[:, :2])
    ask(case.model, case.cache, wrong)
    case.cache.crop(-10)
    assert case.cache.get_seq_length() == 62
    actual = ask(case.model, case.cache, right[:, 2:])
    torch.testing.assert_close(actual, expected[:, 2:], rtol=1e-4, atol=1e-5)
