// Products of a few tokens with matrices of weights, as fast as memory gives the weights.
//
// Weights are fp32 or bf16 as PyTorch holds them (out, in), or the integers of quantize.py:
// tiles of 16 outputs, groups of 32 inputs with one bf16 scale for each output and group, four
// inputs of an output side by side as dpbusd multiplies them, offset to unsigned. Activations meet
// fp32 as they are, bf16 in bf16 where the CPU multiplies that, integers as 8-bit integers with a
// scale for each group. Sums are in fp32 and one order: no token depends on those beside it.

#pragma once
#include <cmath>
#include <vector>

#include "team.h"
#include "vectors.h"

enum Kind { F32, BF16, INT8, INT4 };
const int TILE = 16, GROUP = 32, MOST = 8;  // outputs, inputs, tokens that are worked on together
const int AHEAD = 2048;                     // bytes that are asked for before they are needed

struct Linear {
    const void* w;
    const uint16_t* scale;
    const float* bias;
    int in, out, kind;
};

#if defined(__AVX512BF16__)
typedef uint16_t ForBF16;  // what an activation becomes to meet a weight or a key of bf16
#else
typedef float ForBF16;
#endif

// ------------------------------------------------------------------------------- activations

// Tokens on their way into a product: (groups, rows, 32), as its weights want them. A token is one
// row or, where it must be exact, two: the rounded numbers, and what is left of them.
struct Input {
    std::vector<float> f, scale;
    std::vector<uint16_t> h;
    std::vector<int8_t> q;
    std::vector<int> total;  // of the integers of a group
    const int terms;         // rows of a token
    const size_t rows;

    Input(size_t tokens, size_t in, int kind, bool exact)
        : terms(exact && (kind >= INT8 || (kind == BF16 && sizeof(ForBF16) == 2)) ? 2 : 1),
          rows(tokens * terms) {
        const size_t groups = rows * ((in + GROUP - 1) / GROUP);
        if (kind < INT8) f.resize(groups * GROUP), h.resize(groups * GROUP);
        else q.resize(groups * GROUP), scale.resize(groups), total.resize(groups);
    }
    const float* at(size_t g, size_t row, float) const { return &f[(g * rows + row) * GROUP]; }
    const uint16_t* at(size_t g, size_t row, uint16_t) const {
        return &h[(g * rows + row) * GROUP];
    }
};

// x (n) -> integers of 8 bits and their scale, which is NaN if any of x is not finite.
static inline float to_int8(const float* x, int n, int8_t* q) {
    float most = 0, odd = 0;
#pragma omp simd reduction(max : most) reduction(+ : odd)
    for (int i = 0; i < n; i++) {
        most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
        odd += x[i] * 0;
    }
    const float up = most > 0 ? 127 / most : 0;
    for (int i = 0; i < n; i++) q[i] = int(std::nearbyint(x[i] * up));
    return most / 127 + odd;
}

static void put_row(Input& x, const Linear& l, size_t row, const float* from) {
    for (int g = 0; g * GROUP < l.in; g++) {
        const size_t at = g * x.rows + row, left = l.in - g * GROUP;
        float v[GROUP] = {};
        memcpy(v, from + g * GROUP, 4 * (left < GROUP ? left : GROUP));
        if (l.kind == F32 || l.kind == BF16) {
            memcpy(&x.f[at * GROUP], v, sizeof v);
            for (int i = 0; i < GROUP; i++) x.h[at * GROUP + i] = to(v[i], uint16_t());
            continue;
        }
        int8_t q[GROUP];
        int total = 0;
        x.scale[at] = to_int8(v, GROUP, q);
        for (int i = 0; i < GROUP; i++) total += q[i];
        memcpy(&x.q[at * GROUP], q, GROUP);
        x.total[at] = total;
    }
}

static void put(Input& x, const Linear& l, size_t token, const float* from) {
    const size_t row = token * x.terms;
    put_row(x, l, row, from);
    if (x.terms == 1) return;
    std::vector<float> rest(l.in);
    for (int i = 0; i < l.in; i++) {
        const size_t group = i / GROUP * x.rows + row, at = group * GROUP + i % GROUP;
        rest[i] = from[i] - (l.kind < INT8 ? number(x.h[at]) : x.q[at] * x.scale[group]);
    }
    put_row(x, l, row + 1, rest.data());
}

