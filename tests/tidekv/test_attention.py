"""Chunk attention equals a full softmax, on every kernel that runs here."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tidekv
from tests.tidekv.conftest import make_tiny
from tidekv import attention
from tidekv.attention import decide
from tidekv.errors import InfeasibleError
from tidekv.schedules import whole_prompt


def tensors(
    batch: int, group: int, kv_heads: int, rows: int, chunk: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seed = torch.Generator().manual_seed(rows * 31 + chunk)
    queries = torch.randn(batch, group * kv_heads, chunk, dim, generator=seed).to(dtype)
    # Keys as a schedule has them: a slice of a longer buffer.
    buffer = torch.randn(2, batch, kv_heads, rows + 3, dim, generator=seed).to(dtype)
    return queries, buffer[0][:, :, :rows], buffer[1][:, :, :rows]


shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "group": st.integers(1, 4),
        "kv_heads": st.integers(1, 3),
        "dim": st.sampled_from([4, 8, 20, 64]),
    }
)


EAGER, CPU = attention._Eager(None), attention._Split(attention._flash_cpu)


@settings(max_examples=60)
@given(shape=shapes, prefix=st.integers(0, 70), chunk=st.integers(1, 40))
@pytest.mark.parametrize("kernel", [attention._flash_cpu, attention._Maths(None)])
def test_prefix_and_chunk_merged_equal_eager(kernel, shape, prefix, chunk):
    q, k, v = tensors(rows=prefix + chunk, chunk=chunk, dtype=torch.float64, **shape)
    merged = attention._Split(kernel)(q, k, v, 0.3)
    torch.testing.assert_close(merged, EAGER(q, k, v, 0.3))


@settings(max_examples=40)
@given(shape=shapes, prefix=st.integers(0, 70), chunk=st.integers(1, 40))
def test_the_math_kernel_equals_eager(shape, prefix, chunk):
    q, k, v = tensors(rows=prefix + chunk, chunk=chunk, dtype=torch.float64, **shape)
    torch.testing.assert_close(attention._dense(q, k, v, 0.3), EAGER(q, k, v, 0.3))


@settings(max_examples=40)
@given(shape=shapes, prefix=st.integers(0, 70), chunk=st.integers(1, 40))
def test_a_soft_cap_is_the_same_in_pieces(shape, prefix, chunk):
    q, k, v = tensors(rows=prefix + chunk, chunk=chunk, dtype=torch.float64, **shape)
    merged = attention._Split(attention._Maths(2.0))(q, k, v, 3.0)
    torch.testing.assert_close(merged, attention._Eager(2.0)(q, k, v, 3.0))
    assert not torch.allclose(merged, EAGER(q, k, v, 3.0)) or prefix + chunk < 3


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_eager_is_a_softmax_over_visible_keys(chunk):
    q, k, v = tensors(1, 2, 2, rows=33, chunk=chunk, dim=8, dtype=torch.float64)
    out = EAGER(q, k, v, 0.5)
    for head in range(4):
        for row in range(chunk):
            visible = 33 - chunk + row + 1
            weights = (k[0, head // 2, :visible] @ q[0, head, row] * 0.5).softmax(0)
            expected = weights @ v[0, head // 2, :visible]
            torch.testing.assert_close(out[0, head, row], expected)


def test_bfloat16_is_merged_in_fp32():
    """The merged output is no further from the truth than one kernel over all keys."""
    q, k, v = tensors(1, 3, 2, rows=400, chunk=100, dim=64, dtype=torch.bfloat16)
    truth = EAGER(q.double(), k.double(), v.double(), 0.125)
    merged = CPU(q, k, v, 0.125)
    single = EAGER(q, k, v, 0.125)
    assert merged.dtype == torch.bfloat16
    assert (merged - truth).norm() <= (single - truth).norm()


def test_no_full_mask_and_no_expanded_prefix():
    """Every tensor made is bounded by the chunk, whatever the prefix is."""
    from tests.tidekv.live_bytes import LiveBytes

    peaks = []
    for rows in (256, 2048):
        q, k, v = tensors(1, 4, 2, rows=rows, chunk=64, dim=8, dtype=torch.float32)
        with LiveBytes(q, k, v) as live:
            CPU(q, k, v, 0.3)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("dtype", "dim", "kernel"),
    [
        (torch.bfloat16, 128, "PyTorch's FlashAttention"),
        (torch.float16, 64, "PyTorch's FlashAttention"),
        (torch.float32, 64, "PyTorch's memory-efficient attention"),
        (torch.bfloat16, 4, "plain operators"),
        (torch.float32, 6, "plain operators"),
        (torch.bfloat16, 100, "plain operators"),
        (torch.bfloat16, 288, "PyTorch's memory-efficient attention"),
    ],
)
def test_gpu_kernels_by_dtype_and_head_size(dtype, dim, kernel):
    """Chosen by what the kernel serves; shapes hold on the meta device."""
    backend = decide("sdpa", dtype=dtype, device=torch.device("meta"), head_dim=dim)
    assert backend.kernel == kernel
    q = torch.empty(1, 8, 16, dim, dtype=dtype, device="meta")
    k = torch.empty(1, 2, 48, dim, dtype=dtype, device="meta")
    out = backend.attend(q, k, k, 1.0)
    assert out.shape == q.shape
    assert out.dtype == dtype


def on(device: str, attention: str = "flash_attention_2", **settings: Any) -> str:
    given = {"dtype": torch.bfloat16, "head_dim": 64, **settings}
    return decide(attention, device=torch.device(device), **given).kernel


def test_one_function_says_what_was_taken():
    assert on("cpu", "sdpa") == "PyTorch's FlashAttention for the CPU"
    assert on("cpu", "eager") == "plain operators, dense"
    assert on("cpu", "sdpa", softcap=50.0) == "plain operators (soft cap)"
    assert on("cpu", "sdpa_math") == "PyTorch's attention in plain operators, dense"
    assert on("cuda", "sdpa_efficient") == "PyTorch's memory-efficient attention"
    assert on("cuda") == on("cuda", "sdpa") == "PyTorch's FlashAttention"
    with patch.object(attention, "has_flash_package", lambda: True):
        assert on("cuda") == on("cuda", softcap=50.0) == "the flash-attn package"


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({"dtype": torch.float16}, "PyTorch's memory-efficient attention"),
        ({"dtype": torch.bfloat16}, "plain operators"),
        ({"dtype": torch.float64}, "plain operators"),
    ],
)
def test_before_ampere_there_is_no_flash_attention(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], taken: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert on("cuda", "sdpa", **settings) == taken
    with pytest.raises(InfeasibleError, match=r"needs compute capability 8.0, .* has 7.5; use"):
        on("cuda", dtype=torch.float16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu", "dtype": torch.float32}, "float32 on cpu; use attention='sdpa'"),
        ({"device": "cuda", "dtype": torch.float32}, "float32 on cuda; use attention='sdpa'"),
        ({"device": "cuda", "head_dim": 6}, "serves no heads of 6; use attention='sdpa'"),
        ({"device": "cuda", "softcap": 50.0}, "soft cap needs the flash-attn package"),
        ({"device": "cpu", "attention": "paged"}, "use one of sdpa, eager"),
    ],
)
def test_what_cannot_be_served_is_refused(settings, message):
    with pytest.raises(InfeasibleError, match=message):
        on(**settings)


def test_before_torch_2_14_the_stock_code_has_no_memory_efficient_kernel_for_grouped_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole_prompt, "groups_efficiently", lambda: False)
    model = make_tiny("llama").to("meta")
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    with pytest.raises(InfeasibleError, match="no fewer KV heads"):
        tidekv.prefill(
            model, ids, schedule="whole_prompt", attention="sdpa_efficient", selector=None
        )
