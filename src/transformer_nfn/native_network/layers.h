/* The layers of a small transformer on rows of tokens, there and back. */

#pragma once
#include "vectors.h"

#define FEW 8 /* rows that go through each stage together, so that none waits for the one before */

/* LayerNorm of rows of D in place of a copy: x -> (x - mean) * r, r kept for the way back. */
static void norm(int rows, const float *x, float *out, float *r) {
    for (int i = 0; i < rows; i += FEW, x += FEW * D, out += FEW * D, r += FEW) {
        int few = rows - i < FEW ? rows - i : FEW;
        float mean[FEW];
        for (int j = 0; j < few; j++) {
            vf s = {0};
            for (int d = 0; d < D; d += VL) s += load(x + j * D + d);
            mean[j] = sum(s) / D;
        }
        for (int j = 0; j < few; j++) {
            vf q = {0};
            for (int d = 0; d < D; d += VL) { vf c = load(x + j * D + d) - mean[j]; q += c * c; }
            r[j] = 1.0f / sqrtf(sum(q) / D + 1e-5f);
        }
        for (int j = 0; j < few; j++)
            for (int d = 0; d < D; d += VL)
                store(out + j * D + d, (load(x + j * D + d) - mean[j]) * r[j]);
    }
}

static void norm_back(int rows, const float *g, const float *n, const float *r, float *out) {
    for (int i = 0; i < rows; i += FEW, g += FEW * D, n += FEW * D, r += FEW, out += FEW * D) {
        int few = rows - i < FEW ? rows - i : FEW;
        float a[FEW], b[FEW];
        for (int j = 0; j < few; j++) {
            vf s = {0}, q = {0};
            for (int d = 0; d < D; d += VL) {
                vf v = load(g + j * D + d);
                s += v;
                q += v * load(n + j * D + d);
            }
            a[j] = sum(s) / D, b[j] = sum(q) / D;
        }
        for (int j = 0; j < few; j++)
            for (int d = 0; d < D; d += VL)
                store(out + j * D + d,
                      (load(g + j * D + d) - a[j] - load(n + j * D + d) * b[j]) * r[j]);
    }
}

/* The larger one; a NaN in a stays one. */
#ifdef NEON
INLINE vf larger(vf a, vf b) { return vmaxq_f32(a, b); }
INLINE float largest(vf v) { return vmaxvq_f32(v); }
#else
INLINE vf larger(vf a, vf b) {
    vi second = (vi)(a < b);
    return (vf)(((vi)a & ~second) | ((vi)b & second));
}
INLINE float largest(vf v) {
    float a = v[0], b = v[1];
    for (int i = 2; i < VL; i += 2) a = v[i] > a ? v[i] : a, b = v[i + 1] > b ? v[i + 1] : b;
    return a > b ? a : b;
}
#endif

/* 2^x by splitting off the whole part; relative error below 3e-7 for what softmax needs. */
INLINE vf power_of_two(vf x) {
    x = larger(x, splat(-126.0f));
    vf t = x + 12582912.0f;
    vf f = x - (t - 12582912.0f), f2 = f * f;
    vf p = f * 1.326472731e-03f + 9.671512991e-03f;
    p = p * f2 + (f * 5.550733581e-02f + 2.402224243e-01f);
    p = p * f2 + (f * 6.931470037e-01f + 1.0f);
    return (vf)((vi)p + ((vi)t << 23)); /* the low bits of t are the whole part */
}

/* Rows of T scores, as powers of two, become probabilities; the columns behind, up to Tp, hold a copy
   of one of them before and 0 afterwards. */
static void softmax(int T, int Tp, float *s) {
    vi real; /* lanes of the last vector */
    for (int l = 0; l < VL; l++) real[l] = Tp - VL + l < T ? -1 : 0;
    for (int i = 0; i < T; i += FEW, s += FEW * Tp) {
        int few = T - i < FEW ? T - i : FEW;
        float top[FEW], one[FEW];
        for (int r = 0; r < few; r++) {
            vf most = load(s + r * Tp);
            for (int j = VL; j < Tp; j += VL) most = larger(most, load(s + r * Tp + j));
            top[r] = largest(most);
        }
        for (int r = 0; r < few; r++) {
            float *row = s + r * Tp;
            vf total = {0};
            for (int j = 0; j < Tp - VL; j += VL) {
                vf e = power_of_two(load(row + j) - top[r]);
                store(row + j, e);
                total += e;
            }
            vf e = power_of_two(load(row + Tp - VL) - top[r]);
            e = (vf)((vi)e & real);
            store(row + Tp - VL, e);
            one[r] = 1.0f / sum(total + e);
        }
        for (int r = 0; r < few; r++)
            for (int j = 0; j < Tp; j += VL)
                store(s + r * Tp + j, load(s + r * Tp + j) * one[r]);
    }
}

static void attend(int T, int Tp, const float *qkv, float *P, float *a, float *kt) {
    const float scale = 1.44269504f / sqrtf(E); /* e^x = 2^(1.44 x) */
    for (int head = 0; head < H; head++, P += (long)T * Tp) {
        const float *q = qkv + head * E, *k = q + D, *v = k + D;
        transpose(T, E, k, 3 * D, scale, kt, Tp);
        for (int e = 0; e < E; e++)
            for (int t = T; t < Tp; t++) kt[e * Tp + t] = kt[e * Tp];
        matmul(T, Tp, E, q, 3 * D, 1, kt, Tp, P, Tp, 0);
        softmax(T, Tp, P);
        matmul(T, E, T, P, Tp, 1, v, 3 * D, a + head * E, D, 0);
    }
}

static void attend_back(int T, int Tp, const float *qkv, const float *P, const float *da,
                        float *dqkv, float *kt, float *ds) {
    for (int head = 0; head < H; head++, P += (long)T * Tp) {
        const float *q = qkv + head * E, *k = q + D, *v = k + D;
        float *dq = dqkv + head * E, *dk = dq + D, *dv = dk + D;
        transpose(T, E, v, 3 * D, 1.0f, kt, Tp);
        for (int e = 0; e < E; e++)
            for (int t = T; t < Tp; t++) kt[e * Tp + t] = 0.0f;
        matmul(T, Tp, E, da + head * E, D, 1, kt, Tp, ds, Tp, 0);
        matmul(T, E, T, P, 1, Tp, da + head * E, D, dv, 3 * D, 0);
        for (int i = 0; i < T; i++) {
            const float *p = P + (long)i * Tp;
            float *s = ds + (long)i * Tp;
            vf dot = {0};
            for (int j = 0; j < Tp; j += VL) dot += load(p + j) * load(s + j);
            float mean = sum(dot);
            for (int j = 0; j < Tp; j += VL)
                store(s + j, load(p + j) * (load(s + j) - mean) * (1.0f / sqrtf(E)));
        }
        matmul(T, E, T, ds, Tp, 1, k, 3 * D, dq, 3 * D, 0);
        matmul(T, E, T, ds, 1, Tp, q, 3 * D, dk, 3 * D, 0);
    }
}

