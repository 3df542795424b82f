"""Chunk attention equals a full softmax, on every kernel that runs here."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidekv import attention
from tidekv.attention import attend
from tidekv.errors import InfeasibleError


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


@settings(deadline=None, max_examples=60)
@given(shape=shapes, prefix=st.integers(0, 70), chunk=st.integers(1, 40))
@pytest.mark.parametrize("kernel", [attention._flash_cpu, attention._maths])
def test_sdpa_equals_eager(kernel, shape, prefix, chunk):
    q, k, v = tensors(rows=prefix + chunk, chunk=chunk, dtype=torch.float64, **shape)
    with patch.object(attention, "_kernel", lambda q: kernel):
        merged = attend(q, k, v, scaling=0.3, attention="sdpa")
    torch.testing.assert_close(merged, attend(q, k, v, scaling=0.3, attention="eager"))


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_eager_is_a_softmax_over_visible_keys(chunk):
    q, k, v = tensors(1, 2, 2, rows=33, chunk=chunk, dim=8, dtype=torch.float64)
    out = attend(q, k, v, scaling=0.5, attention="eager")
    for head in range(4):
        for row in range(chunk):
            visible = 33 - chunk + row + 1
            weights = (k[0, head // 2, :visible] @ q[0, head, row] * 0.5).softmax(0)
            expected = weights @ v[0, head // 2, :visible]
            torch.testing.assert_close(out[0, head, row], expected)


def test_bfloat16_is_merged_in_fp32():
    """The merged output is no further from the truth than one kernel over all keys."""
    q, k, v = tensors(1, 3, 2, rows=400, chunk=100, dim=64, dtype=torch.bfloat16)
    truth = attend(q.double(), k.double(), v.double(), scaling=0.125, attention="eager")
    merged = attend(q, k, v, scaling=0.125)
    single = attend(q, k, v, scaling=0.125, attention="eager")
    assert merged.dtype == torch.bfloat16
    assert (merged - truth).norm() <= (single - truth).norm()


def test_no_full_mask_and_no_expanded_prefix():
    """Every tensor made is bounded by the chunk, whatever the prefix is."""
    from tests.tidekv.live_bytes import LiveBytes

    peaks = []
    for rows in (256, 2048):
        q, k, v = tensors(1, 4, 2, rows=rows, chunk=64, dim=8, dtype=torch.float32)
        with LiveBytes(q, k, v) as live:
            attend(q, k, v, scaling=0.3)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("dtype", "dim", "kernel"),
    [
        (torch.bfloat16, 128, attention._flash),
        (torch.float16, 64, attention._flash),
        (torch.float32, 64, attention._efficient),
        (torch.bfloat16, 4, attention._efficient),
        (torch.float32, 6, attention._maths),
    ],
)
def test_gpu_kernels_by_dtype_and_head_size(dtype, dim, kernel):
    """Chosen by what the kernel serves; shapes hold on the meta device."""
    q = torch.empty(1, 8, 16, dim, dtype=dtype, device="meta")
    k = torch.empty(1, 2, 48, dim, dtype=dtype, device="meta")
    assert attention._kernel(q) is kernel
    out = attend(q, k, k, scaling=1.0)
    assert out.shape == q.shape
    assert out.dtype == dtype


def test_flash_attention_2_refuses_what_it_cannot_serve():
    with pytest.raises(InfeasibleError, match="float32 on cpu; use attention='sdpa'"):
        attention.check("flash_attention_2", torch.float32, torch.device("cpu"))
    attention.check("flash_attention_2", torch.bfloat16, torch.device("cuda"))
    with pytest.raises(InfeasibleError, match="use one of sdpa, eager"):
        attention.check("paged", torch.float32, torch.device("cpu"))