// --------------------------------------------------------------------------------- integers

#if defined(__AVX512VNNI__)
const bool HELD = true;  // weights go into the product with their offset, which is taken off later
#else
const bool HELD = false;
#endif

#if defined(__AVX2__)
// to + 8 sums of 4 products each; |w| times x with the sign of w, so no pair reaches 2^15
static inline __m256i add_products(__m256i to, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(to, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

// a[i] + the products of weights 4i to 4i + 3 with four activations
template <int OFFSET> static inline Ints dot(Ints a, Bytes w, const int8_t* x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, _mm512_set1_epi32(read<int32_t>(x)));
#elif defined(__AVX2__)
    __m256i half[2], to[2], xs = _mm256_set1_epi32(read<int32_t>(x));
    memcpy(half, &w, 64), memcpy(to, &a, 64);
    for (int i = 0; i < 2; i++)
        to[i] = add_products(to[i], _mm256_sub_epi8(half[i], _mm256_set1_epi8(char(OFFSET))), xs);
    return read<Ints>(to);
#else
    for (int i = 0; i < 64; i++) a[i / 4] += (int(w[i]) - OFFSET) * x[i % 4];
    return a;
#endif
}

static inline Bytes half_of(Bytes w, bool upper) {  // the upper or lower 4 bits of each byte
#if defined(__AVX2__) && !defined(__AVX512BW__)
    __m256i half[2];
    memcpy(half, &w, 64);
    for (__m256i& h : half) {
        if (upper) h = _mm256_srli_epi16(h, 4);
        h = _mm256_and_si256(h, _mm256_set1_epi8(15));
    }
    return read<Bytes>(half);
#else
    return (upper ? (Bytes)((Bits)w >> 4) : w) & 15;
#endif
}

template <int BITS, int N>  // a tile of packed integers, N tokens from `row` on
static void tile(const Linear& l, int t, const Input& x, size_t row, float (*y)[TILE]) {
    const int G = (l.in + GROUP - 1) / GROUP, OFFSET = BITS == 8 ? 128 : 8;
    const int SIZE = GROUP * TILE * BITS / 8;
    const uint8_t* w = (const uint8_t*)l.w + size_t(t) * G * SIZE;
    const uint16_t* scale = l.scale + size_t(t) * G * TILE;
    Vec acc[N] = {};
    for (int g = 0; g < G; g++, w += SIZE, scale += TILE) {
        const size_t at = g * x.rows + row;
        const int8_t* q = &x.q[at * GROUP];
        Ints a[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) a[n] = Ints{} - (HELD ? OFFSET * x.total[at + n] : 0);
#pragma GCC unroll 8
        for (int k = 0; k < GROUP; k += 4) {
            Bytes b = read<Bytes>(w + (BITS == 8 ? k * TILE : k / 8 * 64));
            if (BITS == 4) b = half_of(b, k % 8);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) a[n] = dot<OFFSET>(a[n], b, q + n * GROUP + k);
        }
        const Vec s = load(scale);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            acc[n] += __builtin_convertvector(a[n], Vec) * (s * x.scale[at + n]);
    }
    memcpy(y, acc, sizeof acc);
}

// ------------------------------------------------------------------------------ fp32 and bf16

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
struct Sums {  // two registers: compilers keep a Vec in memory here
    __m256 low = {}, high = {};
    operator Vec() const { return read<Vec>(this); }
};
template <class W> static inline Sums add(Sums a, const W* w, const float* x) {
    a.low = _mm256_fmadd_ps(load8(w), load8(x), a.low);
    a.high = _mm256_fmadd_ps(load8(w + 8), load8(x + 8), a.high);
    a.low = _mm256_fmadd_ps(load8(w + 16), load8(x + 16), a.low);
    a.high = _mm256_fmadd_ps(load8(w + 24), load8(x + 24), a.high);
    return a;
}
#else
typedef Vec Sums;
// a + the products of 32 weights with 32 activations, in 16 sums
template <class W> static inline Vec add(Vec a, const W* w, const float* x) {
    a += load(w) * load(x);
    return a + load(w + 16) * load(x + 16);
}
#endif
#if defined(__AVX512BF16__)
static inline Vec add(Vec a, const uint16_t* w, const uint16_t* x) {
    const __m512i b = _mm512_loadu_si512(w), c = _mm512_loadu_si512(x);
    return (Vec)_mm512_dpbf16_ps((__m512)a, (__m512bh)b, (__m512bh)c);
}
#endif

