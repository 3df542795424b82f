"""Heads of unequal length in a few bits: each is what it would be alone, in fewer bytes."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tidekv.caches.reference import FakeQuantised, ask, full_cache, reference, store
from tests.tidekv.live_bytes import LiveBytes
from tidekv.budgets import quantised
from tidekv.caches import QuantisedLayer, QuantisedRaggedCache, QuantisedRaggedLayer
from tidekv.errors import InfeasibleError

#: Of two prompts' two heads: fewer rows than stay in full, as many, one more, and none.
COUNTS = torch.tensor([[20, 32], [33, 0]])
SIZES = {"group": 8, "residual": 32}


def rows_of(count: int, size: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    wide = torch.randn(1, size, generator=generator) * 4  # as keys' channels are
    return (torch.randn(count, size, generator=generator) * wide + wide).to(dtype)


def stored(
    counts: torch.Tensor,
    rows: torch.Tensor,
    least: int = 0,
    longest: int | None = None,
    **options: int,
) -> QuantisedRaggedLayer:
    layer = QuantisedRaggedLayer(**({**SIZES, **options}))
    layer.store_flat(rows, rows + 1, counts, prompt_tokens=500, least=least, longest=longest)
    layer.finish()
    return layer


def new(count: int = 1, batch: int = 2) -> torch.Tensor:
    return rows_of(batch * 2 * count).view(batch, 2, count, 32)


@pytest.mark.parametrize(
    "counts", [COUNTS, COUNTS + 7, COUNTS * 40, torch.full((2, 2), 60), torch.tensor([[1, 95]])]
)
def test_each_head_is_quantised_as_if_it_were_alone(counts):
    """Bit for bit: no group has rows of two heads, also with more rows than a block."""
    rows, least = rows_of(int(counts.sum())), int(counts.min())
    keys, values = stored(counts, rows, least).update(
        new(batch=len(counts)), new(batch=len(counts))
    )
    start = 0
    for head, count in enumerate(counts.flatten().tolist()):
        own = rows[None, None, start : start + count]
        alone = QuantisedLayer(**SIZES)
        alone.store(own, own + 1, dropped=0)
        alone.finish()
        one = new(batch=len(counts)).flatten(0, 1)[None, head : head + 1]
        for mine, expected in zip((keys, values), alone.update(one, one), strict=True):
            assert torch.equal(mine.flatten(0, 1)[head, :count], expected[0, 0, :count])
            assert torch.equal(mine.flatten(0, 1)[head, -1], expected[0, 0, -1])
        start += count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_are_those_of_the_formula(bits, dtype):
    """Kept rows, and decoded ones in full and quantised."""
    counts, group, residual, item = COUNTS * 40, 8, 32, dtype.itemsize
    rows = rows_of(int(counts.sum()), dtype=dtype)
    with LiveBytes(counts) as live:
        layer = stored(counts, rows, bits=bits)
        del rows

        def expected(decoded: int) -> float:
            old, newest = quantised(int(counts.sum()), 4, least=0, residual=residual, group=group)
            new_old = -(-max(decoded - residual, 0) // group) * group
            few = old + 4 * new_old
            full = newest + 4 * (decoded - new_old)
            packed = few * 32 * (bits + 2 * 8 * item / group) / 8
            return 2 * (packed + full * 32 * item) + 8 * (2 * 4 + 2)

        for decoded in range(45):
            held = list(layer.tensors())
            assert sum(t.untyped_storage().nbytes() for t in held) == expected(decoded)
            assert live.live["KV_res/compact"] == expected(decoded) - counts.nbytes
            assert live.live["Temp"] == 0
            del held
            layer.update(new().to(dtype), new().to(dtype))
    assert layer.rows() == counts.double().mean() + 45
    assert layer.get_seq_length() == 545


@pytest.mark.parametrize("least", range(12))
def test_both_parts_are_as_long_as_some_prompt_needs(least):
    """Of every way to share rows among three heads."""
    group, residual = 4, 8
    for rows in range(3 * least, 50):
        needed = [
            sum(-(-max(n - residual, 0) // group) * group for n in counts)
            for counts in itertools.product(range(least, rows + 1), repeat=3)
            if sum(counts) == rows
        ]
        sizes = quantised(rows, 3, least=least, residual=residual, group=group)
        assert sizes == (max(needed), rows - min(needed))


def test_what_is_held_does_not_depend_on_the_prompt():
    """The device isn't asked: fake tensors have no counts to tell."""
    sizes = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        counts = torch.empty(2, 2, dtype=torch.int64)
        layer = stored(counts, torch.empty(255, 32), least=10, longest=255)
        sizes.append([tensor.shape for tensor in layer.tensors()])
    for counts in ([[60, 67], [117, 11]], [[64, 63], [64, 64]]):
        layer = stored(torch.tensor(counts), rows_of(255), least=10)
        sizes.append([tensor.shape for tensor in layer.tensors()])
    assert sizes[0] == sizes[1] == sizes[2]


