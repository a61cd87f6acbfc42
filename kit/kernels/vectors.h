// 16 numbers at once on any machine: the compiler splits them where registers are shorter.

#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using std::int32_t, std::int64_t, std::int8_t, std::size_t;
using std::uint16_t, std::uint32_t, std::uint8_t;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int8_t Shorts __attribute__((vector_size(16)));

template <class V> static inline V read(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
#if defined(__AVX2__)
static inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
static inline __m256 load8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(read<__m128i>(p)), 16));
}
static inline __m256 load8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
template <class W> static inline Vec load_halves(const W* p) {
    const __m256 both[2] = {load8(p), load8(p + 8)};
    return read<Vec>(both);
}
#endif
static inline Vec load(const float* p) { return read<Vec>(p); }
static inline Vec load(const uint16_t* p) {  // bf16 is the upper half of fp32
#if defined(__AVX512F__)  // what compilers make of the last line is slower
    return (Vec)((Bits)_mm512_cvtepu16_epi32(read<__m256i>(p)) << 16);
#elif defined(__AVX2__)
    return load_halves(p);
#else
    return (Vec)(__builtin_convertvector(read<Halves>(p), Bits) << 16);
#endif
}
static inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(p)));
#elif defined(__AVX2__)
    return load_halves(p);
#else
    return __builtin_convertvector(__builtin_convertvector(read<Shorts>(p), Ints), Vec);
#endif
}
static inline float number(float x) { return x; }
static inline float number(int8_t x) { return x; }
static inline float number(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    return read<float>(&bits);
}
static inline float to(float x, float) { return x; }
static inline uint16_t to(float x, uint16_t) {  // the nearest bf16; ties to even
    const uint32_t bits = read<uint32_t>(&x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#if defined(__AVX512F__)
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
// Neighbours of width W are added, those of a and those of b in turn; four folds make 16 sums.
template <int W> static inline Vec fold(Vec a, Vec b) {
    if (W == 1)
        return PICK(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               PICK(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    if (W == 2)
        return PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    if (W == 4)
        return PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PICK(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
static inline Vec sums(const Vec* v) {  // of 16 vectors, each as sum() has it
    Vec a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) a[i] = fold<1>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) b[i] = fold<2>(a[2 * i], a[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) c[i] = fold<4>(b[2 * i], b[2 * i + 1]);
    return fold<8>(c[0], c[1]);
}
static inline float sum(Vec v) {
    v = fold<1>(v, v), v = fold<2>(v, v), v = fold<4>(v, v);
    return fold<8>(v, v)[0];
}
#else
static inline float sum(Vec v) {
#if defined(__AVX2__)
    __m256 half[2];
    memcpy(half, &v, 64);
    half[0] = _mm256_add_ps(half[0], half[1]);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(half[0]), _mm256_extractf128_ps(half[0], 1));
    s = _mm_hadd_ps(s, s);
    return _mm_cvtss_f32(_mm_hadd_ps(s, s));
#else
    float s[16];
    memcpy(s, &v, 64);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) s[i] += s[i + n];
    return s[0];
#endif
}
static inline Vec sums(const Vec* v) {
    float s[16];
    for (int i = 0; i < 16; i++) s[i] = sum(v[i]);
    return read<Vec>(s);
}
#endif
