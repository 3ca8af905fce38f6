"""Faults of cuda/linear.cu."""

from __future__ import annotations

from tests.ops.cuda.faults.fault import WRONG_NUMBERS, Fault

FAULTS = (
    Fault("linear", "no barrier between steps", "__syncthreads();", "", "race in shared memory"),
    Fault(
        "linear", "wait one group too short", "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>", "in flight"
    ),
    Fault("linear", "no wait", "cp_async_wait<kStages - 2>();", "", "in flight"),
    Fault("linear", "groups not closed", "cp_async_commit();", "", "in flight"),
    Fault(
        "linear",
        "a step ahead too far",
        "for (int i = 0; i < kStages - 1; i++) copy_stage();",
        "for (int i = 0; i < kStages; i++) copy_stage();",
        "race in shared memory",
    ),
    Fault(
        "linear",
        "a step ahead too few",
        "for (int i = 0; i < kStages - 1; i++) copy_stage();",
        "for (int i = 0; i < kStages - 2; i++) copy_stage();",
        "in flight",
    ),
    Fault("linear", "no guard for rows", "if (row >= num_rows) continue;", "", "past the end of argument 4"),
    Fault("linear", "no guard for columns", "if (column >= num_columns) continue;", "", "past the end of argument 4"),
    Fault(
        "linear",
        "rows copied beyond the end",
        "i * kPassRows < rows_left && column < depth",
        "column < depth",
        "past the end of argument 0",
    ),
    Fault(
        "linear",
        "depth copied beyond the end",
        "i * kPassRows < rows_left && column < depth",
        "i * kPassRows < rows_left",
        "past the end of argument 1",
    ),
    Fault(
        "linear",
        "column not counted",
        "source += kDepth, column += kDepth;",
        "source += kDepth;",
        "past the end of argument 1",
    ),
    Fault(
        "linear",
        "the same chunk in every step",
        "source += kDepth, column += kDepth;",
        "column += kDepth;",
        WRONG_NUMBERS,
    ),
    Fault(
        "linear",
        "copied without the permutation",
        "target = swizzled<kDepth>(row, chunk)",
        "target = row * kDepth + chunk * kChunk",
        WRONG_NUMBERS,
    ),
    Fault("linear", "misaligned rows of a tile", "row * kDepth + (", "row * (kDepth + 4) + (", "multiple of"),
    Fault(
        "linear",
        "ring a stage too short",
        "filled + 1 < kStages ?",
        "filled + 1 < kStages - 1 ?",
        "race in shared memory",
    ),
    Fault(
        "linear",
        "ring a stage too long",
        "stage + 1 < kStages ?",
        "stage + 1 < kStages + 1 ?",
        "shared memory out of bounds",
    ),
    Fault("linear", "halves of A swapped", "k * 2 + lane / 16)", "k * 2 + 1 - lane / 16)", WRONG_NUMBERS),
    Fault(
        "linear",
        "halves of B swapped",
        "k * 2 + lane / 8 % 2));\n                } else",
        "k * 2 + 1 - lane / 8 % 2));\n                } else",
        WRONG_NUMBERS,
    ),
    Fault(
        "linear",
        "rows of C swapped",
        "half * 8;\n                if (row",
        "(1 - half) * 8;\n                if (row",
        WRONG_NUMBERS,
    ),
    Fault(
        "linear",
        "tiles swapped",
        "in_group / group_rows * kColumns",
        "in_group % group_rows * kColumns",
        "race in argument 4",
    ),
    Fault("linear", "sums not begun at zero", "sums[i][j][e] = 0.0f", "sums[i][j][e] = 1.0f", WRONG_NUMBERS),
    Fault("linear", "copies not awaited at the end", "    cp_async_wait<0>();\n", "", "in flight"),
    Fault("linear", "residual left out", "low += added.x, high += added.y;", "", WRONG_NUMBERS),
    Fault(
        "linear", "residual's columns swapped", "added.x, high += added.y", "added.y, high += added.x", WRONG_NUMBERS
    ),
    Fault(
        "linear",
        "residual's rows swapped",
        "half * 8;\n                    const int column",
        "(1 - half) * 8;\n                    const int column",
        WRONG_NUMBERS,
    ),
    Fault(
        "linear",
        "residual's rows not guarded",
        "if (row >= num_rows || column >= num_columns)",
        "if (column >= num_columns)",
        "past the end of argument 3",
    ),
    Fault(
        "linear",
        "residual's columns not guarded",
        "if (row >= num_rows || column >= num_columns)",
        "if (row >= num_rows)",
        "past the end of argument 3",
    ),
    Fault(
        "linear", "residual shifted by a column", "num_columns + column);", "num_columns + column + 1);", "misaligned"
    ),
    Fault("linear", "residual of the first row", "residual + row * num_columns", "residual", WRONG_NUMBERS),
    Fault(
        "linear",
        "rounded before the residual is added",
        "low += added.x,",
        "low = to_float(from_float<ELEMENT>(low)) + added.x,",
        WRONG_NUMBERS,
    ),
    Fault("gated_linear", "gate and up swapped", "silu_and_mul(low, high)", "silu_and_mul(high, low)", WRONG_NUMBERS),
    Fault("gated_linear", "logistic function of the opposite", "__expf(-gate)", "__expf(gate)", WRONG_NUMBERS),
    Fault("gated_linear", "the gate's bias for up", "bias[column + 1]", "bias[column]", WRONG_NUMBERS),
    Fault(
        "gated_linear",
        "rows of all columns",
        "row * (num_columns / 2)",
        "row * num_columns",
        "past the end of argument 3",
    ),
    Fault("gated_linear", "columns not halved", ") + column / 2]", ") + column]", "past the end of argument 3"),
    Fault(
        "gated_linear", "no guard for columns", "if (column >= num_columns) continue;", "", "past the end of argument 2"
    ),
    Fault("gated_linear", "no guard for rows", "if (row >= num_rows) continue;", "", "past the end of argument 3"),
    Fault(
        "gated_linear",
        "fragments of B swapped",
        "lane / 16 * 8 + lane % 8;\n                        ldmatrix_x4(pair",
        "lane / 8 % 2 * 8 + lane % 8;\n                        ldmatrix_x4(pair",
        WRONG_NUMBERS,
    ),
    Fault("gated_linear", "no barrier", "__syncthreads();", "", "read of uninitialised shared memory"),
    Fault("gated_linear", "no wait", "cp_async_wait<kStages - 2>();", "", "in flight"),
)
