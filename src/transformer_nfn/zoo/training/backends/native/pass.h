/* Forward and backward of a group of samples, and the loop over networks (see step.c). */

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

/* Logits of G samples of T tokens; what the way back needs stays in s. */
static void forward(const Layout *l, const float *w, Scratch *s, int G, int T, int Tp, int patch,
                    const float *x, const float *pos, int drop) {
    int R = G * T;
    if (patch) {
        fill_rows(R, D, w + l->be, s->h);
        matmul(R, D, patch, x, patch, 1, w + l->We, D, s->h, D, 1);
    } else
        memcpy(s->h, x, (size_t)R * D * sizeof(float));
    for (int g = 0; g < G; g++)
        for (int i = 0; i < T * D; i += VL)
            store(s->h + g * T * D + i, load(s->h + g * T * D + i) + load(pos + i));
    if (drop) times(R * D, s->h, s->mask[0]);
    for (int i = 0; i < BLOCKS; i++) {
        norm(R, s->h, s->n1[i], s->r1[i]);
        matmul(R, 3 * D, D, s->n1[i], D, 1, w + l->qkv[i], 3 * D, s->qkv[i], 3 * D, 0);
        for (int g = 0; g < G; g++)
            attend(T, Tp, s->qkv[i] + (long)g * T * 3 * D, s->P[i] + (long)g * H * T * Tp,
                   s->a[i] + g * T * D, s->kt);
        matmul(R, D, D, s->a[i], D, 1, w + l->o[i], D, s->h, D, 0);
        if (drop) times(R * D, s->h, s->mask[1 + 2 * i]);
        norm(R, s->h, s->n2[i], s->r2[i]);
        fill_rows(R, F, w + l->bA[i], s->hid[i]);
        matmul(R, F, D, s->n2[i], D, 1, w + l->A[i], F, s->hid[i], F, 1);
        for (int j = 0; j < R * F; j += VL) {
            vf v = load(s->hid[i] + j);
            /* a NaN must stay one, so the comparison keeps it */
            store(s->hid[i] + j, (vf)((vi)v & ~(vi)(v < 0.0f)));
        }
        fill_rows(R, D, w + l->bB[i], s->h);
        matmul(R, D, F, s->hid[i], F, 1, w + l->B[i], D, s->h, D, 1);
        if (drop) times(R * D, s->h, s->mask[2 + 2 * i]);
    }
    norm(R, s->h, s->nf, s->rf);
    for (int g = 0; g < G; g++)
        for (int d = 0; d < D; d += VL) {
            vf mean = {0};
            for (int t = 0; t < T; t++) mean += load(s->nf + (g * T + t) * D + d);
            store(s->z + g * D + d, mean * (1.0f / T));
        }
    fill_rows(G, D, w + l->b1, s->c1);
    matmul(G, D, D, s->z, D, 1, w + l->W1, D, s->c1, D, 1);
    for (int j = 0; j < G * D; j += VL) {
        vf v = load(s->c1 + j);
        store(s->c1 + j, (vf)((vi)v & ~(vi)(v < 0.0f)));
    }
    fill_rows(G, LOGITS, s->b2p, s->logits);
    matmul(G, LOGITS, D, s->c1, D, 1, s->W2p, LOGITS, s->logits, LOGITS, 1);
}

