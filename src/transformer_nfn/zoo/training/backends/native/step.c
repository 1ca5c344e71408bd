/* One training step of many small transformers, each group of samples staying in the cache.

   For each network and each few samples: forward, loss, backward, weight gradients added up.
   Nothing but weights, inputs and gradients touches memory. The arithmetic is that of
   zoo/network.py, which is the reference the tests compare with; names are the same.

   Sizes are constants, so that loops are unrolled for them: compile.py compiles this file once
   for each kind of network and gives TNFN_WIDTH, TNFN_HEADS, TNFN_NEURONS and TNFN_BLOCKS. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define D TNFN_WIDTH
#define H TNFN_HEADS
#define E (D / H) /* width of a head */
#define F TNFN_NEURONS
#define BLOCKS TNFN_BLOCKS
#define SITES (1 + 2 * BLOCKS)
#define LOGITS 16 /* classes, padded */

/* Rows of D and of F are whole vectors; those of a head need not be. TNFN_VECTOR is for tests of
   what other machines take. */
#define ROWS_OF(n) (D % (n) == 0 && F % (n) == 0)
#if defined(TNFN_VECTOR)
#define VL TNFN_VECTOR
#elif defined(__AVX512F__) && ROWS_OF(16)
#define VL 16
#elif defined(__AVX__) && ROWS_OF(8)
#define VL 8
#elif ROWS_OF(4)
#define VL 4
#else
#error "widths must be multiples of 4"
#endif
typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
#define INLINE static inline __attribute__((always_inline))
#define PAD(n) (((n) + 15) / 16 * 16)
#define WHOLE(n) (((n) + VL - 1) / VL * VL) /* columns of whole vectors */

INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE void store_first(int n, float *p, vf v) { memcpy(p, &v, n * sizeof(float)); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_gt0(vf what, vf if_positive) {
    return (vf)((vi)what & (vi)(if_positive > 0.0f));
}
INLINE float sum(vf v) { /* in two chains, so that additions need not wait for each other */
    float a = 0, b = 0;
    for (int i = 0; i < VL; i += 2) a += v[i], b += v[i + 1];
    return a + b;
}

/* C[i, j] (+)= sum over k of A[i*ra + k*ca] * B[k*rb + j], for ROWS rows and NV vectors. */
#define TILE(ROWS, NV)                                                                     \
    {                                                                                      \
        vf c[ROWS][NV];                                                                    \
        for (int r = 0; r < ROWS; r++)                                                     \
            for (int v = 0; v < NV; v++)                                                   \
                c[r][v] = add ? load(C + (i + r) * rc + j + v * VL) : (vf){0};             \
        for (int q = 0; q < k; q++) {                                                      \
            vf b[NV];                                                                      \
            for (int v = 0; v < NV; v++) b[v] = load(B + q * rb + j + v * VL);             \
            for (int r = 0; r < ROWS; r++) {                                               \
                float a = A[(i + r) * ra + q * ca];                                        \
                for (int v = 0; v < NV; v++) c[r][v] += a * b[v];                          \
            }                                                                              \
        }                                                                                  \
        for (int r = 0; r < ROWS; r++)                                                     \
            for (int v = 0; v < NV; v++) store(C + (i + r) * rc + j + v * VL, c[r][v]);    \
    }

/* Where n is no multiple of VL, the last vectors are read whole and written in part: behind B and C
   something must be readable, and add must be 0. */
#define LAST_TILE(ROWS)                                                                    \
    {                                                                                      \
        vf c[ROWS] = {{0}};                                                                \
        for (int q = 0; q < k; q++) {                                                      \
            vf b = load(B + q * rb + j);                                                   \
            for (int r = 0; r < ROWS; r++) c[r] += A[(i + r) * ra + q * ca] * b;           \
        }                                                                                  \
        for (int r = 0; r < ROWS; r++) store_first(n - j, C + (i + r) * rc + j, c[r]);     \
    }

INLINE void matmul(int m, int n, int k, const float *A, long ra, long ca, const float *B, long rb,
                   float *C, long rc, int add) {
    int i = 0, j;
    for (; i + 4 <= m; i += 4) {
        for (j = 0; j + 16 <= n; j += 16) TILE(4, 16 / VL)
        for (; j + VL <= n; j += VL) TILE(4, 1)
        if (j < n) LAST_TILE(4)
    }
    for (; i < m; i++) {
        for (j = 0; j + 16 <= n; j += 16) TILE(1, 16 / VL)
        for (; j + VL <= n; j += VL) TILE(1, 1)
        if (j < n) LAST_TILE(1)
    }
}

static void transpose(int m, int n, const float *A, float *out) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) out[j * m + i] = A[i * n + j];
}

