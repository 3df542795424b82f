"""Heads of unequal length: real memory, and exact under transformers' own attention code."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tidekv.caches.reference import ask, full_cache, reference, store
from tests.tidekv.live_bytes import LiveBytes
from tidekv.caches import RaggedCache, RaggedLayer
from tidekv.errors import InfeasibleError

COUNTS = torch.tensor([[3, 0], [1, 4]])


def rows_of(count: int, size: int = 4) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(count))


def stored(**options: int) -> RaggedLayer:
    layer = RaggedLayer()
    layer.store_flat(rows_of(8), rows_of(8) + 1, COUNTS, prompt_tokens=20, **options)
    return layer


def new(count: int = 1, batch: int = 2) -> torch.Tensor:
    return rows_of(batch * 2 * count).view(batch, 2, count, 4)


def updated() -> tuple[torch.Tensor, torch.Tensor]:
    """What attention code is given: keys and values after one token."""
    cache = RaggedCache(1)
    cache.layers[0].store_flat(rows_of(8), rows_of(8) + 1, COUNTS, prompt_tokens=20)
    return cache.update(new(), new(), 0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("batch", [1, 2])
def test_question_equals_all_rows_with_a_mask(stock, family, prompt, unevenly, batch):
    """At once, token by token, and two tokens before the rest."""
    model, ids, question = stock(family), prompt(80, batch), prompt(9, batch)
    full, kept = full_cache(model, ids), unevenly(80, batch)
    caches = [RaggedCache(3) for _ in range(3)]
    for cache in caches:
        store(cache, full, kept)
    with reference(model, kept):
        expected = ask(model, full, question)
    for cache, sizes in zip(caches, ([9], [1] * 9, [2, 7]), strict=True):
        steps = [ask(model, cache, part) for part in question.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)
        assert cache.get_seq_length() == 89


def test_no_group_of_query_heads(stock, prompt, unevenly):
    """As many KV heads as query heads: transformers takes other branches."""
    model, ids, question = stock(num_attention_heads=2), prompt(60), prompt(5)
    full, kept = full_cache(model, ids), unevenly(60)
    cache = RaggedCache(3)
    store(cache, full, kept)
    with reference(model, kept):
        expected = ask(model, full, question)
    steps = [ask(model, cache, part) for part in question.split([1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_capped_logits(prompt, unevenly):
    """Gemma 2 squeezes logits through tanh after scaling, which would make -inf finite."""
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"] * 3,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for layer in model.model.layers:  # drawn as they are, logits are too small to be capped
        layer.self_attn.q_proj.weight.data *= 50
    ids, question = prompt(60), prompt(5)
    full, kept = full_cache(model, ids), unevenly(60)
    cache = RaggedCache(3)
    store(cache, full, kept)
    with reference(model, kept):
        expected = ask(model, full, question)
    torch.testing.assert_close(ask(model, cache, question), expected, rtol=1e-4, atol=1e-5)


def test_even_layers_among_uneven_ones(stock, prompt, unevenly, evenly):
    model, ids, question = stock(), prompt(80), prompt(9)
    kept = [evenly(80, 30)[0], *unevenly(80)[1:]]
    full = full_cache(model, ids)
    cache = RaggedCache(3)
    store(cache, full, kept)
    assert [layer.ragged for layer in cache.layers] == [False, True, True]
    with reference(model, kept):
        expected = ask(model, full, question)
    torch.testing.assert_close(ask(model, cache, question), expected, rtol=1e-4, atol=1e-5)


def test_bytes_are_those_of_the_formula_and_tokens_do_not_move_kept_rows():
    with LiveBytes(COUNTS) as live:
        layer = stored()
        small = 8 * (COUNTS.numel() + 2)  # counts, prompts
        assert live.live["KV_res/compact"] == 2 * 8 * 4 * 4 + small - COUNTS.nbytes
        places = [tensor.data_ptr() for tensor in layer.tensors() if tensor.shape == (8, 4)]
        for tokens in range(1, 4):
            layer.update(new(), new())
            expected = (8 + 2 * 2 * tokens) * 2 * 4 * 4 + small
            assert sum(tensor.nbytes for tensor in layer.tensors()) == expected
            assert sum(t.untyped_storage().nbytes() for t in layer.tensors()) == expected
            assert live.live["KV_res/compact"] == expected - COUNTS.nbytes
            assert live.live["Temp"] == 0
        assert places == [t.data_ptr() for t in layer.tensors() if t.shape == (8, 4)]
    assert layer.rows() == 2 + 3


def test_only_the_layer_that_runs_is_padded():
    with LiveBytes() as live:
        cache = RaggedCache(5)
        for layer in cache.layers:
            flat = rows_of(800, 64)
            layer.store_flat(flat, flat + 1, COUNTS * 100, prompt_tokens=900)
        live.own_peak.clear()
        new = rows_of(4, 64).view(2, 2, 1, 64)
        for index in range(5):
            cache.update(new, new, index)
        padded = 2 * 4 * 401 * 64 * 4
        places = 4 * 400 * 8
        assert padded < live.own_peak["Temp"] <= padded + 4 * places
        assert live.live["Temp"] == 0


def test_a_layer_without_any_row_is_refused():
    nothing, counts = torch.empty(0, 4), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(InfeasibleError, match="at least one row"):
        RaggedLayer().store_flat(nothing, nothing, counts, prompt_tokens=9)


def test_longest_may_be_given_as_a_bound():
    exact, bounded = stored(), stored(longest=7)
    assert (exact.kept, bounded.kept) == (4, 7)
    assert exact.get_seq_length() == bounded.get_seq_length() == 20
    for layer in (exact, bounded):
        keys, values = layer.update(new(), new())
        visible = F.pad(layer.visible(), (0, 1), value=True)
        ends = torch.cat((rows_of(8)[:3], new()[0, 0], new()[0, 1], rows_of(8)[3:4], new()[1, 0]))
        torch.testing.assert_close(keys[visible][:7], ends)
        assert keys[visible].shape == (8 + 4, 4)
        assert values.isfinite().all()


def test_beams_share_the_kept_rows():
    layer = stored()
    kept = [tensor for tensor in layer.tensors() if tensor.shape == (8, 4)]
    plain, _ = layer.update(new(), new())
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([2, 1, 3, 0]))
    layer.batch_select_indices(torch.tensor([0, 1, 2]))
    keys, _ = layer.update(new(batch=3), new(batch=3))
    order = [1, 0, 1]
    torch.testing.assert_close(keys[:, :, :-1], plain[order])
    assert torch.equal(layer.visible().sum(-1), COUNTS[order])
    assert all(a is b for a, b in zip(kept, list(layer.tensors())[2:4], strict=True))


def test_crop_and_reset():
    layer = stored()
    layer.update(new(3), new(3))
    layer.crop(-2)
    assert layer.get_seq_length() == 21
    with pytest.raises(InfeasibleError, match="Only the 1 tokens decoded since the prompt"):
        layer.crop(-2)
    layer.reset()
    assert not layer.ragged
    assert list(layer.tensors()) == []
    assert layer.get_seq_length() == 0
    layer.store_flat(rows_of(8), rows_of(8), COUNTS, prompt_tokens=8)
    assert layer.get_seq_length() == 8
    layer.store(rows_of(8).view(2, 2, 2, 4), rows_of(8).view(2, 2, 2, 4), dropped=3)
    assert not layer.ragged
    assert layer.get_seq_length() == 5


def test_shrinking_unequal_heads_is_refused():
    with pytest.raises(InfeasibleError, match="can't shrink"):
        stored().shrink(torch.zeros(2, 2, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    "use",
    [
        lambda keys, query: keys.transpose(1, 2),  # FlashAttention
        lambda keys, query: keys * 2,
        lambda keys, query: keys[:, :, :1],
        lambda keys, query: keys.mean(2),
        lambda keys, query: keys.reshape(2, -1),
        lambda keys, query: torch.matmul(keys.transpose(2, 3), other=query),
        lambda keys, query: torch.add(query @ keys.transpose(2, 3), torch.ones(5), alpha=2),
        lambda keys, query: (query @ keys.transpose(2, 3)) * torch.ones(5),
        lambda keys, query: F.scaled_dot_product_attention(query, query, keys),
        lambda keys, query: torch.cat((keys, keys), dim=2),
        lambda keys, query: torch.einsum("bhqd,bhkd->bhqk", query, keys),
        lambda keys, query: query @ keys,
        lambda keys, query: (query @ keys.transpose(2, 3)).exp(),
        lambda keys, query: (query @ keys.transpose(2, 3)).sum(-1),
        lambda keys, query: (query @ keys.transpose(2, 3)).topk(2),
        lambda keys, query: query.copy_(keys[:, :, None].expand(2, 2, 1, 5, 4)),
    ],
)
def test_code_that_would_use_the_padding_is_refused(use):
    keys, _ = updated()
    with pytest.raises(InfeasibleError, match="set_attn_implementation"):
        use(keys, torch.zeros(2, 2, 4, 4))


def test_masks_of_another_size_are_refused():
    keys, values = updated()
    query = torch.zeros(2, 2, 1, 4)
    with pytest.raises(InfeasibleError, match=r"must have 5 columns here, or 2 .* not 3"):
        F.scaled_dot_product_attention(query, keys, values, torch.ones(1, 1, 1, 3).bool())
    with pytest.raises(InfeasibleError, match="several tokens with is_causal and no mask"):
        F.scaled_dot_product_attention(new(5), keys, values, is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("columns", [2, 5], ids=["model's", "all"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("heads", ["all heads'", "each head's"])
def test_masks_are_combined(kind, columns, grouped, heads):
    """With one of the batch's entries not to see the new token, or the prompt."""
    keys, values = updated()
    visible = torch.ones(2, 1, 1, columns, dtype=torch.bool)
    visible[0, ..., -1] = False
    visible[1, ..., : columns - 1] = False
    if heads == "each head's":
        visible = visible.repeat(1, 4 if grouped else 2, 1, 1)
    mask = visible if kind == "bool" else torch.zeros(visible.shape).where(visible, -1e30)
    query = torch.randn(2, 4 if grouped else 2, 1, 4)
    actual = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=grouped)
    with torch._C.DisableTorchFunctionSubclass():
        plain = keys.as_subclass(torch.Tensor)
    group = 2 if grouped else 1
    for head in range(query.shape[1]):
        # The first entry sees 3 or 0 rows of its prompt; the second itself.
        count = COUNTS[0, head // group]
        seen = plain[0, head // group, :count]
        weights = (query[0, head] @ seen.mT / 2).softmax(-1)
        if count:
            torch.testing.assert_close(actual[0, head], weights @ values[0, head // group, :count])
        torch.testing.assert_close(actual[1, head, 0], values[1, head // group, -1])


def test_nothing_is_read_from_the_device():
    """Tensors without values: a read would raise."""
    with torch.device("meta"):
        cache = RaggedCache(1)
        flat, counts = torch.empty(8, 4), torch.empty(2, 2, dtype=torch.int64)
        cache.layers[0].store_flat(flat, flat, counts, prompt_tokens=20, longest=4)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.empty(4, dtype=torch.int64))
        for tokens in (1, 3):
            new = torch.empty(4, 2, tokens, 4)
            keys, values = cache.update(new, new, 0)
            query = torch.empty(4, 4, tokens, 4)
            mask = torch.empty(1, 1, tokens, cache.layers[0].decoded + 1, dtype=torch.bool)
            F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        assert keys.shape == (4, 2, 4 + 4, 4)
        assert cache.rows() == [2 + 4]
