/* Sums over places of relu(W x + a + c), without ever storing what is summed.

   For every group and network, with m rows of W, q features, places j and k:

       out[m] = sum over j, k of relu(sum over q of W[m, q] x[q, j, k] + a[m, j] + c[m, k])

   The reference is `_in_torch` in _pooled.py. */

#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
/* ROWS x WIDE accumulators and WIDE inputs fit into the vector registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIDE 4
#else
#define WIDE 2
#endif
#define ROWS 5

#define REAL float
#define NAME(x) x##_float
#include "pooled_relu.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(x) x##_double
#include "pooled_relu.h"
