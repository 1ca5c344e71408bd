/* Forward and backward of a group of samples, and the loop over networks (see step.c). */

/* Logits of G samples of T tokens; what the way back needs stays in s. */
static void forward(const Layout *l, const float *w, Scratch *s, int G, int T, int Tp, int patch,
                    const float *x, const float *pos, int drop) {
    int R = G * T;
    embed(l, w, G, T, patch, x, pos, s->h);
    if (drop) times(R * D, s->h, s->mask[0]);
    for (int i = 0; i < BLOCKS; i++) {
        attention(l, w, i, s->block + i, G, T, Tp, s->kt, s->h);
        if (drop) times(R * D, s->h, s->mask[1 + 2 * i]);
        neurons(l, w, i, s->block + i, R, s->h);
        if (drop) times(R * D, s->h, s->mask[2 + 2 * i]);
    }
    norm(R, s->h, s->nf, s->rf);
    mean_rows(G, T, s->nf, s->z);
    classify(l, w, &s->turned, G, s->z, s->c1, s->logits);
}

/* Adds the gradients of the G samples; s->logits holds the gradient of the logits. */
static void backward(const Layout *l, Scratch *s, int G, int T, int Tp, int patch, const float *x,
                     int drop, float *grad) {
    int R = G * T;
    const Turned *t = &s->turned;
    matmul(D, LOGITS, G, s->c1, 1, D, s->logits, LOGITS, s->gW2, LOGITS, 1);
    classify_back(t, G, s->logits, s->c1, s->g2, s->dz);
    matmul(D, D, G, s->z, 1, D, s->g2, D, grad + l->W1, D, 1);
    add_rows(G, D, s->g2, grad + l->b1);
    mean_rows_back(G, T, s->dz, s->g);
    norm_back(R, s->g, s->nf, s->rf, s->g);
    for (int i = BLOCKS - 1; i >= 0; i--) {
        const Kept *k = s->block + i;
        if (drop) times(R * D, s->g, s->mask[2 + 2 * i]);
        matmul(F, D, R, k->hid, 1, F, s->g, D, grad + l->B[i], D, 1);
        add_rows(R, D, s->g, grad + l->bB[i]);
        neurons_back(t, i, k, R, s->g, s->ghid);
        matmul(D, F, R, k->n2, 1, D, s->ghid, F, grad + l->A[i], F, 1);
        add_rows(R, F, s->ghid, grad + l->bA[i]);
        if (drop) times(R * D, s->g, s->mask[1 + 2 * i]);
        matmul(D, D, R, k->a, 1, D, s->g, D, grad + l->o[i], D, 1);
        attention_back(t, i, k, G, T, Tp, s->g, s->gqkv, s->kt, s->g2, s->ds);
        matmul(D, 3 * D, R, k->n1, 1, D, s->gqkv, 3 * D, grad + l->qkv[i], 3 * D, 1);
        if (i == 0 && !patch) return; /* word vectors are frozen */
        matmul(R, D, 3 * D, s->gqkv, 3 * D, 1, t->qkvT[i], D, s->g, D, 0);
        norm_back(R, s->g, k->n1, k->r1, s->g);
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
        pad_classes(&l, w, classes, &s.turned);
        if (g) {
            memset(g, 0, l.size * sizeof(float));
            memset(s.gW2, 0, D * LOGITS * sizeof(float));
            turn(&l, w, &s.turned);
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

/* The update rule of training/steps.py; coef is [M, 7]: b1, c, b2, alpha, eps, l2, eta. */
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