/* LayerNorm of rows of D in place of a copy: x -> (x - mean) * r, r kept for the way back. */
static void norm(int rows, const float *x, float *out, float *r) {
    for (int i = 0; i < rows; i++) {
        vf s = {0}, q = {0};
        for (int d = 0; d < D; d += VL) s += load(x + i * D + d);
        float mean = sum(s) / D;
        for (int d = 0; d < D; d += VL) { vf c = load(x + i * D + d) - mean; q += c * c; }
        r[i] = 1.0f / sqrtf(sum(q) / D + 1e-5f);
        for (int d = 0; d < D; d += VL)
            store(out + i * D + d, (load(x + i * D + d) - mean) * r[i]);
    }
}

static void norm_back(int rows, const float *g, const float *n, const float *r, float *out) {
    for (int i = 0; i < rows; i++) {
        vf s = {0}, q = {0};
        for (int d = 0; d < D; d += VL) {
            vf v = load(g + i * D + d);
            s += v;
            q += v * load(n + i * D + d);
        }
        float a = sum(s) / D, b = sum(q) / D;
        for (int d = 0; d < D; d += VL)
            store(out + i * D + d, (load(g + i * D + d) - a - load(n + i * D + d) * b) * r[i]);
    }
}

/* exp by splitting off the power of two; relative error below 2e-7 for what softmax needs. */
INLINE vf vexp(vf x) {
    vf low = splat(-87.0f);
    x = (vf)(((vi)x & (vi)(x > low)) | ((vi)low & ~(vi)(x > low)));
    vf t = x * 1.44269504f + 12582912.0f;
    vf n = t - 12582912.0f;
    vf f = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return (vf)((vi)p + (((vi)t - 0x4B400000) << 23));
}

static void softmax(int T, int Tp, float *s) {
    const float scale = 1.0f / sqrtf(E);
    for (int i = 0; i < T; i++, s += Tp) {
        for (int j = T; j < Tp; j++) s[j] = s[0];
        vf most = load(s), total = {0};
        for (int j = VL; j < Tp; j += VL) {
            vf v = load(s + j);
            vi more = (vi)(v > most);
            most = (vf)(((vi)v & more) | ((vi)most & ~more));
        }
        float top = most[0];
        for (int l = 1; l < VL; l++) top = most[l] > top ? most[l] : top;
        for (int j = 0; j < Tp; j += VL) {
            vf e = vexp((load(s + j) - top) * scale);
            store(s + j, e);
            total += e;
        }
        float all = sum(total);
        for (int j = T; j < Tp; j++) all -= s[j], s[j] = 0.0f;
        float one = 1.0f / all;
        for (int j = 0; j < Tp; j += VL) store(s + j, load(s + j) * one);
    }
}

/* What dropout multiplies with: 0, or 1/(1-p). See zoo/randomness.py for the words. */
static void dropout_mask(int rows, uint32_t first, const int32_t *key, uint32_t threshold,
                         float scale, float *out) {
    vu lane;
    for (int l = 0; l < VL; l++) lane[l] = l;
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < D / 2; d += VL) {
            int n = D / 2 - d < VL ? D / 2 - d : VL;
            vu x = (lane + (first + i) * (D / 2) + d) * 0x9E3779B9u + (uint32_t)key[0];
            x = (x ^ (x >> 16)) * 0x7FEB352Du;
            x = (x ^ (x >> 15) ^ (uint32_t)key[1]) * 0x846CA68Bu;
            x = x ^ (x >> 16);
            vi keep_low = (vi)((x & 0xFFFF) >= threshold), keep_high = (vi)((x >> 16) >= threshold);
            store_first(n, out + i * D + d, (vf)(keep_low & (vi)splat(scale)));
            store_first(n, out + i * D + D / 2 + d, (vf)(keep_high & (vi)splat(scale)));
        }
}

