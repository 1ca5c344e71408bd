/* Vectors and products of small matrices, for C code about networks of one size.

   Sizes are constants, so that loops are unrolled for them: compile.py compiles each source once
   for each kind of network and gives TNFN_WIDTH, TNFN_HEADS, TNFN_NEURONS and TNFN_BLOCKS. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define D TNFN_WIDTH
#define H TNFN_HEADS
#define E (D / H) /* width of a head */
#define F TNFN_NEURONS
#define BLOCKS TNFN_BLOCKS
#ifdef TNFN_LOGITS
#define LOGITS TNFN_LOGITS /* classes, padded to a multiple of 16 */
#else
#define LOGITS 16
#endif

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

typedef float anywhere __attribute__((vector_size(VL * 4), aligned(4), may_alias));
INLINE vf load(const float *p) { return *(const anywhere *)p; }
INLINE void store(float *p, vf v) { *(anywhere *)p = v; }
INLINE void store_first(int n, float *p, vf v) {
    if (n >= VL) store(p, v);
    else memcpy(p, &v, n * sizeof(float));
}
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf select_gt0(vf what, vf if_positive) {
    return (vf)((vi)what & (vi)(if_positive > 0.0f));
}
#if defined(__aarch64__) && VL == 4
#define NEON
#include <arm_neon.h>
INLINE float sum(vf v) { return vaddv_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v))); }
#else
INLINE float sum(vf v) { /* in two chains, so that additions need not wait for each other */
    float a = 0, b = 0;
    for (int i = 0; i < VL; i += 2) a += v[i], b += v[i + 1];
    return a + b;
}
#endif

/* A NaN must stay one, so the comparison keeps it. */
INLINE vf relu(vf v) { return (vf)((vi)v & ~(vi)(v < 0.0f)); }

/* C[i, j] = from[i*rf + j] + sum over k of A[i*ra + k*ca] * B[k*rb + j], for ROWS rows and NV
   vectors. */
#define TILE(ROWS, NV)                                                                     \
    {                                                                                      \
        vf c[ROWS][NV];                                                                    \
        int q = 0;                                                                         \
        for (int r = 0; r < ROWS; r++)                                                     \
            for (int v = 0; v < NV; v++)                                                   \
                c[r][v] = from ? load(from + (i + r) * rf + j + v * VL) : (vf){0};         \
        BY_LANES(ROWS, NV)                                                             \
        for (; q < k; q++) {                                                               \
            vf b[NV];                                                                      \
            for (int v = 0; v < NV; v++) b[v] = load(B + q * rb + j + v * VL);             \
            for (int r = 0; r < ROWS; r++) {                                               \
                float a = A[(i + r) * ra + q * ca];                                        \
                for (int v = 0; v < NV; v++) c[r][v] += a * b[v];                          \
            }                                                                              \
        }                                                                                  \
        for (int r = 0; r < ROWS; r++)                                                     \
            for (int v = 0; v < NV; v++)                                                   \
                store(C + (i + r) * rc + j + v * VL, positive ? relu(c[r][v]) : c[r][v]);  \
    }

/* NEON multiplies by a lane, so four numbers of A that lie side by side are loaded together. */
#ifdef NEON
#define LANE(u, ROWS, NV)                                                                  \
    for (int v = 0; v < NV; v++) {                                                         \
        vf b = load(B + (q + u) * rb + j + v * VL);                                        \
        for (int r = 0; r < ROWS; r++) c[r][v] = vfmaq_laneq_f32(c[r][v], b, a[r], u);     \
    }
#define BY_LANES(ROWS, NV)                                                             \
    if (ca == 1 && ROWS == 4)                                                              \
        for (; q + 4 <= k; q += 4) {                                                       \
            float32x4_t a[ROWS];                                                           \
            for (int r = 0; r < ROWS; r++) a[r] = vld1q_f32(A + (i + r) * ra + q);         \
            LANE(0, ROWS, NV) LANE(1, ROWS, NV) LANE(2, ROWS, NV) LANE(3, ROWS, NV)        \
        }                                                                                  \
    else if (ra == 1 && ROWS == 4)                                                         \
        for (; q < k; q++) {                                                               \
            float32x4_t a = vld1q_f32(A + i + q * ca);                                     \
            for (int v = 0; v < NV; v++) {                                                 \
                vf b = load(B + q * rb + j + v * VL);                                      \
                c[0][v] = vfmaq_laneq_f32(c[0][v], b, a, 0);                               \
                c[1 % ROWS][v] = vfmaq_laneq_f32(c[1 % ROWS][v], b, a, 1);                 \
                c[2 % ROWS][v] = vfmaq_laneq_f32(c[2 % ROWS][v], b, a, 2);                 \
                c[3 % ROWS][v] = vfmaq_laneq_f32(c[3 % ROWS][v], b, a, 3);                 \
            }                                                                              \
        }
