/* The layers of a small transformer on rows of tokens, there and back. */

#pragma once
#include "vectors.h"

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
    /* a NaN is not below, and stays one */
    x = (vf)(((vi)x & ~(vi)(x < low)) | ((vi)low & (vi)(x < low)));
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

static void attend(int T, int Tp, const float *qkv, float *P, float *a, float *kt) {
    for (int head = 0; head < H; head++, P += (long)T * Tp) {
        const float *q = qkv + head * E, *k = q + D, *v = k + D;
        for (int e = 0; e < E; e++) {
            for (int t = 0; t < T; t++) kt[e * Tp + t] = k[t * 3 * D + e];
            for (int t = T; t < Tp; t++) kt[e * Tp + t] = 0.0f;
        }
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
        for (int e = 0; e < E; e++) {
            for (int t = 0; t < T; t++) kt[e * Tp + t] = v[t * 3 * D + e];
            for (int t = T; t < Tp; t++) kt[e * Tp + t] = 0.0f;
        }
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

