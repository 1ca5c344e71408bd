/* What do many small transformers answer to the same inputs, and which way do the answers move?

   A group of probes goes through one network after the other, and where gradients are asked for, back
   to the probes; all of it stays in the cache. Weights are constants. What the way back needs is kept
   from the way there if the caller has the memory for it; else the way there is walked again. */

#include "block.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

#define ROWS 100   /* of tokens at a time, at most, unless one probe has more */
#define PORTION 16 /* probes for which the weights of a network are prepared once */
#define LEAST 1e-8f
#define SLICES 8   /* of the networks; each sums gradients apart, so that threads do not matter */

typedef struct {
    int n, P, T, Tp, patch, columns, classes, G; /* columns: of a token, whole vectors */
    Layout l;
    const float *weights, *probes, *pos, *dlogits;
    float *logits, *spread, *dprobes, *kept;
    long record; /* of what is kept of a group of probes in one network */
} Task;

typedef struct { /* what the way back needs */
    Kept block[BLOCKS];
    float *z, *nf, *rf, *c1;
} Record;

typedef struct {
    Record record;
    Turned turned;
    float *h, *a, *g, *da, *gqkv, *ghid, *kt, *ds, *dc, *dz, *logits, *WeT, *dx;
} Scratch;

#define CUT(field, n) { s->field = base + at; at += PAD(n); }
static long carve_record(const Task *task, Record *s, float *base) {
    long at = 0, R = task->G * task->T, G = task->G;
    for (int i = 0; i < BLOCKS; i++) {
        CUT(block[i].n1, R * D) CUT(block[i].r1, R) CUT(block[i].qkv, R * 3 * D)
        CUT(block[i].P, R * H * task->Tp) CUT(block[i].n2, R * D) CUT(block[i].r2, R)
        CUT(block[i].hid, R * F)
    }
    CUT(nf, R * D) CUT(rf, R) CUT(z, G * D) CUT(c1, G * D)
    return at + PAD(VL); /* readable behind the last, see LAST_TILE */
}

static long carve(const Task *task, Scratch *s, float *base) {
    long at = carve_record(task, &s->record, base), R = task->G * task->T, G = task->G;
    CUT(h, R * D) CUT(a, R * D) CUT(kt, E * task->Tp) CUT(logits, G * LOGITS)
    CUT(turned.W2p, D * LOGITS) CUT(turned.b2p, LOGITS)
    if (task->dprobes) {
        for (int i = 0; i < BLOCKS; i++) {
            CUT(turned.qkvT[i], 3 * D * D) CUT(turned.oT[i], D * D) CUT(turned.AT[i], F * D)
            CUT(turned.BT[i], D * F)
        }
        CUT(turned.W1T, D * D) CUT(turned.W2T, LOGITS * D) CUT(WeT, (long)D * task->columns)
        CUT(g, R * D) CUT(da, R * D) CUT(gqkv, R * 3 * D) CUT(ghid, R * F)
        CUT(ds, (long)task->Tp * task->Tp) CUT(dc, G * D) CUT(dz, G * D)
        CUT(dx, R * task->columns)
    }
    return at + VL;
}

/* Logits of G probes, and in z the mean token behind the last LayerNorm. */
static void forward(const Task *task, const float *w, Scratch *s, Record *r, int G,
                    const float *x) {
    int T = task->T;
    embed(&task->l, w, G, T, task->patch, x, task->pos, s->h);
    for (int i = 0; i < BLOCKS; i++) {
        r->block[i].a = s->a;
        attention(&task->l, w, i, r->block + i, G, T, task->Tp, s->kt, s->h);
        neurons(&task->l, w, i, r->block + i, G * T, s->h);
    }
    norm(G * T, s->h, r->nf, r->rf);
    mean_rows(G, T, r->nf, r->z);
    classify(&task->l, w, &s->turned, G, r->z, r->c1, s->logits);
}

/* How alike T tokens n behind a LayerNorm are: the mean square of their mean, each brought to mean
   square 1 before, because LayerNorm leaves small ones smaller and so would tell how large they were. */
static float alike(int T, const float *n) {
    vf mean[D / VL] = {{0}}, square = {0};
    for (int t = 0; t < T; t++, n += D) {
        vf q = {0};
        for (int d = 0; d < D; d += VL) q += load(n + d) * load(n + d);
        float size = sum(q) / D, to_one = 1 / sqrtf(size > LEAST ? size : LEAST);
        for (int d = 0; d < D; d += VL) mean[d / VL] += load(n + d) * to_one;
    }
    for (int d = 0; d < D / VL; d++) square += mean[d] * mean[d];
    return sum(square) / ((float)D * T * T);
}

