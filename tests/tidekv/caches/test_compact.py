"""The compact cache: logical length for positions, physical length for masks."""

import pytest
import torch

from tests.tidekv.caches.reference import ask, full_cache, reference, store
from tests.tidekv.live_bytes import LiveBytes
from tidekv.caches import CompactCache, CompactLayer
from tidekv.caches.masked import MaskedKeys
from tidekv.errors import InfeasibleError


def rows_of(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 2, count, 4, generator=torch.Generator().manual_seed(count))


def stored(rows: int, batch: int = 1) -> CompactLayer:
    layer = CompactLayer()
    layer.store(rows_of(rows, batch), rows_of(rows, batch) + 1, dropped=90)
    return layer


def test_lengths():
    layer = stored(10)
    assert layer.get_seq_length() == 100
    assert layer.get_mask_sizes(5) == (15, 90)
    layer.update(rows_of(5), rows_of(5))
    assert layer.get_seq_length() == 105
    assert layer.get_mask_sizes(torch.arange(105, 106)) == (16, 90)  # transformers ≤ 5.2
    assert layer.rows() == 15
    layer.reset()
    assert layer.get_seq_length() == layer.rows() == 0
    assert list(layer.tensors()) == []


@pytest.mark.parametrize("by_layer", [(40, 40, 40), (80, 80, 80), (50, 7, 30), (1, 80, 2)])
def test_question_equals_all_rows_with_a_mask(stock, prompt, evenly, by_layer):
    """At once and token by token, whether all layers keep equally many rows or not."""
    model, ids, question = stock(), prompt(80, 2), prompt(9, 2)
    full, kept = full_cache(model, ids), evenly(80, *by_layer, batch=2)
    at_once, one_by_one = CompactCache(3), CompactCache(3)
    store(at_once, full, kept)
    store(one_by_one, full, kept)
    with reference(model, kept):
        expected = ask(model, full, question)
    torch.testing.assert_close(ask(model, at_once, question), expected, rtol=1e-4, atol=1e-5)
    steps = [ask(model, one_by_one, question[:, i : i + 1]) for i in range(9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)
    assert at_once.get_seq_length() == one_by_one.get_seq_length() == 89
    assert at_once.rows() == one_by_one.rows() == [rows + 9 for rows in by_layer]


def test_padding_in_the_question_is_hidden(stock, prompt, evenly):
    """The mask's columns since the prompt mean the same tokens whatever the layers keep."""
    model, ids, question = stock(), prompt(80), prompt(9)
    mask = torch.ones(1, 89, dtype=torch.int64)
    mask[0, 82:85] = 0
    full = full_cache(model, ids)
    answers = []
    for by_layer in ((80, 80, 80), (80, 79, 80)):
        kept = evenly(80, *by_layer)
        kept[1][..., 0] = by_layer[1] == 80  # the same rows in each head: all but the first
        kept[1][..., 1:] = True
        cache = CompactCache(3)
        store(cache, full, kept)
        answers.append(ask(model, cache, question, attention_mask=mask)[:, 5:])
        unmasked = CompactCache(3)
        store(unmasked, full, kept)
        assert not torch.allclose(ask(model, unmasked, question)[:, 5:], answers[-1], atol=1e-3)
    torch.testing.assert_close(
        answers[0], ask(model, full, question, attention_mask=mask)[:, 5:], rtol=1e-4, atol=1e-5
    )


def test_no_eviction_equals_the_stock_cache(stock, prompt):
    model, ids, question = stock(), prompt(80), prompt(9)
    cache = CompactCache(3)
    ask(model, cache, ids)
    expected = ask(model, full_cache(model, ids), question)
    torch.testing.assert_close(ask(model, cache, question), expected, rtol=1e-4, atol=1e-5)


def test_keys_are_plain_unless_layers_differ():
    for by_layer, expected in (((4, 4, 4), torch.Tensor), ((4, 5, 4), MaskedKeys)):
        cache = CompactCache(3)
        for layer, rows in zip(cache.layers, by_layer, strict=True):
            layer.store(rows_of(rows), rows_of(rows), dropped=6 - rows)
        keys, _ = cache.update(rows_of(1), rows_of(1), 0)
        assert type(keys) is expected


def test_the_prompt_is_attended_to_in_full_layer_by_layer():
    """A layer whose rows were not chosen yet owes nothing to those that have been."""
    cache = CompactCache(2)
    cache.update(rows_of(9), rows_of(9), 0)
    cache.layers[0].store(rows_of(3), rows_of(3), dropped=6)
    keys, _ = cache.update(rows_of(9), rows_of(9), 1)
    assert type(keys) is torch.Tensor
    assert torch.equal(keys, rows_of(9))


def test_keys_without_padding_serve_any_attention_code():
    cache = CompactCache(2)
    for layer, rows in zip(cache.layers, (4, 5), strict=True):
        layer.store(rows_of(rows), rows_of(rows), dropped=6 - rows)
    keys, _ = cache.update(rows_of(1), rows_of(1), 0)
    transposed = keys.transpose(1, 2)  # as FlashAttention has it
    assert type(transposed) is torch.Tensor
    torch.testing.assert_close(transposed, torch.cat((rows_of(4), rows_of(1)), 2).transpose(1, 2))


def test_shrink_keeps_the_chosen_of_the_kept_rows_and_frees_the_others():
    with LiveBytes() as live:
        layer = stored(10)
        before = live.live["KV_res/compact"]
        keys = layer.keys
        indices = torch.tensor([[[0, 3, 9], [2, 5, 6]]])
        layer.shrink(indices)
        expected = torch.stack([keys[0, head, indices[0, head]] for head in range(2)])
        del keys
        assert before == 2 * 10 * 2 * 4 * 4
        assert live.live["KV_res/compact"] == 2 * 3 * 2 * 4 * 4
    torch.testing.assert_close(layer.keys[0], expected)
    torch.testing.assert_close(layer.values, layer.keys + 1)
    assert (layer.get_seq_length(), layer.rows()) == (100, 3)
    assert layer.get_mask_sizes(1) == (4, 97)


def test_shrink_after_decoding_is_refused():
    layer = stored(10)
    layer.update(rows_of(1), rows_of(1))
    with pytest.raises(InfeasibleError, match="between store and the first update"):
        layer.shrink(torch.zeros(1, 2, 3, dtype=torch.int64))
    with pytest.raises(InfeasibleError, match="between store and the first update"):
        CompactLayer().shrink(torch.zeros(1, 2, 3, dtype=torch.int64))


@pytest.mark.parametrize("argument", [-2, 103], ids=["tokens to remove", "tokens to be left"])
def test_crop_forgets_decoded_tokens(argument):
    layer = stored(10)
    layer.update(rows_of(5), rows_of(5))
    layer.crop(argument)
    assert (layer.get_seq_length(), layer.rows()) == (103, 13)
    torch.testing.assert_close(layer.keys[:, :, 10:], rows_of(5)[:, :, :3])
    layer.crop(0)
    assert layer.get_seq_length() == 103
    with pytest.raises(InfeasibleError, match="Only the 3 tokens decoded since the prompt"):
        layer.crop(-4)
    layer.crop(-3)
    assert torch.equal(layer.keys, rows_of(10))


def test_batch_operations():
    layer = stored(3, batch=2)
    first, second = layer.keys
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.keys, torch.stack((first, first, second, second)))
    layer.reorder_cache(torch.tensor([3, 0, 0, 1]))
    assert torch.equal(layer.keys, torch.stack((second, first, first, first)))
    layer.batch_select_indices(torch.tensor([0, 1]))
    assert torch.equal(layer.keys, torch.stack((second, first)))
    assert torch.equal(layer.values, layer.keys + 1)


def test_unequal_heads_are_refused():
    with pytest.raises(InfeasibleError, match="RaggedCache"):
        CompactLayer().store_flat(
            torch.zeros(3, 4), torch.zeros(3, 4), torch.tensor([[1, 2]]), prompt_tokens=9
        )
