"""The emulator itself: what it computes, what it reports, what it refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ops.cuda.compiler import CompilationError
from tests.ops.cuda.emulated import Argument, EmulatorFault, Execution, Kernel, Module, Order

LANES = np.arange(32)


def kernel(body: str, parameters: str = "float* out", *, checked: bool = True, before: str = "") -> Kernel:
    """A kernel of one function body."""
    source = f'{before}\nextern "C" __global__ void kernel({parameters}) {{ const int t = threadIdx.x; {body} }}'
    return Module(source, "kernel.cu", checked=checked).kernels["kernel"]


def run(
    body: str, threads: int = 32, blocks: int = 1, *, checked: bool = True, order: Order = Order.FORWARD
) -> list[float]:
    """What a kernel writes into a float per thread."""
    out = np.full(threads * blocks, np.nan, np.float32)
    kernel(body, checked=checked)((blocks,), (threads,), (out,), execution=Execution(order, cpu_seconds=1))
    return out.tolist()


def faults_of(body: str, threads: int = 32, blocks: int = 1, *, checked: bool = True) -> str:
    with pytest.raises(EmulatorFault) as raised:
        run(body, threads, blocks, checked=checked)
    return str(raised.value)


# ---- What it computes ----


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("checked", [False, True])
def test_barriers_and_shared_memory(order: Order, checked: bool) -> None:
    body = """
        __shared__ float a[96];
        __shared__ __align__(16) unsigned char b[2][48];
        a[t] = t; b[t / 48][t % 48] = t;
        int votes = 1000 * __syncthreads_or(t == 5) + 2000 * __syncthreads_and(t < 95);
        votes += 10000 * __syncthreads_count(t < 7);
        out[blockIdx.x * 96 + t] = a[95 - t] + b[(95 - t) / 48][(95 - t) % 48] + votes;
    """
    expected = [2.0 * (95 - t) + 1000 + 70000 for t in range(96)]
    assert run(body, 96, 2, checked=checked, order=order) == expected * 2


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("__shfl_sync(~0u, t, 7)", np.full(32, 7)),
        ("__shfl_sync(~0u, t, 3, 8)", LANES // 8 * 8 + 3),
        ("__shfl_xor_sync(~0u, t, 5)", LANES ^ 5),
        ("__shfl_up_sync(~0u, t, 3)", np.where(LANES >= 3, LANES - 3, LANES)),
        ("__shfl_down_sync(~0u, t, 3, 16)", np.where(LANES % 16 < 13, LANES + 3, LANES)),
        ("__ballot_sync(~0u, t % 3 == 0) % 1000", np.full(32, sum(1 << lane for lane in range(0, 32, 3)) % 1000)),
        ("__any_sync(~0u, t == 31) + 2 * __all_sync(~0u, t < 31)", np.full(32, 1)),
        (
            "t < 16 ? __shfl_xor_sync(0xffffu, t, 1) : __shfl_xor_sync(0xffff0000u, t, 2)",
            np.where(LANES < 16, LANES ^ 1, LANES ^ 2),
        ),
    ],
)
def test_warp_collectives(call: str, expected: NDArray[np.int64]) -> None:
    assert run(f"out[t] = {call};") == expected.tolist()


def test_shuffles_of_wide_values() -> None:
    assert run("const double x = __shfl_xor_sync(~0u, t * 0.5, 1); out[t] = x;") == ((LANES ^ 1) * 0.5).tolist()


def test_atomics() -> None:
    body = """
        __shared__ int sum; __shared__ int most;
        if (t == 0) { sum = 0; most = -1; }
        __syncthreads();
        atomicAdd(&sum, t); atomicMax(&most, t);
        __syncthreads();
        out[t] = sum * 100 + most;
    """
    assert run(body, 64) == [2016 * 100 + 63] * 64


def test_the_last_block_may_read_what_all_have_published() -> None:
    body = """
        __shared__ bool last;
        out[blockIdx.x * 32 + t] = 1;
        __threadfence();
        __syncthreads();
        if (t == 0) last = atomicAdd(counter, 1) == static_cast<int>(gridDim.x) - 1;
        __syncthreads();
        if (last && t == 0) for (int i = 0; i < 128; i++) *total += out[i];
    """
    parameters = "float* out, int* counter, float* total"
    out, counter, total = np.zeros(128, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    kernel(body, parameters)((4,), (32,), (out, counter, total))
    assert total[0] == 128
    with pytest.raises(EmulatorFault, match="race in argument 0"):
        kernel(body.replace("last && t", "t"), parameters)((4,), (32,), (out, counter * 0, total))


@pytest.mark.parametrize(("element", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_tensor_core_through_shared_memory(element: str, dtype: type[np.generic]) -> None:
    """D = A B with A by ldmatrix and B, stored [k, n], by the transposing one, and stored [n, k], by the plain one."""
    body = f"""
        __shared__ __align__(16) unsigned short sa[16][16];
        __shared__ __align__(16) unsigned short sb[16][8];
        __shared__ __align__(16) unsigned short sbt[8][16];
        cp_async_16(&sa[t / 2][t % 2 * 8], a + t * 8);
        if (t < 16) cp_async_16(&sb[t][0], b + t * 8);
        if (t < 16) cp_async_16_zfill(&sbt[t / 2 % 8][t % 2 * 8], bt + t % 16 * 8, true);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        unsigned fa[4], fb[2], fbt[2];
        float d[4] = {{0, 0, 0, 0}};
        ldmatrix_x4(fa, &sa[t % 16][t / 16 * 8]);
        ldmatrix_x2_trans(fb, &sb[t % 16][0]);
        ldmatrix_x2(fbt, &sbt[t % 8][t / 8 % 2 * 8]);
        mma_m16n8k16_{element}(d, fa, fb, d);
        mma_m16n8k16_{element}(d, fa, fbt, d);
        for (int i = 0; i < 4; i++) out[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
    """
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-8, 8, shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    out = np.full((16, 8), np.nan, np.float32)
    words = [array.view(np.uint16) for array in (a, b, np.ascontiguousarray(b.T))]
    parameters = "const unsigned short* a, const unsigned short* b, const unsigned short* bt, float* out"
    kernel(body, parameters, before='#include "ptx.cuh"')((1,), (32,), (*words, out))
    np.testing.assert_array_equal(out, 2 * (a.astype(np.float32) @ b.astype(np.float32)))


def test_orders_differ() -> None:
    """A kernel that depends on the order of its threads shows it."""
    body = "__shared__ int n; n = 0; __syncthreads(); out[blockIdx.x * 32 + t] = n++;"
    results = [run(body, 32, 2, checked=False, order=order) for order in Order]
    assert results[0] == [*range(32)] * 2
    assert results[1] == [*range(31, -1, -1)] * 2
    assert sorted(results[2]) == sorted(results[0])
    assert results[2] not in (results[0], results[1])


# ---- What it reports ----


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("__shared__ float s[32]; s[t] = t; out[t] = s[31 - t];", "race in shared memory"),
        ("__shared__ float s[32]; s[t] = t; __shfl_sync(~0u, t, 0); out[t] = s[31 - t];", "race in shared memory"),
        ("__shared__ float s[32]; out[t] = s[t];", "read of uninitialised shared memory"),
        ("extern __shared__ float s[]; s[t] = 1;", "shared memory out of bounds"),
        ("__shared__ float s[8]; float* p = s; p[t] = 1;", "shared memory out of bounds"),
        ("out[t + 1] = 1;", "0 bytes past the end of argument 0"),
        ("out[t - 1] = 1;", "4 bytes before argument 0"),
        ("*reinterpret_cast<float*>(64) = 1;", "wild 4-byte write"),
        ("*reinterpret_cast<float4*>(out + 1) = float4();", "misaligned access"),
        ("out[0] = t;", "race in argument 0"),
        ("int big = 1 << 30; out[t] = big * (2 + t);", "signed multiplication overflows"),
        ("out[t] = 1 << (t + 1);", "shift by too many bits"),
        ("out[t] = 7 / t;", "integer division by zero"),
        ("float a[4] = {}; a[t] = 1; out[t] = a[0];", "index beyond the bounds of an array"),
        ("if (t == 40) __trap();", "nothing"),
        ("if (t == 4) __trap();", r"__trap\(\); block \(0, 0, 0\) thread \(4, 0, 0\) at kernel.cu:2"),
        ("__shfl_sync(t < 16 ? 0xffffu : ~0u, t, 0);", "deadlock|names lanes|waits for lanes"),
        ("if (t < 16) __syncwarp(); else __shfl_sync(~0u, t, 0);", "lanes of one warp diverge"),
    ],
)
def test_reports(body: str, found: str) -> None:
    if found == "nothing":
        assert len(run(body)) == 32
        return
    with pytest.raises(EmulatorFault, match=found):
        run(body)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("", ""), "nothing"),
        (("cp_async_wait<0>();", "cp_async_wait<1>();"), "in flight"),
        (("cp_async_wait<0>();", ""), "in flight"),
        (("__syncwarp();", ""), "race in shared memory"),
        (("out[t] = s[t ^ 1][0];", ""), "nothing"),
        (("cp_async_commit();", ""), "in flight"),
        (("cp_async_16(s[t], in + 4 * t);", "cp_async_16(s[t], in + 4 * t + 4);"), "past the end of argument 1"),
        (("cp_async_16(s[t], in + 4 * t);", "cp_async_16(s[t], in + 4 * t + 1);"), "not a multiple of the size"),
        (("cp_async_16(s[t],", "cp_async_16(out + 4 * t,"), "not in shared memory"),
    ],
)
def test_reports_of_asynchronous_copies(change: tuple[str, str], found: str) -> None:
    body = """
        __shared__ __align__(16) float s[32][4];
        cp_async_16(s[t], in + 4 * t);
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
        out[t] = s[t ^ 1][0];
    """
    body = body.replace(*change) if change[0] else body
    out, given = np.zeros(32, np.float32), np.arange(128, dtype=np.float32)
    copy = kernel(body, "float* out, const float* in", before='#include "ptx.cuh"')
    if found == "nothing":
        copy((1,), (32,), (out, given))
        return
    with pytest.raises(EmulatorFault, match=found):
        copy((1,), (32,), (out, given))


@pytest.mark.parametrize("checked", [False, True])
def test_what_is_found_in_fast_mode_too(checked: bool) -> None:
    assert "deadlock" in faults_of("if (t < 32) __syncthreads();", 64, checked=checked).replace(
        "__syncthreads after threads of the block have returned", "deadlock"
    )
    assert "divergent __syncthreads" in faults_of(
        "if (t < 32) __syncthreads(); else __syncthreads();", 64, checked=checked
    )
    assert "names lanes that the block does not have" in faults_of("__shfl_sync(~0u, t, 0);", 31, checked=checked)


def test_a_kernel_that_waits_for_ever_is_ended() -> None:
    body = "volatile float* flag = out; if (t == 3) while (flag[0] != 1) {}"
    for checked in (False, True):
        assert "takes too long; block (0, 0, 0) thread (3, 0, 0) was running" in faults_of(body, checked=checked)


def test_a_crash_in_fast_mode_is_a_report() -> None:
    assert "Segmentation fault" in faults_of("*reinterpret_cast<volatile float*>(64) = 1;", checked=False)
    assert "Floating point exception" in faults_of("volatile int zero = 0; out[t] = 7 / zero;", checked=False)
    assert run("out[t] = t;", checked=False) == LANES.tolist()


def test_a_report_names_every_line_between_the_kernel_and_the_access() -> None:
    with pytest.raises(EmulatorFault, match=r"at types\.cuh:\d+ in kernel\.cu:2|at kernel\.cu:2"):
        kernel("out[t + 1] = to_float(1.0f);", before='#include "types.cuh"')((1,), (32,), (np.zeros(32, np.float32),))


# ---- What it refuses ----


def test_arguments_are_those_of_the_kernel() -> None:
    takes = kernel("", "const __half* x, float* y, int n, unsigned long long seed, float eps, bool flag", checked=False)
    x, y = np.zeros(4, np.float16), np.zeros(4, np.float32)
    good: list[Argument] = [x, y, np.int32(4), np.uint64(1), np.float32(1e-5), np.bool_(True)]
    takes((1,), (32,), good)
    takes((1,), (32,), [None, *good[1:-1], True])
    refused: list[tuple[int, Argument, str]] = [
        (0, y, "must be an array of float16, not an array of float32"),
        (1, x, "must be an array of float32, not an array of float16"),
        (0, np.zeros(8, np.float16)[::2], "an array with gaps"),
        (0, np.uint64(0), "must be an array of float16, not uint64"),
        (2, 4, "must be numpy.int32, not int64"),
        (2, np.uint32(4), "must be numpy.int32, not uint32"),
        (2, np.float32(4), "must be numpy.int32, not float32"),
        (2, x, "must be numpy.int32, not an array"),
        (2, None, "must be numpy.int32, not None"),
        (3, np.int64(1), "must be numpy.uint64, not int64"),
        (4, 1e-5, "must be numpy.float32, not float64"),
        (5, 1, "must be numpy.bool, not int64"),
    ]
    for index, bad, message in refused:
        with pytest.raises(TypeError, match=message):
            takes((1,), (32,), [*good[:index], bad, *good[index + 1 :]])
    with pytest.raises(TypeError, match="takes 6 arguments, not 5"):
        takes((1,), (32,), good[:-1])


@pytest.mark.parametrize(
    ("grid", "block"),
    [((0,), (32,)), ((2**31,), (32,)), ((1,), (0,)), ((1,), (2048,)), ((1, 65536), (32,)), ((1,), (1, 1, 128))],
)
def test_launches_that_no_gpu_takes(grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no GPU takes"):
        kernel("", "", checked=False)(grid, block, ())


def test_launch_bounds_are_the_most_threads() -> None:
    source = """
    constexpr int kThreads = 64;
    extern "C" __global__ void __launch_bounds__(kThreads / 2, 4) some() {}
    extern "C" __global__ void any() {}
    """
    kernels = Module(source, "bounds.cu").kernels
    kernels["any"]((1,), (1024,), ())
    kernels["some"]((1,), (32,), ())
    with pytest.raises(ValueError, match=r"no GPU takes .* blocks of \[33, 1, 1\] threads"):
        kernels["some"]((1,), (33,), ())


def test_much_shared_memory_must_be_asked_for() -> None:
    takes = kernel("extern __shared__ float s[]; s[t + 16 * 1024] = t; out[t] = s[t + 16 * 1024];")
    out = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="more than max_dynamic_shared_size_bytes, 49152"):
        takes((1,), (32,), (out,), 100 << 10)
    takes.max_dynamic_shared_size_bytes = 100 << 10
    takes((1,), (32,), (out,), 100 << 10)
    assert out.tolist() == LANES.tolist()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__global__ void kernel() {}", "there is no kernel"),
        ('extern "C" __global__ void kernel() { __shared__ float a[2], b[2]; }', "one shared variable per statement"),
        ('extern "C" __global__ void kernel() { nothing(); }', "nothing"),
    ],
)
def test_sources_that_it_does_not_take(source: str, message: str) -> None:
    with pytest.raises(CompilationError, match=message):
        Module(source, "kernel.cu")
