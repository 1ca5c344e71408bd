/* What do many small transformers answer to the same inputs, and which way do the answers move?

   A group of probes goes through one network after the other, there and, where gradients are asked
   for, back to the probes; all of it stays in the cache. Weights are constants. Where gradients are
   asked for, the way there is walked again: keeping it would cost more memory than time. */

#include "block.h"

#define ROWS 196   /* of tokens at a time, about: so many that no tile is cut short, and L2 holds them */
#define PORTION 16 /* probes for which the weights of a network are prepared once */
#define SLICES 8   /* of the networks; each sums gradients apart, so that threads do not matter */

typedef struct {
    int n, P, T, Tp, patch, columns, classes, G; /* columns: of a token, whole vectors */
    Layout l;
    const float *weights, *probes, *pos, *dlogits, *dspread;
    float *logits, *spread, *dprobes;
} Task;

typedef struct {
    Kept block[BLOCKS];
    Turned turned;
    float *z[BLOCKS], *nf, *rf, *h, *g, *da, *gqkv, *ghid, *kt, *ds, *c1, *dc, *dz, *logits, *WeT,
        *dx;
} Scratch;

static long carve(const Task *task, Scratch *s, float *base) {
    long at = 0, R = task->G * task->T, G = task->G, Tp = task->Tp;
    int back = task->dprobes != 0;
#define CUT(field, n) { s->field = base + at; at += PAD(n); }
    for (int i = 0; i < BLOCKS; i++) {
        if (i && !back) {
            s->block[i] = s->block[0];
        } else {
            CUT(block[i].n1, R * D) CUT(block[i].r1, R) CUT(block[i].qkv, R * 3 * D)
            CUT(block[i].P, R * H * Tp) CUT(block[i].n2, R * D) CUT(block[i].r2, R)
            CUT(block[i].hid, R * F)
        }
        CUT(z[i], G * D)
    }
    CUT(h, R * D) CUT(nf, R * D) CUT(rf, R) CUT(kt, E * Tp) CUT(c1, G * D) CUT(logits, G * LOGITS)
    CUT(turned.W2p, D * LOGITS) CUT(turned.b2p, LOGITS)
    if (back) {
        for (int i = 0; i < BLOCKS; i++) {
            CUT(turned.qkvT[i], 3 * D * D) CUT(turned.oT[i], D * D) CUT(turned.AT[i], F * D)
            CUT(turned.BT[i], D * F)
        }
        CUT(turned.W1T, D * D) CUT(turned.W2T, LOGITS * D) CUT(WeT, (long)D * task->columns)
        CUT(g, R * D) CUT(da, R * D) CUT(gqkv, R * 3 * D) CUT(ghid, R * F) CUT(ds, Tp * Tp)
        CUT(dc, G * D) CUT(dz, G * D) CUT(dx, R * task->columns)
    }
    for (int i = 0; i < BLOCKS; i++) s->block[i].a = s->nf; /* not needed later */
    return at + VL; /* readable behind the last, see LAST_TILE */
}

/* Logits of G probes, and in z the mean token behind each block and its LayerNorm. */
static void forward(const Task *task, const float *w, Scratch *s, int G, const float *x) {
    int T = task->T;
    embed(&task->l, w, G, T, task->patch, x, task->pos, s->h);
    for (int i = 0; i < BLOCKS; i++) {
        attention(&task->l, w, i, s->block + i, G, T, task->Tp, s->kt, s->h);
        if (i) mean_rows(G, T, s->block[i].n1, s->z[i - 1]);
        neurons(&task->l, w, i, s->block + i, G * T, s->h);
    }
    norm(G * T, s->h, s->nf, s->rf);
    mean_rows(G, T, s->nf, s->z[BLOCKS - 1]);
    classify(&task->l, w, &s->turned, G, s->z[BLOCKS - 1], s->c1, s->logits);
}

static float mean_square(const float *z) {
    vf q = {0};
    for (int d = 0; d < D; d += VL) q += load(z + d) * load(z + d);
    return sum(q) / D;
}

/* Adds to the gradients of mean tokens what the spread behind block i says; dspread is of G probes,
   one after the other. */
static void spread_back(int G, int i, const float *dspread, const float *z, float *dz) {
    for (int g = 0; g < G; g++)
        for (int d = g * D; d < (g + 1) * D; d += VL)
            store(dz + d, load(dz + d) + load(z + d) * (dspread[g * BLOCKS + i] * 2.0f / D));
}

