/* Training steps of small transformers, one network after another, so that it stays in the cache.

   For each few samples of a batch: forward, loss, backward, weight gradients added up. Layers and
   sizes are those of native_network. */

#include "block.h"
#define SITES (1 + 2 * BLOCKS)

/* What dropout multiplies with: 0, or 1/(1-p). See training/randomness.py for the words. */
static void dropout_mask(int rows, uint32_t first, const int32_t *key, uint32_t threshold,
                         float scale, float *out) {
    vu lane, k0 = (vu){0} + (uint32_t)key[0], k1 = (vu){0} + (uint32_t)key[1];
    for (int l = 0; l < VL; l++) lane[l] = l * 0x9E3779B9u;
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < D / 2; d += VL) {
            int n = D / 2 - d;
            vu x = lane + ((first + i) * (D / 2) + d) * 0x9E3779B9u + k0;
            x = (x ^ (x >> 16)) * 0x7FEB352Du;
            x = (x ^ (x >> 15) ^ k1) * 0x846CA68Bu;
            x = x ^ (x >> 16);
            vi keep_low = (vi)((x & 0xFFFF) >= threshold), keep_high = (vi)((x >> 16) >= threshold);
            store_first(n, out + i * D + d, (vf)(keep_low & (vi)splat(scale)));
            store_first(n, out + i * D + D / 2 + d, (vf)(keep_high & (vi)splat(scale)));
        }
}

static void times(int n, float *x, const float *mask) {
    for (int i = 0; i < n; i += VL) store(x + i, load(x + i) * load(mask + i));
}

/* Several columns at a time, so that additions need not wait for each other. */
static void add_rows(int rows, int n, const float *x, float *out) {
    for (int j = 0; j < n; j += 4 * VL) {
        int few = n - j < 4 * VL ? (n - j) / VL : 4;
        vf s[4];
        for (int v = 0; v < few; v++) s[v] = load(out + j + v * VL);
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < few; v++) s[v] += load(x + i * n + j + v * VL);
        for (int v = 0; v < few; v++) store(out + j + v * VL, s[v]);
    }
}

/* Everything a group of samples needs, cut from one allocation. */
typedef struct {
    Kept block[BLOCKS];
    Turned turned;
    float *mask[SITES], *nf, *rf, *h, *g, *g2, *gqkv, *ghid, *kt, *ds, *z, *dz, *c1, *logits, *gW2;
} Scratch;

static long carve(Scratch *s, float *base, int R, int G, int Tp) {
    long at = 0;
#define CUT(field, n) { s->field = base + at; at += PAD(n); }
    for (int i = 0; i < SITES; i++) CUT(mask[i], R * D)
    for (int i = 0; i < BLOCKS; i++) {
        CUT(block[i].n1, R * D) CUT(block[i].r1, R) CUT(block[i].qkv, R * 3 * D)
        CUT(block[i].P, (long)R * H * Tp) CUT(block[i].a, R * D) CUT(block[i].n2, R * D)
        CUT(block[i].r2, R) CUT(block[i].hid, R * F)
        CUT(turned.qkvT[i], 3 * D * D) CUT(turned.oT[i], D * D) CUT(turned.AT[i], F * D)
        CUT(turned.BT[i], D * F)
    }
    CUT(nf, R * D) CUT(rf, R) CUT(h, R * D) CUT(g, R * D) CUT(g2, R * D) CUT(gqkv, R * 3 * D)
    CUT(ghid, R * F) CUT(kt, E * Tp) CUT(ds, (long)Tp * Tp) CUT(z, G * D) CUT(dz, G * D)
    CUT(c1, G * D) CUT(logits, G * LOGITS) CUT(turned.W1T, D * D) CUT(turned.W2p, D * LOGITS)
    CUT(turned.W2T, LOGITS * D) CUT(turned.b2p, LOGITS) CUT(gW2, D * LOGITS)
    return at + VL; /* readable behind the last, see LAST_TILE */
}
#include "pass.h"
