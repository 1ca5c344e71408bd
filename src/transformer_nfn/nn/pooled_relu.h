/* The sums for one type of number: REAL, with NAME() for what is called after it. */

typedef REAL NAME(vec) __attribute__((vector_size(BYTES)));
typedef __typeof__((NAME(vec)){0} > 0) NAME(mask);
#define VEC NAME(vec)
#define LANES ((long)(BYTES / sizeof(REAL)))

static inline __attribute__((always_inline)) VEC NAME(load)(const REAL *p) {
    VEC v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Not a number stays what it is, as in PyTorch. */
static inline __attribute__((always_inline)) VEC NAME(relu)(VEC y) {
    return (VEC)(~(y <= 0) & (NAME(mask))y);
}

/* Adds to `out` the sums of a few rows at one j; a and c step from row to row by their own. */
static inline __attribute__((always_inline)) void NAME(add_rows)(
    const int rows, long Q, long K, const REAL *w, const REAL *x, const REAL *a, long a_row,
    const REAL *c, long c_row, REAL *out, long out_row) {
    VEC total[ROWS];
    REAL sum[ROWS];
    long k = 0;
    for (int r = 0; r < rows; r++) total[r] = (VEC){0}, sum[r] = 0;
    for (; k + WIDE * LANES <= K; k += WIDE * LANES) {
        VEC y[ROWS][WIDE];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++) {
                y[r][v] = (VEC){0} + a[r * a_row];
                if (c) y[r][v] += NAME(load)(c + r * c_row + k + v * LANES);
            }
        for (long q = 0; q < Q; q++) {
            VEC in[WIDE];
            for (int v = 0; v < WIDE; v++) in[v] = NAME(load)(x + q * K + k + v * LANES);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < WIDE; v++) y[r][v] += w[r * Q + q] * in[v];
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < WIDE; v++) total[r] += NAME(relu)(y[r][v]);
    }
    for (; k < K; k++)
        for (int r = 0; r < rows; r++) {
            REAL y = a[r * a_row] + (c ? c[r * c_row + k] : 0);
            for (long q = 0; q < Q; q++) y += w[r * Q + q] * x[q * K + k];
            sum[r] += y <= 0 ? 0 : y;
        }
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < LANES; i++) sum[r] += total[r][i];
        out[r * out_row] += sum[r];
    }
}

/* W [G, M, Q], X [G, Q, B, J, K], A [G, M, B, J], C [G, M, B, K] or null; OUT [G, M, B] is zero.
   Returns whether there was memory for one network's inputs in each thread. */
int NAME(tnfn_pooled_relu)(
    long G, long M, long Q, long B, long J, long K, const REAL *W, const REAL *X, const REAL *A,
    const REAL *C, REAL *OUT, int threads) {
    int failed = 0;
    (void)threads;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        /* Features lie far apart in X, at distances that share a line of the cache. */
        REAL *x = malloc((Q * K + 1) * sizeof(REAL));
        failed |= !x;
#pragma omp for schedule(static)
        for (long task = 0; task < G * B; task++) {
            const long g = task / B, b = task % B;
            for (long j = 0; x && j < J; j++) {
                const REAL *from = X + (g * Q * B + b) * J * K + j * K;
                for (long q = 0; q < Q; q++)
                    memcpy(x + q * K, from + q * B * J * K, K * sizeof(REAL));
                for (long m = 0; m < M;) {
                    const long row = g * M + m;
                    const REAL *w = W + row * Q, *a = A + (row * B + b) * J + j;
                    const REAL *c = C ? C + (row * B + b) * K : 0;
                    REAL *out = OUT + row * B + b;
                    if (m + ROWS <= M) {
                        NAME(add_rows)(ROWS, Q, K, w, x, a, B * J, c, B * K, out, B);
                        m += ROWS;
                    } else {
                        NAME(add_rows)(1, Q, K, w, x, a, B * J, c, B * K, out, B);
                        m++;
                    }
                }
            }
        }
        free(x);
    }
    return !failed;
}

#undef VEC
#undef LANES