#else
#define BY_LANES(ROWS, NV)
#endif

/* Where n is no multiple of VL, the last vectors are read whole and written in part: behind B and C
   something must be readable, and from must be null. */
#define LAST_TILE(ROWS)                                                                    \
    {                                                                                      \
        vf c[ROWS] = {{0}};                                                                \
        for (int q = 0; q < k; q++) {                                                      \
            vf b = load(B + q * rb + j);                                                   \
            for (int r = 0; r < ROWS; r++) c[r] += A[(i + r) * ra + q * ca] * b;           \
        }                                                                                  \
        for (int r = 0; r < ROWS; r++) store_first(n - j, C + (i + r) * rc + j, c[r]);     \
    }

INLINE void product(int m, int n, int k, const float *A, long ra, long ca, const float *B, long rb,
                    const float *from, long rf, float *C, long rc, int positive) {
    int i = 0, j;
    for (; i + 4 <= m; i += 4) {
        for (j = 0; j + 16 <= n; j += 16) TILE(4, 16 / VL)
        for (; j + VL <= n; j += VL) TILE(4, 1)
        if (j < n) LAST_TILE(4)
    }
    if (i + 2 <= m) {
        for (j = 0; j + 16 <= n; j += 16) TILE(2, 16 / VL)
        for (; j + VL <= n; j += VL) TILE(2, 1)
        if (j < n) LAST_TILE(2)
        i += 2;
    }
    if (i < m) {
        for (j = 0; j + 16 <= n; j += 16) TILE(1, 16 / VL)
        for (; j + VL <= n; j += VL) TILE(1, 1)
        if (j < n) LAST_TILE(1)
    }
}

/* C (+)= A B, for matrices anywhere in larger ones. */
INLINE void matmul(int m, int n, int k, const float *A, long ra, long ca, const float *B, long rb,
                   float *C, long rc, int add) {
    product(m, n, k, A, ra, ca, B, rb, add ? C : 0, rc, C, rc, 0);
}

/* y = x W + b for m rows x, or the relu of it. */
INLINE void affine(int m, int n, int k, const float *x, const float *W, const float *b, float *y,
                   int positive) {
    product(m, n, k, x, k, 1, W, n, b, 0, y, n, positive);
}

/* out[j*ro + i] = scale * A[i*ra + j], for m rows and n columns of A. */
static void transpose(int m, int n, const float *A, long ra, float scale, float *out, long ro) {
    int rows = 0, columns = 0; /* of whole vectors */
#ifdef NEON
    rows = m / 4 * 4, columns = n / 4 * 4;
    for (int i = 0; i < rows; i += 4)
        for (int j = 0; j < columns; j += 4) {
            const float *a = A + i * ra + j;
            float *o = out + j * ro + i;
            float32x4x2_t p = vtrnq_f32(load(a) * scale, load(a + ra) * scale);
            float32x4x2_t q = vtrnq_f32(load(a + 2 * ra) * scale, load(a + 3 * ra) * scale);
            for (int h = 0; h < 2; h++) {
                store(o + h * ro, vcombine_f32(vget_low_f32(p.val[h]), vget_low_f32(q.val[h])));
                store(o + (2 + h) * ro,
                      vcombine_f32(vget_high_f32(p.val[h]), vget_high_f32(q.val[h])));
            }
        }
#endif
    for (int i = 0; i < m; i++)
        for (int j = i < rows ? columns : 0; j < n; j++) out[j * ro + i] = A[i * ra + j] * scale;
}

/* x stays where y, which a relu gave, is positive; elsewhere it is 0. */
static void relu_back(int n, float *x, const float *y) {
    for (int j = 0; j < n; j += VL) store(x + j, select_gt0(load(x + j), load(y + j)));
}
