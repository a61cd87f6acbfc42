// One step of the GPT for the newest tokens of a few rows, in one call: model.py's forward pass
// without its head, on all cores. step.py and leaves.py call it; its structures are in native.py.

#include <new>

#include "attention.h"

struct Layer {
    const float *ln_1, *ln_1b, *ln_2, *ln_2b, *logn;
    Linear attn, proj, fc, out;
};
struct Model {
    int n_layer, n_embd, n_head, n_inner, vocab_size, block_size, logn, wte_kind, erf, exact;
    float log_base;
    const void* wte;
    const float *wpe, *ln_f, *ln_fb;
    const Layer* layers;
};
struct Cache {  // of each layer (rows, n_head, length, D); of INT8 a vector has 4 bytes more
    void *const *k, *const *v;
    int rows, length, kind;
};

static inline float gelu(float x) {  // the tanh form: x times sigmoid of twice what tanh is given
    return x / (1 + exp_(-1.59576912f * (x + 0.044715f * x * x * x)));
}
static inline float gelu_erf(float x) { return 0.5f * x * (1 + std::erf(0.70710678f * x)); }

static void normalize(const float* x, int C, const float* w, const float* b, float* y) {
    float mean = 0, var = 0;
#pragma omp simd reduction(+ : mean)
    for (int i = 0; i < C; i++) mean += x[i];
    mean /= C;
#pragma omp simd reduction(+ : var)
    for (int i = 0; i < C; i++) var += (x[i] - mean) * (x[i] - mean);
    const float scale = 1 / std::sqrt(var / C + 1e-5f);
    for (int i = 0; i < C; i++) y[i] = (x[i] - mean) * scale * w[i] + (b ? b[i] : 0);
}

static float query_scale(const Model& m, const Layer& l, int head, int keys) {
    const float log_n = std::log(float(keys));
    if (m.logn == 0) return 1;
    if (m.logn == 3) return l.logn[head] * log_n;
    return m.logn == 2 && log_n < m.log_base ? 1 : log_n / m.log_base;
}

// Whether every matrix has the size that the buffers of a Step are made for.
static bool fits(const Model& m) {
    const int C = m.n_embd, kind = m.n_layer > 0 ? m.layers->attn.kind : -1;
    auto is = [&](const Linear& l, int in, int out) {
        return l.in == in && l.out == out && l.kind == kind;
    };
    if (C < 1 || m.n_head < 1 || C % m.n_head || m.n_inner < 1 || kind < F32 || kind > INT4)
        return false;
    for (const Layer* l = m.layers; l < m.layers + m.n_layer; l++)
        if (!is(l->attn, C, 3 * C) || !is(l->proj, C, C) || !is(l->fc, C, m.n_inner) ||
            !is(l->out, m.n_inner, C) || (m.logn == 3 && !l->logn))
            return false;
    return true;
}

// The tokens of one call and what is computed of them.
struct Step {
    const Model& m;
    const Cache& cache;
    const int tokens;
    const int64_t *ids, *pos, *row;
    const int C, H, D, widest;  // widest: of what one token's products take in
    Input in;
    std::vector<float> x, a, qkv, scores;

    Step(const Model& m, const Cache& cache, int tokens, const int64_t* ids, const int64_t* pos,
         const int64_t* row, int threads)
        : m(m), cache(cache), tokens(tokens), ids(ids), pos(pos), row(row), C(m.n_embd),
          H(m.n_head), D(C / H), widest(std::max(C, m.n_inner)),
          in(tokens, widest, m.layers->attn.kind, m.exact), x(size_t(tokens) * C),
          a(size_t(tokens) * widest),
          qkv(size_t(tokens) * 3 * C), scores(room() * threads) {}

    size_t room() const { return cache.length + 15 + D + 1; }  // of a thread: scores and a query

    void embed(int i) {
        const size_t from = ids[i] * C;
        for (int c = 0; c < C; c++) {
            const float w = m.wte_kind == F32 ? ((const float*)m.wte)[from + c]
                                              : number(((const uint16_t*)m.wte)[from + c]);
            x[i * C + c] = w + m.wpe[pos[i] * C + c];
        }
    }

    // of the cache, what a token's head sees: its keys or values, from position 0 on
    template <class W> W* held(void* all, int i, int h) const {
        const size_t size = cache.kind == INT8 ? D + 4 : D;
        return (W*)all + (size_t(row[i]) * H + h) * cache.length * size;
    }

    template <class W> void store(int layer, int i, int h) {
        const float* from = &qkv[(i * 3 + 1) * C + h * D];
        for (void* all : {cache.k[layer], cache.v[layer]}) {
            W* to_all = held<W>(all, i, h);
            if constexpr (sizeof(W) == 1) shrink(from, D, to_all + pos[i] * (D + 4));
            else
                for (int d = 0; d < D; d++) to_all[pos[i] * D + d] = to(from[d], W());
            from += C;
        }
    }

