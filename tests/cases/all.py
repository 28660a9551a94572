"""The cases of all topics: each file here has those of one. SHORT_CASES and SHORT_UPDATE_CASES are
for tests in which a case takes long. SAMPLED_CASES are one of seven, whatever the order of CASES."""

from __future__ import annotations

import zlib

from tests.cases import latent, layouts, masks, quantized, shapes, softmax, updates

CASES = [
    *shapes.CASES,
    *masks.CASES,
    *softmax.CASES,
    *layouts.CASES,
    *latent.CASES,
    *quantized.CASES,
]
SAMPLED_CASES = [case for case in CASES if zlib.crc32(case.id.encode()) % 7 == 0]
LONG_CASES = shapes.LONG_CASES
UPDATE_CASES = updates.CASES

for _cases in (CASES, LONG_CASES, UPDATE_CASES):
    assert len({case.id for case in _cases}) == len(_cases)

SHORT_CASES = [
    case
    for case in CASES
    if case.id.rpartition("-")[0]
    in {
        "mixed",
        "no-sequences",
        "block-17-chunked",
        "window-9-mixed",
        "cap-30.0-decode",
        "all-mixed",
        "fewer-keys-sinks-right-2",
        "layout-n2hbd-mixed",
        "layout-nbhd-mixed",
        "float8_e4m3fn-per head-mixed",
        "float8_e5m2-one-mixed",
        "int8-per head-decode",
        "int8-per position-mixed",
        "int4-per head-mixed",
        "int8-int4-per position-mixed",
        "nvfp4-mixed",
        "int8-nvfp4-decode",
        "latent-mixed",
        "max-query-len-3-head-size-64",
        "ragged-7",
        "not-causal-by-sequence-mixed",
        "ranges-any-window-9-mixed",
    }
]

SHORT_UPDATE_CASES = [
    case
    for case in UPDATE_CASES
    if case.id
    in {
        "some-padding-int32-f32",
        "some-padding-int64-bf16",
        "no-tokens-int32-f16",
        "layout-n2hbd",
        "layout-nbhd-odd",
        "latent-nbd-None",
        "float8_e4m3fn-per position-bf16",
        "float8_e5m2-None-f16",
        "int8-one-f32",
        "int4-per head-bf16",
        "int8-made-scales-f32-rotated-neox",
        "float8_e5m2-made-scales-f16",
        "int8-int4-made-scales-nbhd",
        "latent-nbd-int4-made-scales",
        "nvfp4-made-bf16",
        "int8-nvfp4-made-nbhd",
        "int4-g32-f16",
        "float8_e4m3fn-made-v_scale",
        "rotated-int4-neox-f16",
        "rotated-part-neox-bf16",
        "rotated-two-arrays-interleaved-f32",
        "normalized-rotated-per head-bf16",
        "normalized-all heads-f32",
        "normalized-int8-made-scales-per head-f16",
        "normalized-after-False-bf16",
        "hadamard-after-all-bf16",
        "hadamard-int4-made-scales-bf16",
        "hadamard-signs-f32",
    }
]
