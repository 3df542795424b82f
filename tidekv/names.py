"""What a caller may name of a prefill, known without torch."""

#: What computes attention, see :mod:`tidekv.attention`.
ATTENTIONS = (
    *("sdpa", "eager", "flash_attention_2"),
    *("sdpa_flash", "sdpa_efficient", "sdpa_math"),
)
#: How scores come about, see :mod:`tidekv.scoring`.
SCORINGS = ("blockwise", "dense")
#: Types of a model's numbers.
DTYPES = ("float32", "bfloat16", "float16")