static void times(int n, float *x, const float *mask) {
    for (int i = 0; i < n; i += VL) store(x + i, load(x + i) * load(mask + i));
}

static void add_rows(int rows, int n, const float *x, float *out) {
    for (int j = 0; j < n; j += VL) {
        vf s = load(out + j);
        for (int i = 0; i < rows; i++) s += load(x + i * n + j);
        store(out + j, s);
    }
}

static void fill_rows(int rows, int n, const float *row, float *out) {
    for (int i = 0; i < rows; i++) memcpy(out + i * n, row, n * sizeof(float));
}

/* Where the tensors of one network lie in its flat row; as NetworkSizes.layout. */
typedef struct { long We, be, qkv[BLOCKS], o[BLOCKS], A[BLOCKS], bA[BLOCKS], B[BLOCKS], bB[BLOCKS],
    W1, b1, W2, b2, size; } Layout;

static Layout layout(int patch, int classes) {
    Layout l; long at = 0;
    l.We = at; at += (long)patch * D;
    l.be = at; at += patch ? D : 0;
    for (int i = 0; i < BLOCKS; i++) {
        l.qkv[i] = at; at += D * 3 * D;
        l.o[i] = at; at += D * D;
        l.A[i] = at; at += D * F;
        l.bA[i] = at; at += F;
        l.B[i] = at; at += F * D;
        l.bB[i] = at; at += D;
    }
    l.W1 = at; at += D * D;
    l.b1 = at; at += D;
    l.W2 = at; at += D * classes;
    l.b2 = at; at += classes;
    l.size = at;
    return l;
}

/* Everything a group of samples needs, cut from one allocation. */
typedef struct {
    float *mask[SITES], *n1[BLOCKS], *r1[BLOCKS], *qkv[BLOCKS], *P[BLOCKS], *a[BLOCKS], *n2[BLOCKS],
        *r2[BLOCKS], *hid[BLOCKS], *nf, *rf, *h, *g, *g2, *gqkv, *ghid, *kt, *ds, *z, *c1, *logits;
    float *qkvT[BLOCKS], *oT[BLOCKS], *AT[BLOCKS], *BT[BLOCKS], *W1T, *W2p, *W2T, *b2p, *gW2;
} Scratch;

static long carve(Scratch *s, float *base, int R, int G, int Tp) {
    long at = 0;
#define CUT(field, n) { s->field = base + at; at += PAD(n); }
    for (int i = 0; i < SITES; i++) CUT(mask[i], R * D)
    for (int i = 0; i < BLOCKS; i++) {
        CUT(n1[i], R * D) CUT(r1[i], R) CUT(qkv[i], R * 3 * D) CUT(P[i], (long)R * H * Tp)
        CUT(a[i], R * D) CUT(n2[i], R * D) CUT(r2[i], R) CUT(hid[i], R * F)
        CUT(qkvT[i], 3 * D * D) CUT(oT[i], D * D) CUT(AT[i], F * D) CUT(BT[i], D * F)
    }
    CUT(nf, R * D) CUT(rf, R) CUT(h, R * D) CUT(g, R * D) CUT(g2, R * D) CUT(gqkv, R * 3 * D)
    CUT(ghid, R * F) CUT(kt, E * Tp) CUT(ds, (long)Tp * Tp) CUT(z, G * D) CUT(c1, G * D)
    CUT(logits, G * LOGITS) CUT(W1T, D * D) CUT(W2p, D * LOGITS) CUT(W2T, LOGITS * D)
    CUT(b2p, LOGITS) CUT(gW2, D * LOGITS)
    return at + VL; /* readable behind the last, see LAST_TILE */
}
#include "pass.h"