template <int R, int N, class X, class W>  // R rows of weights, N tokens
static void rows(const W* w, const Input& x, size_t row, size_t in, float (*y)[TILE], int at) {
    const size_t ahead = R == 1 ? AHEAD : 2 * R * in * sizeof(W);
    Sums acc[R * N] = {};
    size_t g = 0;
    for (; (g + 1) * GROUP <= in; g++) {
        const X* from = x.at(g, row, X());
        for (int r = 0; r < R; r++)
            __builtin_prefetch((const char*)(w + r * in + g * GROUP) + ahead);
#pragma GCC unroll 16
        for (int i = 0; i < R * N; i++)
            acc[i] = add(acc[i], w + i / N * in + g * GROUP, from + i % N * GROUP);
    }
    float s[16];
    if (R * N == 16) {
        Vec all[16];
        for (int i = 0; i < 16; i++) all[i % (R * N)] = acc[i % (R * N)];
        const Vec each = sums(all);
        memcpy(s, &each, 64);
    } else {
        for (int i = 0; i < R * N; i++) s[i] = sum(acc[i]);
    }
    for (int i = 0; i < R * N; i++) {
        for (size_t k = g * GROUP; k < in; k++)
            s[i] += number(w[i / N * in + k]) * number(x.at(g, row + i % N, X())[k % GROUP]);
        y[i % N][at + i / N] = s[i];
    }
}

template <int N, class X, class W>
static void tile(const Linear& l, const W* w, int t, const Input& x, size_t row, float (*y)[TILE]) {
    const int R = N == 1 ? 1 : 16 / N;  // one token: memory is all, and one stream is the fastest
    const size_t in = l.in;
    const int m = l.out - t * TILE < TILE ? l.out - t * TILE : TILE;
    w += t * TILE * in;
    int at = 0;
    for (; at + R <= m; at += R) rows<R, N, X>(w + at * in, x, row, in, y, at);
    for (; at < m; at++) rows<1, N, X>(w + at * in, x, row, in, y, at);
}

// ---------------------------------------------------------------------------------- any matrix

template <int N>
static void tile(const Linear& l, int t, const Input& x, size_t row, float (*y)[TILE]) {
    if (l.kind == F32) tile<N, float>(l, (const float*)l.w, t, x, row, y);
    if (l.kind == BF16) tile<N, ForBF16>(l, (const uint16_t*)l.w, t, x, row, y);
    if (l.kind == INT8) tile<8, N>(l, t, x, row, y);
    if (l.kind == INT4) tile<4, N>(l, t, x, row, y);
}

// Those of a team share this. done(token, first output, values, their number).
template <class Done> static void product(Member& me, const Linear& l, const Input& x, Done done) {
    me.each((l.out + TILE - 1) / TILE, [&](int t) {
        const int first = t * TILE, m = l.out - first < TILE ? l.out - first : TILE;
        const int rows = x.rows;
        for (int row = 0, n; row < rows; row += n) {
            float y[MOST][TILE];
            const int left = rows - row;
            n = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (n == 8) tile<8>(l, t, x, row, y);
            if (n == 4) tile<4>(l, t, x, row, y);
            if (n == 2) tile<2>(l, t, x, row, y);
            if (n == 1) tile<1>(l, t, x, row, y);
            for (int i = 0; i < n; i += x.terms) {
                for (int o = 0; x.terms == 2 && o < m; o++) y[i][o] += y[i + 1][o];
                for (int o = 0; l.bias && o < m; o++) y[i][o] += l.bias[first + o];
                done(size_t(row + i) / x.terms, first, y[i], m);
            }
        }
    });
}
