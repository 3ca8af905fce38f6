"""Faults of cuda/attention.cu."""

from __future__ import annotations

from tests.ops.cuda.faults.fault import WRONG_NUMBERS, Fault

FAULTS = (
    Fault(
        "attention",
        "no barrier after the wait",
        "cp_async_wait<1>();\n            __syncthreads();",
        "cp_async_wait<1>();",
        "race in shared memory",
    ),
    Fault(
        "attention",
        "no barrier before the copy",
        "if (tile > first()) __syncthreads();",
        "",
        "race in shared memory",
    ),
    Fault(
        "attention", "wait one group too short", "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>", "in flight"
    ),
    Fault(
        "attention",
        "a maximum not yet read",
        "__syncwarp();  // the maximum",
        "// the maximum",
        "race in shared memory",
    ),
    Fault(
        "attention",
        "result not yet complete",
        "__syncwarp();\n    }\n};",
        "}\n};",
        "race in shared memory",
    ),
    Fault(
        "attention",
        "next block of the table",
        "table[position / block_size]",
        "table[position / block_size + 1]",
        "wild 16-byte read",
    ),
    Fault("attention", "sees one position too many", "position + 1 : 0", "position + 2 : 0", WRONG_NUMBERS),
    Fault("attention", "sees slots of nobody", "read.contains(position)", "(position < read.end + 8)", WRONG_NUMBERS),
    Fault(
        "attention",
        "splits merged with the wrong scale",
        "split_scale = rescale(state.x, rise)",
        "split_scale = 1.0f",
        WRONG_NUMBERS,
    ),
    Fault("attention", "rows of nobody written", "if (row >= tile.num_rows) continue;", "", "argument 7"),
    Fault(
        "attention",
        "combine begins late",
        "int split = first_split; split",
        "int split = first_split + 1; split",
        WRONG_NUMBERS,
    ),
    Fault(
        "attention",
        "combine takes chunks too",
        "if (cu_seqlens[sequence + 1] - token != 1) return;",
        "",
        WRONG_NUMBERS,
    ),
    Fault("attention", "scale left out", "__fmul_rn(scores[i][e], scale)", "scores[i][e]", WRONG_NUMBERS),
    Fault(
        "attention",
        "maximum of half a row",
        "__shfl_xor_sync(0xffffffff, rise[half], 2)",
        "__shfl_xor_sync(0xffffffff, rise[half], 1)",
        WRONG_NUMBERS,
    ),
    Fault(
        "attention",
        "a maximum that begins at zero",
        "maximum[0] = maximum[1] = nothing();",
        "maximum[0] = maximum[1] = 0.0f;",
        WRONG_NUMBERS,
    ),
    Fault("attention", "first layer always", "cache + g.key_offset", "cache", WRONG_NUMBERS),
    Fault(
        "attention",
        "V as far apart as K",
        "queried.kv_head * (g.value_head_stride - g.key_head_stride)",
        "0",
        WRONG_NUMBERS,
    ),
)
