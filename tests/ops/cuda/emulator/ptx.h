// The functions of cuda/ptx.cuh on the host. Fragment layouts are those of the PTX ISA, "Matrix fragments for mma.m16n8k16".
#pragma once

#include "language.h"

namespace emulator {

// ---- ldmatrix: matrix i of 8 x 8 16-bit elements has its row r at the address that lane 8 i + r brings ----

struct MatrixLoad {
    unsigned* fragments;
    const void* row;
};

template <int count, bool transposed>
EMULATOR_UNCHECKED void combine_matrix_loads(void* const arguments[kWarpSize], unsigned) {
    for (int matrix = 0; matrix < count; matrix++) {
        uint16_t elements[8][8];
        for (int row = 0; row < 8; row++) {
            std::memcpy(elements[row], static_cast<MatrixLoad*>(arguments[8 * matrix + row])->row, sizeof elements[row]);
        }
        for (unsigned lane = 0; lane < kWarpSize; lane++) {
            const int row = lane / 4, column = lane % 4 * 2;
            const uint32_t low = transposed ? elements[column][row] : elements[row][column];
            const uint32_t high = transposed ? elements[column + 1][row] : elements[row][column + 1];
            static_cast<MatrixLoad*>(arguments[lane])->fragments[matrix] = low | high << 16;
        }
    }
}

template <int count, bool transposed>
EMULATOR_UNCHECKED void load_matrices(unsigned* fragments, const void* row, const Site& site) {
    if (lane() < 8 * count) {
        if (reinterpret_cast<uintptr_t>(row) % 16) fault("ldmatrix: the address of a row is not a multiple of 16", site);
        touch(row, 16, Access::read, __builtin_return_address(0));
    }
    MatrixLoad load{fragments, row};
    collective("ldmatrix", kAllLanes, &load, combine_matrix_loads<count, transposed>, site);
}

// ---- mma: D = A B + C with A [16, 16] by rows, B [16, 8] by columns, C and D [16, 8] float32 ----

struct MatrixProduct {
    float* d;
    const unsigned* a;
    const unsigned* b;
    const float* c;
};

template <typename Element>
EMULATOR_UNCHECKED float element_of(unsigned pair, int half) {
    static const float* const table = [] {
        static float values[1 << 16];
        for (unsigned bits = 0; bits < 1 << 16; bits++) {
            values[bits] = static_cast<float>(std::bit_cast<Element>(static_cast<uint16_t>(bits)));
        }
        return values;
    }();
    return table[pair >> 16 * half & 0xffff];
}

template <typename Element>
EMULATOR_UNCHECKED void combine_matrix_products(void* const arguments[kWarpSize], unsigned) {
    float a[16][16], b[16][8], d[16][8];
    for (unsigned lane = 0; lane < kWarpSize; lane++) {
        const MatrixProduct& product = *static_cast<MatrixProduct*>(arguments[lane]);
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int half = 0; half < 2; half++) {
            for (int part = 0; part < 4; part++) {
                a[group + part % 2 * 8][pair + part / 2 * 8 + half] = element_of<Element>(product.a[part], half);
            }
            for (int part = 0; part < 2; part++) {
                b[pair + part * 8 + half][group] = element_of<Element>(product.b[part], half);
                d[group + part * 8][pair + half] = product.c[part * 2 + half];
            }
        }
    }
    for (int row = 0; row < 16; row++) {
        for (int k = 0; k < 16; k++) {
            for (int column = 0; column < 8; column++) d[row][column] += a[row][k] * b[k][column];
        }
    }
    for (unsigned lane = 0; lane < kWarpSize; lane++) {
        const MatrixProduct& product = *static_cast<MatrixProduct*>(arguments[lane]);
        const int group = lane / 4, pair = lane % 4 * 2;
        for (int part = 0; part < 4; part++) product.d[part] = d[group + part / 2 * 8][pair + part % 2];
    }
}

template <typename Element>
EMULATOR_UNCHECKED void multiply_matrices(
    float* d, const unsigned* a, const unsigned* b, const float* c, const Site& site) {
    MatrixProduct product{d, a, b, c};
    collective("mma.m16n8k16", kAllLanes, &product, combine_matrix_products<Element>, site);
}

}  // namespace emulator

inline void ldmatrix_x2(unsigned* fragments, const void* row, emulator::Site site = emulator::Site::current()) {
    emulator::load_matrices<2, false>(fragments, row, site);
}
inline void ldmatrix_x4(unsigned* fragments, const void* row, emulator::Site site = emulator::Site::current()) {
    emulator::load_matrices<4, false>(fragments, row, site);
}
inline void ldmatrix_x2_trans(unsigned* fragments, const void* row, emulator::Site site = emulator::Site::current()) {
    emulator::load_matrices<2, true>(fragments, row, site);
}
inline void ldmatrix_x4_trans(unsigned* fragments, const void* row, emulator::Site site = emulator::Site::current()) {
    emulator::load_matrices<4, true>(fragments, row, site);
}

inline void mma_m16n8k16_f16(
    float* d, const unsigned* a, const unsigned* b, const float* c, emulator::Site site = emulator::Site::current()) {
    emulator::multiply_matrices<__half>(d, a, b, c, site);
}
inline void mma_m16n8k16_bf16(
    float* d, const unsigned* a, const unsigned* b, const float* c, emulator::Site site = emulator::Site::current()) {
    emulator::multiply_matrices<__nv_bfloat16>(d, a, b, c, site);
}

inline void cp_async_16(void* shared, const void* global, emulator::Site site = emulator::Site::current()) {
    emulator::copy_async(shared, global, 16, 16, site);
}
inline void cp_async_16_zfill(
    void* shared, const void* global, bool valid, emulator::Site site = emulator::Site::current()) {
    emulator::copy_async(shared, global, 16, valid ? 16 : 0, site);
}
inline void cp_async_commit() { emulator::copy_async_commit(); }
template <int groups_still_running>
void cp_async_wait() {
    emulator::copy_async_wait(groups_still_running);
}

inline float exp2_approx(float x) { return std::exp2(x); }
