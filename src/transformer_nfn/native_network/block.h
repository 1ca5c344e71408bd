/* One block and the read-out of a small transformer on G samples of T tokens, there and back.

   The arithmetic is that of zoo/network.py, which is the reference the tests compare with; names
   are the same. */

#pragma once
#include "layers.h"

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

/* What the way back through a block needs; a is the output of attention before W_O. */
typedef struct { float *n1, *r1, *qkv, *P, *a, *n2, *r2, *hid; } Kept;

/* The weights of a network transposed, and the last map padded to LOGITS columns. */
typedef struct {
    float *qkvT[BLOCKS], *oT[BLOCKS], *AT[BLOCKS], *BT[BLOCKS], *W1T, *W2p, *W2T, *b2p;
} Turned;

static void pad_classes(const Layout *l, const float *w, int classes, Turned *t) {
    memset(t->W2p, 0, D * LOGITS * sizeof(float));
    memset(t->b2p, 0, LOGITS * sizeof(float));
    for (int d = 0; d < D; d++)
        memcpy(t->W2p + d * LOGITS, w + l->W2 + d * classes, classes * sizeof(float));
    memcpy(t->b2p, w + l->b2, classes * sizeof(float));
}

static void turn(const Layout *l, const float *w, Turned *t) {
    for (int i = 0; i < BLOCKS; i++) {
        transpose(D, 3 * D, w + l->qkv[i], 3 * D, 1.0f, t->qkvT[i], D);
        transpose(D, D, w + l->o[i], D, 1.0f, t->oT[i], D);
        transpose(D, F, w + l->A[i], F, 1.0f, t->AT[i], D);
        transpose(F, D, w + l->B[i], D, 1.0f, t->BT[i], F);
    }
    transpose(D, D, w + l->W1, D, 1.0f, t->W1T, D);
    transpose(D, LOGITS, t->W2p, LOGITS, 1.0f, t->W2T, D);
}

/* Patches, or word vectors where patch is 0, become rows h of the stream. */
static void embed(const Layout *l, const float *w, int G, int T, int patch, const float *x,
                  const float *pos, float *h) {
    int R = G * T;
    if (patch)
        affine(R, D, patch, x, w + l->We, w + l->be, h, 0);
    else
        memcpy(h, x, (size_t)R * D * sizeof(float));
    for (int g = 0; g < G; g++)
        for (int i = 0; i < T * D; i += VL)
            store(h + g * T * D + i, load(h + g * T * D + i) + load(pos + i));
}

static void attention(const Layout *l, const float *w, int i, Kept *s, int G, int T, int Tp,
                      float *kt, float *h) {
    int R = G * T;
    norm(R, h, s->n1, s->r1);
    matmul(R, 3 * D, D, s->n1, D, 1, w + l->qkv[i], 3 * D, s->qkv, 3 * D, 0);
    for (int g = 0; g < G; g++)
        attend(T, Tp, s->qkv + (long)g * T * 3 * D, s->P + (long)g * H * T * Tp, s->a + g * T * D,
               kt);
    matmul(R, D, D, s->a, D, 1, w + l->o[i], D, h, D, 0);
}

static void neurons(const Layout *l, const float *w, int i, Kept *s, int R, float *h) {
    norm(R, h, s->n2, s->r2);
    affine(R, F, D, s->n2, w + l->A[i], w + l->bA[i], s->hid, 1);
    affine(R, D, F, s->hid, w + l->B[i], w + l->bB[i], h, 0);
}

/* The mean z of each sample's T rows x. */
static void mean_rows(int G, int T, const float *x, float *z) {
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d += VL) {
            vf mean = {0};
            for (int t = 0; t < T; t++) mean += load(x + (g * T + t) * D + d);
            store(z + g * D + d, mean * (1.0f / T));
        }
}

static void classify(const Layout *l, const float *w, const Turned *t, int G, const float *z,
                     float *c1, float *logits) {
    affine(G, D, D, z, w + l->W1, w + l->b1, c1, 1);
    affine(G, LOGITS, D, c1, t->W2p, t->b2p, logits, 0);
}

/* From the gradient of logits to those of the hidden layer before its relu and of z. */
static void classify_back(const Turned *t, int G, const float *logits, const float *c1, float *dc,
                          float *dz) {
    matmul(G, D, LOGITS, logits, LOGITS, 1, t->W2T, D, dc, D, 0);
    relu_back(G * D, dc, c1);
    matmul(G, D, D, dc, D, 1, t->W1T, D, dz, D, 0);
}

/* From the gradient of each sample's mean to that of its T rows. */
static void mean_rows_back(int G, int T, const float *dz, float *g) {
    for (int i = 0; i < G; i++)
        for (int d = 0; d < D; d += VL) {
            vf v = load(dz + i * D + d) * (1.0f / T);
            for (int t = 0; t < T; t++) store(g + (i * T + t) * D + d, v);
        }
}

/* From the gradient g behind W_B to that before the LayerNorm, in g; that of the neurons before
   their relu stays in ghid. */
static void neurons_back(const Turned *t, int i, const Kept *s, int R, float *g, float *ghid) {
    matmul(R, F, D, g, D, 1, t->BT[i], F, ghid, F, 0);
    relu_back(R * F, ghid, s->hid);
    matmul(R, D, F, ghid, F, 1, t->AT[i], D, g, D, 0);
    norm_back(R, g, s->n2, s->r2, g);
}

/* From the gradient g behind W_O to that of queries, keys and values; da and ds are scratch. */
static void attention_back(const Turned *t, int i, const Kept *s, int G, int T, int Tp,
                           const float *g, float *gqkv, float *kt, float *da, float *ds) {
    matmul(G * T, D, D, g, D, 1, t->oT[i], D, da, D, 0);
    for (int j = 0; j < G; j++)
        attend_back(T, Tp, s->qkv + (long)j * T * 3 * D, s->P + (long)j * H * T * Tp,
                    da + j * T * D, gqkv + (long)j * T * 3 * D, kt, ds);
}