/* Adds the gradients of the G samples; s->logits holds the gradient of the logits. */
static void backward(const Layout *l, Scratch *s, int G, int T, int Tp, int patch, const float *x,
                     int drop, float *grad) {
    int R = G * T;
    matmul(D, LOGITS, G, s->c1, 1, D, s->logits, LOGITS, s->gW2, LOGITS, 1);
    for (int g = 0; g < G; g++) {
        float *dc = s->g2 + g * D;
        matmul(1, D, LOGITS, s->logits + g * LOGITS, LOGITS, 1, s->W2T, D, dc, D, 0);
        for (int d = 0; d < D; d += VL)
            store(dc + d, select_gt0(load(dc + d), load(s->c1 + g * D + d)));
    }
    matmul(D, D, G, s->z, 1, D, s->g2, D, grad + l->W1, D, 1);
    add_rows(G, D, s->g2, grad + l->b1);
    for (int g = 0; g < G; g++) {
        float dz[D];
        matmul(1, D, D, s->g2 + g * D, D, 1, s->W1T, D, dz, D, 0);
        for (int d = 0; d < D; d += VL) {
            vf v = load(dz + d) * (1.0f / T);
            for (int t = 0; t < T; t++) store(s->g + (g * T + t) * D + d, v);
        }
    }
    norm_back(R, s->g, s->nf, s->rf, s->g);
    for (int i = BLOCKS - 1; i >= 0; i--) {
        if (drop) times(R * D, s->g, s->mask[2 + 2 * i]);
        matmul(F, D, R, s->hid[i], 1, F, s->g, D, grad + l->B[i], D, 1);
        add_rows(R, D, s->g, grad + l->bB[i]);
        matmul(R, F, D, s->g, D, 1, s->BT[i], F, s->ghid, F, 0);
        for (int j = 0; j < R * F; j += VL)
            store(s->ghid + j, select_gt0(load(s->ghid + j), load(s->hid[i] + j)));
        matmul(D, F, R, s->n2[i], 1, D, s->ghid, F, grad + l->A[i], F, 1);
        add_rows(R, F, s->ghid, grad + l->bA[i]);
        matmul(R, D, F, s->ghid, F, 1, s->AT[i], D, s->g, D, 0);
        norm_back(R, s->g, s->n2[i], s->r2[i], s->g);
        if (drop) times(R * D, s->g, s->mask[1 + 2 * i]);
        matmul(D, D, R, s->a[i], 1, D, s->g, D, grad + l->o[i], D, 1);
        matmul(R, D, D, s->g, D, 1, s->oT[i], D, s->g2, D, 0);
        for (int g = 0; g < G; g++)
            attend_back(T, Tp, s->qkv[i] + (long)g * T * 3 * D, s->P[i] + (long)g * H * T * Tp,
                        s->g2 + g * T * D, s->gqkv + (long)g * T * 3 * D, s->kt, s->ds);
        matmul(D, 3 * D, R, s->n1[i], 1, D, s->gqkv, 3 * D, grad + l->qkv[i], 3 * D, 1);
        if (i == 0 && !patch) return; /* word vectors are frozen */
        matmul(R, D, 3 * D, s->gqkv, 3 * D, 1, s->qkvT[i], D, s->g, D, 0);
        norm_back(R, s->g, s->n1[i], s->r1[i], s->g);
    }
    if (drop) times(R * D, s->g, s->mask[0]);
    matmul(patch, D, R, x, 1, patch, s->g, D, grad + l->We, D, 1);
    add_rows(R, D, s->g, grad + l->be);
}

/* Loss and, for training, its gradient in place of the logits. */
static void cross_entropy(int classes, float *logits, int64_t label, float weight, float *loss,
                          int64_t *hit) {
    int best = 0;
    for (int c = 1; c < classes; c++) best = logits[c] > logits[best] ? c : best;
    float total = 0, top = logits[best], p[LOGITS];
    for (int c = 0; c < classes; c++) total += p[c] = expf(logits[c] - top);
    *loss += logf(total) + top - logits[label];
    *hit += best == label;
    for (int c = 0; c < classes; c++) logits[c] = (p[c] / total - (c == label)) * weight;
    for (int c = classes; c < LOGITS; c++) logits[c] = 0.0f;
}

/* Summed loss, hits and, unless grad is null, mean gradients of M networks on their batches.
   lengths may be null (all samples have T tokens); shared_inputs gives all the same batch. */
