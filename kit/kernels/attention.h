// One query over the keys and values of a cache: fp32, bf16, or 8-bit integers with a scale each.

#pragma once
#include "products.h"

static inline float exp_(float x) {  // of the library's accuracy, and it vectorises
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n ln 2
    float p = ((1.3930436e-3f * r + 8.3333333e-3f) * r + 4.1666666e-2f) * r + 0.16666667f;
    p = ((p * r + 0.5f) * r + 1) * r + 1;
    const int32_t power = (int32_t(n) + 127) << 23;
    return p * read<float>(&power);
}

// Scores p (n) -> their exponentials, the largest being 1, and the sum of these.
static float soften(float* p, int n) {
    float most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
    for (int j = 0; j < n; j++) most = p[j] > most ? p[j] : most;
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < n; j++) total += p[j] = exp_(p[j] - most);
    return total;
}

static inline void ask_for(const void* p, int bytes) {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)p + AHEAD + b);
}

static inline float share(float p, const float*, int) { return p; }
static inline float share(float p, const uint16_t*, int) { return p; }
static inline float share(float p, const int8_t* v, int D) { return p * read<float>(v + D); }

// Scores p (n), which become their exponentials, and values `stride` numbers apart -> their mean,
// weighted by these, in y (D)
template <class W> static void mix(const W* v, int stride, int n, int D, float* p, float* y) {
    const float total = soften(p, n);
    int d = 0;
    for (; d + 64 <= D; d += 64) {
        Vec a[4] = {};
        for (int j = 0; j < n; j++) {
            const W* value = v + j * stride;
            const float s = share(p[j], value, D);
            ask_for(value + d, 64 * sizeof(W));
            for (int i = 0; i < 4; i++) a[i] += load(value + d + 16 * i) * s;
        }
        memcpy(y + d, a, sizeof a);
    }
    for (int rest = d; rest < D; rest++) y[rest] = 0;
    for (int j = 0; j < n && d < D; j++) {
        const W* value = v + j * stride;
        const float s = share(p[j], value, D);
        for (int rest = d; rest < D; rest++) y[rest] += number(value[rest]) * s;
    }
    for (d = 0; d < D; d++) y[d] /= total;
}

// q (D), keys and values (n, D; integers D + 4) -> y (D); p has room for n + 15. Keys of bf16 meet
// the query in bf16, where the CPU multiplies that.
template <class X, class W>
static void attend(const X* q, const W* k, const W* v, int n, int D, float scale, float* p,
                   float* y) {
    const int whole = D / GROUP * GROUP, stride = sizeof(W) == 1 ? D + 4 : D;
    for (int j = 0; j < n; j += 16) {
        Vec a[16] = {};
        for (int i = 0; i < 16 && j + i < n; i++) {
            const W* key = k + (j + i) * stride;
            ask_for(key, D * sizeof(W));
            Sums s = {};
            for (int d = 0; d < whole; d += GROUP) s = add(s, key + d, q + d);
            a[i] = s;
        }
        const Vec s = sums(a) * scale;
        memcpy(p + j, &s, sizeof s);
    }
    for (int j = 0; j < n && whole < D; j++)
        for (int d = whole; d < D; d++) p[j] += number(q[d]) * number(k[j * stride + d]) * scale;
    for (int j = 0; j < n && sizeof(W) == 1; j++) p[j] = share(p[j], k + j * stride, D);
    mix(v, stride, n, D, p, y);
}

// --------------------------------------------------------------------------------- 8-bit integers

// A vector (D) as integers of 8 bits, followed by its scale: D + 4 bytes.
static void shrink(const float* x, int D, int8_t* to) {
    const float scale = to_int8(x, D, to);
    memcpy(to + D, &scale, 4);
}

// a + 16 sums of 4 products each, where HELD of k + 128
static inline Ints dot64(Ints a, const int8_t* k, const int8_t* q) {
#if defined(__AVX512VNNI__)
    const __m512i u = _mm512_xor_si512(read<__m512i>(k), _mm512_set1_epi8(-128));  // k + 128
    return (Ints)_mm512_dpbusd_epi32((__m512i)a, u, read<__m512i>(q));
#elif defined(__AVX2__)
    __m256i to[2];
    memcpy(to, &a, 64);
    for (int i = 0; i < 2; i++)
        to[i] = add_products(to[i], read<__m256i>(k + 32 * i), read<__m256i>(q + 32 * i));
    return read<Ints>(to);
#else
    for (int i = 0; i < 64; i++) a[i / 4] += int(k[i]) * q[i];
    return a;
#endif
}

// As above with keys and values of D + 4 bytes each; q is one of them, too.
static void attend(const int8_t* q, const int8_t* k, const int8_t* v, int n, int D, float scale,
                   float* p, float* y) {
    const int whole = D / 64 * 64, stride = D + 4;
    int twist = 0;
    for (int d = 0; HELD && d < whole; d++) twist += 128 * q[d];
    scale *= read<float>(q + D);
    for (int j = 0; j < n; j += 16) {
        Vec a[16] = {};
        float scales[16] = {};
        for (int i = 0; i < 16 && j + i < n; i++) {
            const int8_t* key = k + (j + i) * stride;
            ask_for(key, stride);
            Ints sum = {};
            for (int d = 0; d < whole; d += 64) sum = dot64(sum, key + d, q + d);
            for (int d = whole; d < D; d++) sum[0] += q[d] * key[d];
            a[i] = __builtin_convertvector(sum, Vec);
            scales[i] = read<float>(key + D) * scale;
        }
        const Vec s = (sums(a) - float(twist)) * load(scales);
        memcpy(p + j, &s, sizeof s);
    }
    mix(v, stride, n, D, p, y);
}
