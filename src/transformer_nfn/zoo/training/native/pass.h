/* Forward and backward of a group of samples, training steps and evaluation (see step.c). */

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

/* What the batches of a call share; T is the padded length of their samples. */
typedef struct {
    Layout l;
    int B, T, patch, classes, stride, most; /* most: samples that go through the layers together */
    const float *pos;
    Scratch s;
    float *base;
} Call;

static int samples_at_once(int T) { return T >= 64 ? 1 : (64 + T - 1) / T; }

static int begin(Call *c, int B, int T, int patch, int classes, const float *pos, int stride) {
    *c = (Call){layout(patch, classes), B, T, patch, classes, stride, samples_at_once(T), pos};
    int G = c->most, R = G * T;
    c->base = aligned_alloc(64, (carve(&c->s, 0, R, G, PAD(T)) * sizeof(float) + 63) / 64 * 64);
    if (!c->base) return 1;
    carve(&c->s, c->base, R, G, PAD(T));
    return 0;
}

/* Dropout of a network: keys is [SITES, 2], see dropout_mask; threshold 0 for none. */
typedef struct { const int32_t *keys; int32_t threshold; float scale; } Dropout;

/* Summed loss and hits of a network on a batch of samples of T tokens; mean gradients in g, unless
   it is null. */
static void pass(Call *c, const float *w, float *g, const float *x, const int64_t *y, int T,
                 Dropout drop, float *loss, int64_t *hits) {
    const Layout *l = &c->l;
    Scratch *s = &c->s;
    int width = c->patch ? c->patch : D, most = samples_at_once(T);
    if (most > c->most) most = c->most;
    pad_classes(l, w, c->classes, &s->turned);
    if (g) {
        memset(g, 0, l->size * sizeof(float));
        memset(s->gW2, 0, D * LOGITS * sizeof(float));
        turn(l, w, &s->turned);
    }
    *loss = 0;
    *hits = 0;
    for (int b = 0; b < c->B; b += most) {
        int G = c->B - b < most ? c->B - b : most;
        const float *in = x + (long)b * c->T * width;
        if (T < c->T && G > 1) { /* samples padded further than this batch is */
            for (int i = 0; i < G; i++)
                memcpy(s->g + i * T * D, in + (long)i * c->T * D, T * D * sizeof(float));
            in = s->g;
        }
        if (drop.threshold)
            for (int i = 0; i < SITES; i++)
                for (int j = 0; j < G; j++)
                    dropout_mask(T, (uint32_t)(b + j) * c->stride, drop.keys + i * 2,
                                 drop.threshold, drop.scale, s->mask[i] + j * T * D);
        forward(l, w, s, G, T, WHOLE(T), c->patch, in, c->pos, drop.threshold);
        for (int i = 0; i < G; i++) {
            float *logits = s->logits + i * LOGITS;
            cross_entropy(c->classes, logits, y[b + i], 1.0f / c->B, loss, hits);
            if (g) for (int k = 0; k < c->classes; k++) g[l->b2 + k] += logits[k];
        }
        if (g) backward(l, s, G, T, WHOLE(T), c->patch, in, drop.threshold, g);
    }
    if (g)
        for (int d = 0; d < D; d++)
            memcpy(g + l->W2 + d * c->classes, s->gW2 + d * LOGITS, c->classes * sizeof(float));
}

/* The update rule of training/steps.py; coef is [7]: b1, c, b2, alpha, eps, l2, eta. */
static void update(long n, float *p, const float *g, float *m, float *v, const float *coef) {
    float b1 = coef[0], c = coef[1], b2 = coef[2], al = coef[3], ep = coef[4], l2 = coef[5],
          eta = coef[6];
    if (al == 0 && b2 == 0) /* the plain rules: neither root nor quotient */
        for (long j = 0; j < n; j++) {
            m[j] = b1 * m[j] + c * (g[j] + l2 * p[j]);
            p[j] -= eta / ep * m[j];
        }
    else for (long j = 0; j < n; j++) {
        float d = g[j] + l2 * p[j];
        m[j] = b1 * m[j] + c * d;
        v[j] = b2 * v[j] + (1 - b2) * d * d;
        p[j] -= eta * m[j] / (al * sqrtf(v[j]) + ep);
    }
}

/* Steps of one network, whose weights and moments stay in the cache: inputs are
   [steps, B, T, width], keys [steps, SITES, 2], coef [steps, 7]; lengths may be null, if all samples
   have T tokens; g is scratch for the gradient. Summed loss and hits of each step. */
int tnfn_train(int steps, int B, int T, int patch, int classes, const float *inputs,
               const int64_t *labels, const int64_t *lengths, const float *pos, int stride,
               const int32_t *keys, int32_t threshold, float scale, const float *coef, float *w,
               float *g, float *m, float *v, float *loss, int64_t *hits) {
    Call c;
    if (begin(&c, B, T, patch, classes, pos, stride)) return 1;
    for (int i = 0; i < steps; i++) {
        Dropout drop = {keys + i * SITES * 2, threshold, scale};
        pass(&c, w, g, inputs + (long)i * B * T * (patch ? patch : D), labels + (long)i * B,
             lengths ? (int)lengths[i] : T, drop, loss + i, hits + i);
        update(c.l.size, w, g, m, v, coef + i * 7);
    }
    free(c.base);
    return 0;
}

/* Summed loss and hits of M networks on one batch of samples of T tokens. */
int tnfn_evaluate(int M, int B, int T, int patch, int classes, const float *inputs,
                  const int64_t *labels, const float *pos, const float *weights, float *loss,
                  int64_t *hits) {
    Call c;
    if (begin(&c, B, T, patch, classes, pos, 0)) return 1;
    for (int m = 0; m < M; m++)
        pass(&c, weights + m * c.l.size, 0, inputs, labels, T, (Dropout){0}, loss + m, hits + m);
    free(c.base);
    return 0;
}