/* The gradient of G probes, whole vectors a token; s->logits holds that of the logits. */
static const float *backward(const Task *task, Scratch *s, int G, const float *dspread) {
    int T = task->T, R = G * T;
    const Turned *t = &s->turned;
    classify_back(t, G, s->logits, s->c1, s->dc, s->dz);
    spread_back(G, BLOCKS - 1, dspread, s->z[BLOCKS - 1], s->dz);
    mean_rows_back(G, T, s->dz, s->g);
    norm_back(R, s->g, s->nf, s->rf, s->g);
    for (int i = BLOCKS - 1; i >= 0; i--) {
        neurons_back(t, i, s->block + i, R, s->g, s->ghid);
        attention_back(t, i, s->block + i, G, T, task->Tp, s->g, s->gqkv, s->kt, s->da, s->ds);
        memset(s->dz, 0, G * D * sizeof(float));
        if (i) spread_back(G, i - 1, dspread, s->z[i - 1], s->dz);
        mean_rows_back(G, T, s->dz, s->g);
        matmul(R, D, 3 * D, s->gqkv, 3 * D, 1, t->qkvT[i], D, s->g, D, 1);
        norm_back(R, s->g, s->block[i].n1, s->block[i].r1, s->g);
    }
    if (!task->patch) return s->g;
    matmul(R, task->columns, D, s->g, D, 1, s->WeT, task->columns, s->dx, task->columns, 0);
    return s->dx;
}

static void prepare(const Task *task, const float *w, Scratch *s) {
    pad_classes(&task->l, w, task->classes, &s->turned);
    if (!task->dprobes) return;
    turn(&task->l, w, &s->turned);
    memset(s->WeT, 0, (long)D * task->columns * sizeof(float));
    for (int c = 0; c < task->patch; c++)
        for (int d = 0; d < D; d++) s->WeT[d * task->columns + c] = w[task->l.We + c * D + d];
}

static void keep_answers(const Task *task, const Scratch *s, int G, long pair) {
    for (int g = 0; g < G; g++, pair++) {
        memcpy(task->logits + pair * task->classes, s->logits + g * LOGITS,
               task->classes * sizeof(float));
        for (int i = 0; i < BLOCKS; i++)
            task->spread[pair * BLOCKS + i] = mean_square(s->z[i] + g * D);
    }
}

static void add_gradient(const Task *task, Scratch *s, int G, long pair, float *out) {
    int width = task->patch ? task->patch : D;
    memset(s->logits, 0, G * LOGITS * sizeof(float));
    for (int g = 0; g < G; g++)
        memcpy(s->logits + g * LOGITS, task->dlogits + (pair + g) * task->classes,
               task->classes * sizeof(float));
    const float *dx = backward(task, s, G, task->dspread + pair * BLOCKS);
    for (int r = 0; r < G * task->T; r++)
        for (int c = 0; c < width; c++) out[r * width + c] += dx[r * task->columns + c];
}

/* All networks of a slice on a portion of the probes. */
static void work(const Task *task, Scratch *s, int slice, int first) {
    int T = task->T, width = task->patch ? task->patch : D;
    int end = first + PORTION < task->P ? first + PORTION : task->P;
    long from = (long)task->n * slice / SLICES, to = (long)task->n * (slice + 1) / SLICES;
    for (long m = from; m < to; m++) {
        const float *w = task->weights + m * task->l.size;
        prepare(task, w, s);
        for (int p = first; p < end; p += task->G) {
            int G = end - p < task->G ? end - p : task->G;
            forward(task, w, s, G, task->probes + (long)p * T * width);
            if (task->dprobes)
                add_gradient(task, s, G, m * task->P + p,
                             task->dprobes + ((long)slice * task->P + p) * T * width);
            else
                keep_answers(task, s, G, m * task->P + p);
        }
    }
}

/* Logits [n, P, classes] and spread [n, P, BLOCKS] of n networks on P probes [P, T, patch], or, where
   dprobes is given, what their gradients make of it: [SLICES, P, T, patch], zeros before. Word
   vectors have no patch (0) but D columns. Returns 1 where memory is missing. */
int tnfn_probe(int n, int P, int T, int patch, int classes, const float *weights,
               const float *probes, const float *pos, float *logits, float *spread,
               const float *dlogits, const float *dspread, float *dprobes, int threads) {
    int G = ROWS / T < 1 ? 1 : ROWS / T < PORTION ? ROWS / T : PORTION, failed = 0;
    Task task = {n, P, T, WHOLE(T), patch, patch ? WHOLE(patch) : D, classes, G,
                 layout(patch, classes), weights, probes, pos, dlogits, dspread, logits, spread,
                 dprobes};
    int portions = (P + PORTION - 1) / PORTION;
    Scratch measure;
    long need = carve(&task, &measure, 0);
#pragma omp parallel num_threads(threads)
    {
        Scratch s;
        float *base = aligned_alloc(64, (need * sizeof(float) + 63) / 64 * 64);
        if (base) carve(&task, &s, base);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < SLICES * portions; i++) {
            if (base) work(&task, &s, i / portions, i % portions * PORTION);
            else {
#pragma omp atomic write
                failed = 1;
            }
        }
        free(base);
    }
    return failed;
}

int tnfn_slices(void) { return SLICES; }