/* The gradient of G probes, whole vectors a token; s->logits holds that of the logits. */
static const float *backward(const Task *task, Scratch *s, const Record *r, int G) {
    int T = task->T, R = G * T;
    const Turned *t = &s->turned;
    classify_back(t, G, s->logits, r->c1, s->dc, s->dz);
    mean_rows_back(G, T, s->dz, s->g);
    norm_back(R, s->g, r->nf, r->rf, s->g);
    for (int i = BLOCKS - 1; i >= 0; i--) {
        neurons_back(t, i, r->block + i, R, s->g, s->ghid);
        attention_back(t, i, r->block + i, G, T, task->Tp, s->g, s->gqkv, s->kt, s->da, s->ds);
        matmul(R, D, 3 * D, s->gqkv, 3 * D, 1, t->qkvT[i], D, s->g, D, 0);
        norm_back(R, s->g, r->block[i].n1, r->block[i].r1, s->g);
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

static void write_answers(const Task *task, const Scratch *s, const Record *r, int G, long pair) {
    for (int g = 0; g < G; g++, pair++) {
        memcpy(task->logits + pair * task->classes, s->logits + g * LOGITS,
               task->classes * sizeof(float));
        for (int i = 0; i < BLOCKS; i++)
            task->spread[pair * BLOCKS + i] = alike(
                task->T, (i < BLOCKS - 1 ? r->block[i + 1].n1 : r->nf) + g * task->T * D);
    }
}

static void add_gradient(const Task *task, Scratch *s, const Record *r, int G, long pair,
                         float *out) {
    int width = task->patch ? task->patch : D;
    memset(s->logits, 0, G * LOGITS * sizeof(float));
    for (int g = 0; g < G; g++)
        memcpy(s->logits + g * LOGITS, task->dlogits + (pair + g) * task->classes,
               task->classes * sizeof(float));
    const float *dx = backward(task, s, r, G);
    for (int i = 0; i < G * task->T; i++)
        for (int c = 0; c < width; c++) out[i * width + c] += dx[i * task->columns + c];
}

/* Network m on G probes from p on. */
static void group(const Task *task, Scratch *s, int slice, long m, int p, int G) {
    long token = (task->patch ? task->patch : D), groups = (task->P + task->G - 1) / task->G;
    const float *w = task->weights + m * task->l.size;
    Record r = s->record;
    if (task->kept) carve_record(task, &r, task->kept + (m * groups + p / task->G) * task->record);
    if (!task->dprobes || !task->kept)
        forward(task, w, s, &r, G, task->probes + p * task->T * token);
    if (task->dprobes)
        add_gradient(task, s, &r, G, m * task->P + p,
                     task->dprobes + ((long)slice * task->P + p) * task->T * token);
    else
        write_answers(task, s, &r, G, m * task->P + p);
}

/* All networks of a slice on a portion of the probes. */
static void work(const Task *task, Scratch *s, int slice, int first) {
    int end = first + PORTION < task->P ? first + PORTION : task->P;
    long from = (long)task->n * slice / SLICES, to = (long)task->n * (slice + 1) / SLICES;
    for (long m = from; m < to; m++) {
        prepare(task, task->weights + m * task->l.size, s);
        for (int p = first; p < end; p += task->G)
            group(task, s, slice, m, p, end - p < task->G ? end - p : task->G);
    }
}

static int group_size(int T) {
    int G = PORTION;
    while (G > 1 && G * T > ROWS) G /= 2;
    return G;
}

/* How many floats are kept of one network and P probes of T tokens. */
long tnfn_kept(int P, int T) {
    Task task = {.T = T, .Tp = WHOLE(T), .G = group_size(T)};
    Record r;
    return carve_record(&task, &r, 0) * ((P + task.G - 1) / task.G);
}

int tnfn_slices(void) { return SLICES; }

/* Logits [n, P, classes] and spread [n, P, BLOCKS] of n networks on P probes [P, T, patch], or, where
   dprobes is given, what the logits' gradients make of it: [SLICES, P, T, patch], zeros before. Word
   vectors have no patch (0) but D columns. kept is what tnfn_kept asks for, written where answers are
   asked for and read where gradients are; or null. Returns 1 where memory is missing. */
int tnfn_probe(int n, int P, int T, int patch, int classes, const float *weights,
               const float *probes, const float *pos, float *logits, float *spread,
               const float *dlogits, float *dprobes, float *kept, int threads) {
    Task task = {n, P, T, WHOLE(T), patch, patch ? WHOLE(patch) : D, classes, group_size(T),
                 layout(patch, classes), weights, probes, pos, dlogits, logits, spread, dprobes,
                 kept, 0};
    int portions = (P + PORTION - 1) / PORTION, failed = 0;
    Scratch measure;
    task.record = carve_record(&task, &measure.record, 0);
    long need = carve(&task, &measure, 0);
#ifdef MADV_HUGEPAGE
    if (kept && !dprobes) { /* fewer faults; whole pages inside alone, and it may be refused */
        uintptr_t page = 1 << 21, from = ((uintptr_t)kept + page - 1) / page * page;
        uintptr_t to = (uintptr_t)(kept + n * tnfn_kept(P, T)) / page * page;
        if (from < to) madvise((void *)from, to - from, MADV_HUGEPAGE);
    }
#endif
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