def test_nothing_to_quantise_takes_no_more_than_full_rows():
    layer = stored(torch.tensor([[20, 32]]), rows_of(52), least=20)
    assert sum(tensor.nbytes for tensor in layer.tensors()) == 2 * 52 * 32 * 4 + 8 * (2 + 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_question_equals_all_rows_with_a_mask_but_for_the_rounding(stock, prompt, unevenly, batch):
    """At once and token by token; with 4 bits the error is about that of equal heads."""
    model, ids, question = stock(), prompt(80, batch), prompt(9, batch)
    full, kept = full_cache(model, ids), unevenly(80, batch)
    with reference(model, kept):
        expected = ask(model, full, question)
    answers = []
    for sizes in ([9], [1] * 9):
        cache = QuantisedRaggedCache(3, bits=4, group=8, residual=16)
        store(cache, full_cache(model, ids), kept)
        steps = [ask(model, cache, part) for part in question.split(sizes, dim=1)]
        answers.append(torch.cat(steps, dim=1))
        assert cache.get_seq_length() == 89
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
    equal = FakeQuantised(3, bits=4, group=8, residual=16)
    store(equal, full_cache(model, ids), [torch.ones_like(keep) for keep in kept])
    plain = ask(model, full_cache(model, ids), question)
    bound = (ask(model, equal, question) - plain).norm() / plain.norm()
    error = (answers[0] - expected).norm() / expected.norm()
    assert 0 < error <= 2 * bound


def test_beams_share_the_kept_rows():
    layer = stored(COUNTS * 3, rows_of(255))
    kept = [tensor for tensor in layer.tensors() if tensor.dtype == torch.uint8]
    plain, _ = layer.update(new(), new())
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([2, 1, 3, 0]))
    layer.batch_select_indices(torch.tensor([0, 1, 2]))
    keys, _ = layer.update(new(batch=3), new(batch=3))
    torch.testing.assert_close(keys[:, :, :-1], plain[[1, 0, 1]])
    left = [tensor for tensor in layer.tensors() if tensor.dtype == torch.uint8]
    assert all(a is b for a, b in zip(kept, left, strict=True))


def test_crop_reset_and_moving():
    layer = stored(COUNTS * 3, rows_of(255))
    before, _ = layer.update(new(40), new(40))
    layer.to(torch.device("cpu"))
    layer.crop(-8)
    with pytest.raises(InfeasibleError, match="only the last 24 can be removed"):
        layer.crop(-25)
    keys, _ = layer.update(new(), new())
    assert torch.equal(keys[:, :, :99], before[:, :, :99])
    assert torch.equal(keys[:, :, 107:131], before[:, :, 107:131])
    layer.reset()
    assert list(layer.tensors()) == []
    equal = rows_of(160).view(2, 2, 40, 32)
    layer.store(equal, equal, dropped=3)
    layer.finish()
    assert not layer.ragged
    assert layer.keys.shape[2] == 32


def test_a_head_size_that_groups_do_not_divide_is_refused():
    layer = QuantisedRaggedLayer()
    with pytest.raises(InfeasibleError, match="groups of 32 channels.* head of 80"):
        rows = rows_of(9, 80)
        layer.store_flat(rows, rows, torch.tensor([[4, 5]]), prompt_tokens=9)