    template <class X, class W> void look(int layer, int i, int h, int thread) {
        float* from = &qkv[i * 3 * C + h * D];
        const float scale = query_scale(m, m.layers[layer], h, pos[i] + 1);
        for (int d = 0; d < D; d++) from[d] *= scale;  // before it is rounded, as in model.py
        float* p = &scores[room() * thread];
        X* q = (X*)(p + cache.length + 15);
        if constexpr (sizeof(X) == 1) shrink(from, D, q);
        else
            for (int d = 0; d < D; d++) q[d] = to(from[d], X());
        attend(q, held<const W>(cache.k[layer], i, h), held<const W>(cache.v[layer], i, h),
               pos[i] + 1, D, 1 / std::sqrt(float(D)), p, &a[i * C + h * D]);
    }

    void block(Member& me, int layer) {
        const Layer& l = m.layers[layer];
        // copies, and plain pointers: the compiler may keep them
        const size_t C = this->C, inner = m.n_inner;
        float *x = this->x.data(), *a = this->a.data(), *qkv = this->qkv.data();
        auto add_to_x = [=](size_t i, int first, const float* y, int n) {
            for (int o = 0; o < n; o++) x[i * C + first + o] += y[o];
        };
        me.each(tokens, [&](int i) {
            normalize(&x[i * C], C, l.ln_1, l.ln_1b, &a[i * C]);
            put(in, l.attn, i, &a[i * C]);
        });
        product(me, l.attn, in, [=](size_t i, int first, const float* y, int n) {
            memcpy(&qkv[i * 3 * C + first], y, n * 4);
        });
        me.each(tokens * H, [&](int j) {
            if (cache.kind == F32) store<float>(layer, j / H, j % H);
            if (cache.kind == BF16) store<uint16_t>(layer, j / H, j % H);
            if (cache.kind == INT8) store<int8_t>(layer, j / H, j % H);
        });
        me.each(tokens * H, [&](int j) {
            const int i = j / H, h = j % H, kind = cache.kind;
            if (kind == F32) look<float, float>(layer, i, h, me.number);
            if (kind == BF16 && m.exact) look<float, uint16_t>(layer, i, h, me.number);
            if (kind == BF16 && !m.exact) look<ForBF16, uint16_t>(layer, i, h, me.number);
            if (kind == INT8 && m.exact) look<float, int8_t>(layer, i, h, me.number);
            if (kind == INT8 && !m.exact) look<int8_t, int8_t>(layer, i, h, me.number);
        });
        me.each(tokens, [&](int i) { put(in, l.proj, i, &a[i * C]); });
        product(me, l.proj, in, add_to_x);
        me.each(tokens, [&](int i) {
            normalize(&x[i * C], C, l.ln_2, l.ln_2b, &a[i * C]);
            put(in, l.fc, i, &a[i * C]);
        });
        product(me, l.fc, in, [=](size_t i, int first, const float* y, int n) {
            float* to = a + i * inner + first;
            if (m.erf) {
                for (int o = 0; o < n; o++) to[o] = gelu_erf(y[o]);
                return;
            }
#pragma omp simd
            for (int o = 0; o < n; o++) to[o] = gelu(y[o]);
        });
        me.each(tokens, [&](int i) { put(in, l.out, i, &a[i * inner]); });
        product(me, l.out, in, add_to_x);
    }
};

extern "C" {

Team* make_team(int threads) { return new Team(threads); }

// y (tokens, out) = x (tokens, in) @ w.T + bias; 2 where memory is full
int linear(Team* team, const Linear& l, int tokens, const float* x, float* y, int exact) try {
    if (!tokens) return 0;
    Input in(tokens, l.in, l.kind, exact);
    team->run([&](int number, uint32_t phase) {
        Member me{*team, number, phase};
        me.each(tokens, [&](int token) { put(in, l, token, x + size_t(token) * l.in); });
        product(me, l, in, [&](size_t token, int first, const float* values, int n) {
            memcpy(y + token * l.out + first, values, n * 4);
        });
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}

// Tokens with their ids, positions and rows of the cache -> hidden states (tokens, C) before the
// head; their keys and values go to the cache. 1 if an id, a position or a row cannot be, 3 if a
// matrix has another size than the model.
int step(Team* team, const Model& m, int tokens, const int64_t* ids, const int64_t* pos,
         const int64_t* row, const Cache& cache, float* out) try {
    if (!fits(m)) return 3;
    for (int i = 0; i < tokens; i++)
        if (ids[i] < 0 || ids[i] >= m.vocab_size || pos[i] < 0 || pos[i] >= cache.length ||
            pos[i] >= m.block_size || row[i] < 0 || row[i] >= cache.rows)
            return 1;
    Step s(m, cache, tokens, ids, pos, row, team->size);
    team->run([&](int number, uint32_t phase) {
        Member me{*team, number, phase};
        me.each(tokens, [&](int i) { s.embed(i); });
        for (int layer = 0; layer < m.n_layer; layer++) s.block(me, layer);
        me.each(tokens, [&](int i) {
            normalize(&s.x[i * s.C], s.C, m.ln_f, m.ln_fb, out + i * s.C);
        });
    });
    return 0;
} catch (const std::bad_alloc&) {
    return 2;
}
}
