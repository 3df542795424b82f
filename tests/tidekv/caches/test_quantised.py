"""Quantised rows: their error, their bytes, which rows they are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tidekv.caches.reference import FakeQuantised, ask, full_cache, store
from tests.tidekv.live_bytes import LiveBytes
from tidekv.caches import CompactCache, QuantisedCache, QuantisedLayer
from tidekv.caches.packing import dequantise, pack, quantise, unpack
from tidekv.errors import InfeasibleError

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def rows_of(count: int, size: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    # Channels of other sizes and offsets, as keys have them.
    wide = torch.randn(1, 1, 1, size, generator=generator) * 4
    return (torch.randn(2, 3, count, size, generator=generator) * wide + wide).to(dtype)


def fill(layer: QuantisedLayer, keys: torch.Tensor, values: torch.Tensor, dropped: int = 0) -> None:
    """What a schedule does with rows that are final."""
    layer.store(keys, values, dropped=dropped)
    layer.finish()


@given(st.data(), st.sampled_from((2, 4)))
def test_codes_survive_packing(data, bits):
    count = data.draw(st.integers(1, 5)) * 8
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    numbers = torch.tensor(codes, dtype=torch.uint8).view(2, -1)
    packed = pack(numbers, bits)
    assert packed.numel() * 8 == count * bits
    assert torch.equal(unpack(packed, bits), numbers)


@given(
    st.lists(st.floats(-1000, 1000, width=16), min_size=8, max_size=8),
    st.sampled_from((2, 4)),
    st.sampled_from(DTYPES),
)
def test_error_is_half_a_step(numbers, bits, dtype):
    """And what rounding scale and zero to the dtype takes from the range."""
    group = torch.tensor(numbers).to(dtype)
    packed = quantise(group, bits)
    exact = group.double()
    step = (exact.max() - exact.min()) / (2**bits - 1)
    unit = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).smallest_normal * 2**bits
    rounding = unit * (exact.min().abs() + (exact.max() - exact.min())) + tiny
    # fp32 arithmetic on the way: a few units of the largest number.
    arithmetic = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    error = (dequantise(packed, bits).double() - exact).abs().max()
    assert error <= step / 2 + rounding + arithmetic


@pytest.mark.parametrize("bits", [2, 4])
def test_a_group_is_really_of_few_levels(bits):
    """One scale per number would lose nothing, and show nothing."""
    layer = QuantisedLayer(bits=bits, residual=32)
    fill(layer, rows_of(96), rows_of(96))
    keys, values = layer.update(rows_of(1), rows_of(1))
    by_channel = keys[:, :, :64].unflatten(2, (2, 32)).transpose(3, 4).reshape(-1, 32)
    by_row = values[:, :, :64].reshape(-1, 32)
    for groups in (by_channel, by_row):
        levels = max(len(group.unique()) for group in groups)
        assert 2 < levels <= 2**bits
    # Each along its own axis only.
    assert max(len(group.unique()) for group in keys[:, :, :64].reshape(-1, 32)) > 2**bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("rows", "old"), [(128, 0), (129, 32), (160, 32), (161, 64), (1300, 1184)])
def test_bytes_are_those_of_the_formula(dtype, bits, rows, old):
    """Also with more rows than are worked on at a time."""
    with LiveBytes() as live:
        layer = QuantisedLayer(bits=bits)
        fill(layer, rows_of(rows, dtype=dtype), rows_of(rows, dtype=dtype), dropped=7)
        item = dtype.itemsize
        packed = old * 32 * (bits + 2 * 8 * item / 32) / 8
        expected = 2 * 3 * 2 * (packed + (rows - old) * 32 * item)
        assert sum(tensor.untyped_storage().nbytes() for tensor in layer.tensors()) == expected
        assert live.live["KV_res/compact"] == expected
        assert live.live["Temp"] == 0
    assert layer.keys.shape[2] == rows - old
    assert layer.get_seq_length() == rows + 7
    assert layer.rows() == rows


def test_3_bits_per_value():
    """2 bits, groups of 32, 16-bit scales and zeros, as the paper has them."""
    layer = QuantisedLayer()
    fill(layer, *(rows_of(160, 64, torch.bfloat16) for _ in range(2)))
    quantised = list(layer.tensors())[2:]
    assert sum(tensor.nbytes for tensor in quantised) * 8 == 3 * (2 * 2 * 3 * 32 * 64)


@settings(max_examples=30)
@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 20), max_size=8),
    st.sampled_from(((8, 8), (8, 24), (16, 16))),
)
def test_residual_holds_the_newest_rows_exactly(prompt_rows, steps, sizes):
    group, residual = sizes
    layer = QuantisedLayer(bits=4, group=group, residual=residual)
    rows = rows_of(prompt_rows + sum(steps), 16)
    fill(layer, rows[:, :, :prompt_rows], rows[:, :, :prompt_rows] + 1)
    seen = prompt_rows
    for step in steps:
        new = rows[:, :, seen : seen + step]
        old = group * math.ceil(max(seen - residual, 0) / group)
        keys, values = layer.update(new, new + 1)
        seen += step
        assert keys.shape[2] == values.shape[2] == seen
        assert torch.equal(keys[:, :, old:], rows[:, :, old:seen])
        assert torch.equal(values[:, :, old:], rows[:, :, old:seen] + 1)
        assert old == 0 or not torch.equal(keys[:, :, :old], rows[:, :, :old])
    left = layer.keys.shape[2]
    assert left == seen if seen <= residual else residual - group < left <= residual


def test_rows_one_by_one_are_quantised_as_those_at_once():
    at_once, one_by_one = (QuantisedLayer(residual=32) for _ in range(2))
    rows = rows_of(200)
    fill(at_once, rows, rows)
    fill(one_by_one, rows[:, :, :50], rows[:, :, :50])
    for row in rows[:, :, 50:].split(1, dim=2):
        one_by_one.update(row, row)
    pairs = zip(at_once.tensors(), one_by_one.tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_only_the_layer_that_runs_is_dequantised():
    with LiveBytes() as live:
        cache = QuantisedCache(4, residual=32)
        for layer in cache.layers:
            fill(layer, rows_of(160), rows_of(160))
        live.own_peak.clear()
        for index in range(4):
            cache.update(rows_of(1), rows_of(1), index)
        full = 2 * 2 * 3 * 161 * 32 * 4
        assert full < live.own_peak["Temp"] < 2 * full
        assert live.live["Temp"] == 0


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("by_layer", [(60, 60, 60), (60, 20, 45)])
def test_question_equals_rows_quantised_by_hand(stock, prompt, evenly, heads, by_layer):
    model = stock(num_key_value_heads=heads)
    ids, question = prompt(80, 2), prompt(9, 2)
    kept = [keep.repeat_interleave(heads // 2, dim=1) for keep in evenly(80, *by_layer, batch=2)]
    full = full_cache(model, ids)
    cache, fake = QuantisedCache(3, group=8, residual=16), FakeQuantised(3, group=8, residual=16)
    store(cache, full, kept)
    store(fake, full, kept)
    for part in question.split([4, 1, 4], dim=1):
        expected = ask(model, fake, part)
        torch.testing.assert_close(ask(model, cache, part), expected, rtol=1e-4, atol=1e-5)


def test_a_prompt_is_read_in_full_and_quantised_after(stock, prompt):
    """Without a schedule: every row is kept until the first step of decoding."""
    model, ids = stock(), prompt(80)
    cache, full = QuantisedCache(3, group=8, residual=16), CompactCache(3)
    assert torch.equal(ask(model, cache, ids), ask(model, full, ids))
    assert [layer.keys.shape[2] for layer in cache.layers] == [80] * 3
    assert torch.equal(ask(model, cache, ids[:, :1]), ask(model, full, ids[:, :1]))
    assert [layer.keys.shape[2] for layer in cache.layers] == [9] * 3
    assert not torch.equal(ask(model, cache, ids[:, :1]), ask(model, full, ids[:, :1]))


def test_batch_operations():
    layer = QuantisedLayer(residual=32)
    fill(layer, rows_of(100), rows_of(100))
    before = layer.update(rows_of(1), rows_of(1))
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([3, 0, 1, 2]))
    layer.batch_select_indices(torch.tensor([0, 2, 3]))
    order = [1, 0, 1]
    after = layer.update(rows_of(1)[order], rows_of(1)[order])
    for plain, changed in zip(before, after, strict=True):
        assert torch.equal(plain[order], changed[:, :, :-1])


def test_crop_and_reset():
    layer = QuantisedLayer(group=8, residual=8)
    fill(layer, rows_of(20), rows_of(20))
    layer.update(rows_of(12), rows_of(12))
    with pytest.raises(InfeasibleError, match="only the last 8 can be removed"):
        layer.crop(-9)
    layer.crop(-5)
    assert (layer.get_seq_length(), layer.keys.shape[2]) == (27, 3)
    keys, _ = layer.update(rows_of(1), rows_of(1))
    torch.testing.assert_close(keys[:, :, 24:27], rows_of(12)[:, :, 4:7])
    layer.reset()
    assert list(layer.tensors()) == []
    fill(layer, rows_of(9), rows_of(9))
    assert layer.keys.shape[2] == 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bits": 3}, "no number of bits '3'; use one of 2, 4"),
        ({"group": 12}, "multiple of 8 numbers, not 12"),
        ({"residual": 40}, "multiple of the group of 32, not 40"),
        ({"residual": 0}, "multiple of the group of 32, not 0"),
    ],
)
def test_parameters_that_cannot_be(parameters, message):
    with pytest.raises(InfeasibleError, match=message):
        QuantisedCache(2, **parameters)


def test_a_head_size_that_groups_do_not_divide_is_refused():
    layer = QuantisedLayer()
    for give in (lambda rows: layer.store(rows, rows, dropped=0), lambda r: layer.update(r, r)):
        with pytest.raises(InfeasibleError, match="groups of 32 channels.* head of 80"):
            give(rows_of(200, 80))


def test_what_quantised_layers_cannot_do():
    layer = QuantisedLayer(residual=32)
    layer.store(rows_of(30), rows_of(30), dropped=0)
    layer.shrink(torch.arange(20).expand(2, 3, 20))
    assert layer.rows() == 20
    fill(layer, rows_of(40), rows_of(40))
    with pytest.raises(InfeasibleError, match="can't shrink once its rows are quantised"):
        layer.shrink(torch.arange(20).expand(2, 3, 20))
    with pytest.raises(InfeasibleError, match="QuantisedLayer holds equally many rows"):
        layer.store_flat(
            torch.zeros(3, 4), torch.zeros(3, 4), torch.tensor([[1, 2]]), prompt_tokens=9
        )
