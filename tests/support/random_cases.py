"""Random calls for hypothesis."""

from __future__ import annotations

import hypothesis.strategies as st

from harness.arrays import QUANTIZED
from harness.layouts import LATENT_LAYOUTS, LAYOUTS, SEPARATE_LAYOUTS
from tests.cases.case import RANGES, SCALES, TREES, Case


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    """Any call that the contract allows, at small sizes."""
    head_size = draw(st.integers(1, 40) | st.sampled_from([16, 32, 64]))
    value_head_size = draw(st.none() | st.none() | st.integers(1, head_size))
    layouts = LAYOUTS if value_head_size is None else LATENT_LAYOUTS
    kv_layout = draw(st.none() | st.sampled_from([*layouts]))
    is_separate = kv_layout in SEPARATE_LAYOUTS and value_head_size is None
    own_value_head_size = draw(st.none() | st.integers(1, head_size)) if is_separate else None
    has_heads = value_head_size is None or (kv_layout is not None and "h" in kv_layout)
    num_kv_heads = draw(st.integers(1, 3 if has_heads else 1))
    causal = draw(st.booleans())
    alibi_slopes = draw(st.booleans())
    tree = draw(st.sampled_from(TREES)) if causal and not alibi_slopes else None
    cache_dtype = draw(st.none() | st.sampled_from(QUANTIZED))
    value_cache_dtype = None
    if is_separate and cache_dtype in ("int8", "int4") and draw(st.booleans()):
        value_cache_dtype = "int4" if cache_dtype == "int8" else "int8"
    if "int4" in (cache_dtype, value_cache_dtype):  # even sizes
        head_size += head_size % 2
        own_value_head_size = own_value_head_size and own_value_head_size + own_value_head_size % 2
    sequences = draw(
        st.lists(
            st.integers(0, 90).flatmap(
                lambda context: st.tuples(
                    st.integers(0, context if causal else context + 10), st.just(context)
                )
            ),
            max_size=4,
        )
    )
    return Case(
        id=f"random-{draw(st.integers(0, 2**32))}",
        sequences=tuple(sequences),
        num_heads=num_kv_heads * draw(st.integers(1, 7)),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        scale=draw(st.floats(-2, 2, width=32)),
        sliding_window=draw(st.none() | st.integers(1 if tree is None else 64, 100)),
        soft_cap=draw(st.none() | st.floats(0.5, 50, width=32)),
        sinks=draw(st.booleans()),
        alibi_slopes=alibi_slopes,
        tree=tree,
        ranges=draw(st.sampled_from(RANGES)) if tree is None else None,
        causal=causal,
        causal_seqs=not causal and draw(st.booleans()) and all(q <= n for q, n in sequences),
        window_right=None if causal else draw(st.none() | st.integers(1, 40)),
        max_query_len=draw(st.none() | st.integers(max([1, *(q for q, _ in sequences)]), 100)),
        cache_dtype=cache_dtype,
        value_cache_dtype=value_cache_dtype,
        scales=draw(st.sampled_from(SCALES)) if cache_dtype else None,
        kv_layout=kv_layout,
        value_head_size=value_head_size,
        own_value_head_size=own_value_head_size,
        return_lse=draw(st.booleans()),
    )