int tnfn_pass(int M, int B, int T, int patch, int classes, const float *weights, float *grad,
              const float *inputs, const int64_t *labels, int shared_inputs, const int64_t *lengths,
              const float *pos, int stride, const int32_t *keys, const int32_t *threshold,
              const float *scale, float *loss, int64_t *hits) {
    Layout l = layout(patch, classes);
    int width = patch ? patch : D, Gmax = T >= 64 ? 1 : (64 + T - 1) / T;
    Scratch s;
    long need = carve(&s, 0, Gmax * T, Gmax, PAD(T));
    float *base = aligned_alloc(64, (need * sizeof(float) + 63) / 64 * 64);
    if (!base) return 1;
    for (int m = 0; m < M; m++) {
        const float *w = weights + m * l.size;
        const float *x = inputs + (shared_inputs ? 0 : (long)m * B * T * width);
        const int64_t *y = labels + (shared_inputs ? 0 : (long)m * B);
        int own = lengths ? (int)lengths[shared_inputs ? 0 : m] : T, Tp = WHOLE(own);
        int most = own >= 64 ? 1 : (64 + own - 1) / own;
        if (most > Gmax) most = Gmax;
        carve(&s, base, Gmax * T, Gmax, PAD(T));
        float *g = grad ? grad + m * l.size : 0;
        int drop = grad && threshold[m] > 0;
        memset(s.W2p, 0, D * LOGITS * sizeof(float));
        memset(s.b2p, 0, LOGITS * sizeof(float));
        memset(s.gW2, 0, D * LOGITS * sizeof(float));
        for (int d = 0; d < D; d++)
            memcpy(s.W2p + d * LOGITS, w + l.W2 + d * classes, classes * sizeof(float));
        memcpy(s.b2p, w + l.b2, classes * sizeof(float));
        if (g) {
            memset(g, 0, l.size * sizeof(float));
            for (int i = 0; i < BLOCKS; i++) {
                transpose(D, 3 * D, w + l.qkv[i], s.qkvT[i]);
                transpose(D, D, w + l.o[i], s.oT[i]);
                transpose(D, F, w + l.A[i], s.AT[i]);
                transpose(F, D, w + l.B[i], s.BT[i]);
            }
            transpose(D, D, w + l.W1, s.W1T);
            transpose(D, LOGITS, s.W2p, s.W2T);
        }
        loss[m] = 0;
        hits[m] = 0;
        for (int b = 0; b < B; b += most) {
            int G = B - b < most ? B - b : most;
            const float *in = x + (long)b * T * width;
            float *packed = 0;
            if (own < T && G > 1) { /* samples padded further than this network's batch is */
                packed = s.g;
                if (patch) return 2;
                for (int i = 0; i < G; i++)
                    memcpy(packed + i * own * D, in + (long)i * T * D, own * D * sizeof(float));
                in = packed;
            }
            if (drop)
                for (int i = 0; i < SITES; i++)
                    for (int j = 0; j < G; j++)
                        dropout_mask(own, (uint32_t)(b + j) * stride, keys + (m * SITES + i) * 2,
                                     threshold[m], scale[m], s.mask[i] + j * own * D);
            forward(&l, w, &s, G, own, Tp, patch, in, pos, drop);
            for (int i = 0; i < G; i++) {
                cross_entropy(classes, s.logits + i * LOGITS, y[b + i], 1.0f / B, loss + m,
                              hits + m);
                if (g) for (int c = 0; c < classes; c++) g[l.b2 + c] += s.logits[i * LOGITS + c];
            }
            if (g) backward(&l, &s, G, own, Tp, patch, in, drop, g);
        }
        if (g)
            for (int d = 0; d < D; d++)
                memcpy(g + l.W2 + d * classes, s.gW2 + d * LOGITS, classes * sizeof(float));
    }
    free(base);
    return 0;
}

/* The update rule of zoo/optimise.py; coef is [M, 7]: b1, c, b2, alpha, eps, l2, eta. */
void tnfn_update(int M, long P, float *p, const float *g, float *m, float *v, const float *coef) {
    for (int i = 0; i < M; i++, coef += 7) {
        float b1 = coef[0], c = coef[1], b2 = coef[2], al = coef[3], ep = coef[4], l2 = coef[5],
              eta = coef[6];
        if (al == 0 && b2 == 0) /* the plain rules: neither root nor quotient */
            for (long j = (long)i * P; j < (i + 1) * P; j++) {
                m[j] = b1 * m[j] + c * (g[j] + l2 * p[j]);
                p[j] -= eta / ep * m[j];
            }
        else for (long j = (long)i * P; j < (i + 1) * P; j++) {
            float d = g[j] + l2 * p[j];
            m[j] = b1 * m[j] + c * d;
            v[j] = b2 * v[j] + (1 - b2) * d * d;
            p[j] -= eta * m[j] / (al * sqrtf(v[j]) + ep);
        }
    }
}
