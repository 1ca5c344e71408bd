// Forward and backward of many small transformers, with the activations of a sample on the chip.
//
// docs/on-chip.md derives the schedule. Compile after on_chip.cuh (GPU) or emulation.h (CPU), with
// TOKENS, PATCH, PADDING, CLASSES, BLOCKS and CHUNK defined.
//
// All matrices of 16-bit numbers in shared memory are stored as 8×8 blocks of 128 bytes, row after
// row: block (row, column) of a matrix of R block rows is number column·R + row. One 32-bit register
// of a tensor-core operand on 32 lanes is such a block, and `ldmatrix` reads it as it is or
// transposed without bank conflicts. In device memory, the four registers of a lane that make an
// operand follow each other (`keep_tile`).

constexpr int D = 32, HEADS = 2, F = 64, HEAD = D / HEADS;
constexpr int ROWS = (TOKENS + 7) / 8;         // block rows of a sample
constexpr int PADDED = 8 * ROWS;               // its rows with padding
constexpr int STAT_ROWS = 16 * ((ROWS + 3) / 4 * 2);  // with that of a whole pair of row tiles
constexpr int TILES = (ROWS + 1) / 2;          // row tiles of 16
constexpr int HALVES = ROWS / 2;               // steps of 16 rows, without an odd last block
constexpr bool ODD = ROWS % 2;
constexpr int BLOCK = 128;                     // bytes of an 8×8 block
constexpr int SITES = 1 + 2 * BLOCKS;
constexpr int STATS = (HEADS + 2) * BLOCKS + 1;  // numbers per row kept for backward
constexpr int MATRIX = D / 8 * ROWS * 32;      // 32-bit words of an activation of width D
constexpr int KEPT = 3 * BLOCKS + 1;           // activations of a sample kept for backward
static_assert(HEAD == 16, "a head fills one step of the tensor cores");
static_assert(PATCH >= 1 && PATCH <= 16, "a patch fills one step of the tensor cores");
static_assert(TOKENS <= 56, "more do not fit shared memory");

// Offsets of the weights in a row of a network, and of a block's tensors in its part.
constexpr int W_QKV = 0, W_O = W_QKV + 3 * D * D, W_A = W_O + D * D, B_A = W_A + D * F;
constexpr int W_B = B_A + F, B_B = W_B + F * D, BLOCK_WEIGHTS = B_B + D;
constexpr int EMBEDDING_BIAS = PATCH * D, FIRST_BLOCK = EMBEDDING_BIAS + D;
constexpr int WEIGHTS = FIRST_BLOCK + BLOCKS * BLOCK_WEIGHTS + D * D + D + D * CLASSES + CLASSES;

// Bytes in shared memory of a block's weights as bf16.
constexpr int S_QKV = 0, S_O = S_QKV + 6 * D * D, S_A = S_O + 2 * D * D, S_B = S_A + 2 * D * F;
constexpr int S_BLOCK = S_B + 2 * F * D;

constexpr int WARPS = 16, THREADS = 32 * WARPS;  // of forward
constexpr int GROUPS = 3, BACKWARD_THREADS = 128 * GROUPS;
// Queries are multiplied by FACTOR, so that scores are logarithms to base 2.
constexpr float LN2 = 0.6931471805599453f, FACTOR = 0.25f / LN2;  // 0.25 = 1/√HEAD

constexpr u32 ONES = 0x3F803F80;                            // two times 1 as bf16

struct Step {
    const float* weights;    // [networks, WEIGHTS]
    const int* step;         // [1], the current batch
    const int* steps;        // [networks], batches of the epoch
    const int* order;        // [networks, samples]
    const int* crop;         // [networks, max_steps, 2]
    const int* bits;         // [networks, SITES, batch·TOKENS], dropout masks
    const float* scale;      // [networks]
    const u8* images;        // [samples, wide, wide]
    const int* table;        // [TOKENS, PATCH], offsets of pixels
    const float* positions;  // [TOKENS, D]
    const float* dpooled;    // [networks, batch, D], gradient of the mean token
    u32* kept;               // [networks, batch, KEPT, MATRIX]: z, a, y of each block, last output
    u32* between;            // [networks, batch, MATRIX], gradient between two blocks
    float* stats;            // [networks, batch, STATS, STAT_ROWS]
    float* pooled;           // [networks, batch, D], the mean token
    float* gradients;        // [chunks, networks, WEIGHTS]
    int batch, networks, max_steps, samples, wide, block;
    float white;
};

typedef float Tile[4][4];     // 16×32 accumulators: [columns / 8][entry]
typedef u32 Fragment[2][4];   // 16×32 operand: [columns / 16][register]

// Lane addresses of four blocks: as a 16×16 operand `a`, rows first; or columns first.
struct Lanes {
    int lane, row, pair;  // lane; its row of an 8×8 block; its pair of columns
    u32 in_block, rows_first, columns_first, contiguous;
    DEV Lanes(u32 lane_) {
        lane = lane_;
        row = lane_ / 4;
        pair = lane_ % 4;
        in_block = (lane_ % 8) * 16;
        u32 low = (lane_ / 8) % 2, high = lane_ / 16;
        rows_first = (high * ROWS + low) * BLOCK + in_block;
        columns_first = (low * ROWS + high) * BLOCK + in_block;
        contiguous = lane * 16;
    }
    // Four blocks: the first and third pair `far` apart, the first and second `near` apart.
    DEV u32 grid(u32 near, u32 far) const {
        return ((u32)lane / 8 % 2) * near + ((u32)lane / 16) * far + in_block;
    }
    DEV u32 line(u32 stride) const { return ((u32)lane / 8) * stride + in_block; }
};

// Whether a sample has this row tile; a warp always has two.
DEV bool exists(int tile) { return TILES == 4 || tile < TILES; }
// Blocks of rows that a sample has of this row tile: 0, 1 or 2.
DEV int rows_in(int tile) { return 2 * tile + 1 < ROWS ? 2 : 2 * tile < ROWS ? 1 : 0; }

DEV void clear(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0; }

DEV float quad_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
DEV float quad_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

// Functions with `rows` leave out the second block of a tile's rows if it is 1; products of rows
// that are not there go nowhere.
DEV void to_operand(u32 (&out)[4], const float (&left)[4], const float (&right)[4], int rows = 2) {
    out[0] = pack(left[0], left[1]);
    out[1] = rows == 2 ? pack(left[2], left[3]) : unused();
    out[2] = pack(right[0], right[1]);
    out[3] = rows == 2 ? pack(right[2], right[3]) : unused();
}
DEV void to_positive(u32 (&out)[4], const float (&left)[4], const float (&right)[4], int rows) {
    out[0] = pack_positive(left[0], left[1]);
    out[1] = rows == 2 ? pack_positive(left[2], left[3]) : unused();
    out[2] = pack_positive(right[0], right[1]);
    out[3] = rows == 2 ? pack_positive(right[2], right[3]) : unused();
}
DEV void to_operand(Fragment& out, const Tile& x, int rows = 2) {
    to_operand(out[0], x[0], x[1], rows);
    to_operand(out[1], x[2], x[3], rows);
}
// The entries of a fragment where accumulators have them.
DEV void to_tile(Tile& out, const Fragment& x) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            out[n][2 * r] = low_half(x[n / 2][2 * (n % 2) + r]);
            out[n][2 * r + 1] = high_half(x[n / 2][2 * (n % 2) + r]);
        }
}

// Zero the entries that dropout drops; `words` are the masks of rows `row` and `row + 8`.
DEV void drop(Tile& x, const u32 (&words)[2], int pair, int rows) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
        u32 word = words[r] >> (2 * pair);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                x[n][2 * r + e] = (word & (1u << (8 * n + e))) ? x[n][2 * r + e] : 0.0f;
    }
}

DEV void drop(Fragment& x, const u32 (&words)[2], int pair) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // The bits of an entry's column and of the next one as signs of bytes.
        u32 even = words[r] << (7 - 2 * pair), odd = words[r] << (6 - 2 * pair);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            x[n / 2][2 * (n % 2) + r] &= permuted(even, odd, 0xCC88 + 0x1111 * n);
    }
}

// A lane's part of the sum of a row of x, or of x times y, in two chains of additions.
DEV float sum_of(const Tile& x, int r) {
    return ((x[0][2 * r] + x[0][2 * r + 1]) + (x[1][2 * r] + x[1][2 * r + 1])) +
           ((x[2][2 * r] + x[2][2 * r + 1]) + (x[3][2 * r] + x[3][2 * r + 1]));
}
DEV float sum_of(const Tile& x, const Tile& y, int r) {
    float part[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        part[i] = x[2 * i][2 * r] * y[2 * i][2 * r];
        part[i] += x[2 * i][2 * r + 1] * y[2 * i][2 * r + 1];
        part[i] += x[2 * i + 1][2 * r] * y[2 * i + 1][2 * r];
        part[i] += x[2 * i + 1][2 * r + 1] * y[2 * i + 1][2 * r + 1];
    }
    return part[0] + part[1];
}

// Normalise the rows of scale·x; `factor` is what their deviations from the mean are multiplied by.
DEV void layer_norm(Tile& x, float (&factor)[2], float scale, int rows) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
        float mean = quad_sum(sum_of(x, r)) * (1.0f / D);
        float variance = fmaxf(quad_sum(sum_of(x, x, r)) * (1.0f / D) - mean * mean, 0.0f);
        factor[r] = scale * reciprocal_root(variance * (scale * scale) + 1e-5f);
        float shift = -mean * factor[r];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) x[n][2 * r + e] = x[n][2 * r + e] * factor[r] + shift;
    }
}

// Gradient of the input of `layer_norm`, in place of that of its output; `normed` is the output.
DEV void layer_norm_backward(Tile& dy, const Fragment& normed, const float (&factor)[2]) {
    Tile y;
    to_tile(y, normed);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = quad_sum(sum_of(dy, r)) * (-factor[r] / D);
        float along = quad_sum(sum_of(dy, y, r)) * (-factor[r] / D);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& d = dy[n][2 * r + e];
                d = d * factor[r] + (y[n][2 * r + e] * along + sum);
            }
    }
}

// Row tile `first` + `i` from or to a matrix in device memory, where the four registers of a lane
// follow each other; so do those of an odd last block of rows. A tile past the end is the first.
DEV bool is_half(int first, int i) {
    return ODD && i == (TILES - 1) % 2 && first + i == TILES - 1;
}
DEV void load_tile(Fragment& x, const u32* matrix, int first, int i, int lane) {
    const u32* at = matrix + (exists(first + i) ? first + i : 0) * 256 + lane * 4;
    load_words(x[0], at);
    load_words(x[1], at + (is_half(first, i) ? 0 : 128));
}
// To be called before the tile is used, and not sooner, because it waits for the loads.
DEV void place_half(Fragment& x, int first, int i) {
    const bool half = is_half(first, i);
    x[1][0] = half ? x[0][1] : x[1][0];
    x[1][2] = half ? x[0][3] : x[1][2];
}
DEV void keep_tile(u32* matrix, const Fragment& x, int first, int i, int lane) {
    u32* at = matrix + (first + i) * 256 + lane * 4;
    if (is_half(first, i)) {
        const u32 half[4] = {x[0][0], x[1][0], x[0][2], x[1][2]};
        store_words(at, half);
    } else if (exists(first + i)) {
        store_words(at, x[0]);
        store_words(at + 128, x[1]);
    }
}

// 16 rows and columns to blocks in shared memory. A block row past the end goes to `trash`, or
// nowhere if the compiler knows the tile.
DEV void put(u32 matrix, int column, int tile, const u32 (&x)[4], const Lanes& l, u32 trash) {
    u32 at = matrix + (column * ROWS + 2 * tile) * BLOCK + l.rows_first;
    if (ODD && tile == TILES - 1 && (l.lane / 8) % 2) at = trash + l.in_block;
    store_matrices(at, x);
}
DEV void put(u32 matrix, int column, int tile, const u32 (&x)[4], const Lanes& l) {
    const u32 at = matrix + (column * ROWS + 2 * tile) * BLOCK;
    if (rows_in(tile) == 2)
        store_matrices(at + l.rows_first, x);
    else if (rows_in(tile) == 1)
        store_two_matrices(at + l.columns_first, x[0], x[2]);
}
template <typename... Trash>
DEV void put(u32 matrix, int tile, const Fragment& x, const Lanes& l, Trash... trash) {
    put(matrix, 0, tile, x[0], l, trash...);
    put(matrix, 2, tile, x[1], l, trash...);
}
DEV void get(Fragment& x, u32 matrix, int tile, const Lanes& l) {
    load_matrices(x[0], matrix + 2 * tile * BLOCK + l.rows_first);
    load_matrices(x[1], matrix + (2 * ROWS + 2 * tile) * BLOCK + l.rows_first);
}

// Weights [inputs, outputs] as bf16 blocks, loaded by all threads before any is stored; rows past
// `INPUTS` are zero, and the first `SCALED` outputs are multiplied by FACTOR.
template <int INPUTS, int OUTPUTS, int BY, int SCALED = 0>
struct Weights {
    static constexpr int BLOCKS_HIGH = (INPUTS + 15) / 16 * 2;
    static constexpr int COUNT = BLOCKS_HIGH * OUTPUTS / 8 * 32, EACH = (COUNT + BY - 1) / BY;
    u32 words[EACH];

    DEV void load(const float* from) {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            u32 i = thread() + n * BY, block = i / 32, row = block % BLOCKS_HIGH * 8 + i % 32 / 4;
            const float* at = from + row * OUTPUTS + block / BLOCKS_HIGH * 8 + i % 4 * 2;
            float scale = block / BLOCKS_HIGH < SCALED / 8 ? FACTOR : 1.0f;
            words[n] = i < COUNT && row < INPUTS ? pack(at[0] * scale, at[1] * scale) : 0u;
        }
    }
    DEV void store(u32 to) const {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            u32 i = thread() + n * BY;
            if (i < COUNT) store_word(to + i * 4, words[n]);
        }
    }
};
template <int BY>
struct BlockWeights {
    Weights<D, 3 * D, BY, D> qkv;
    Weights<D, D, BY> o;
    Weights<D, F, BY> a;
    Weights<F, D, BY> b;

    DEV void load(const float* from) {
        qkv.load(from + W_QKV), o.load(from + W_O), a.load(from + W_A), b.load(from + W_B);
    }
    DEV void store(u32 to) const {
        qkv.store(to + S_QKV), o.store(to + S_O), a.store(to + S_A), b.store(to + S_B);
    }
};

// c = x·W + c0 for 8 outputs: `w` are their blocks, D inputs high, and `b` these loaded.
template <int COUNT>
DEV void project(float (&c)[COUNT][4], const Fragment (&x)[COUNT], const u32 (&b)[4],
                 const float (&c0)[4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        mma(c[i], x[i][0], b[0], b[1], c0);
        add_product(c[i], x[i][1], b[2], b[3]);
    }
}

template <int COUNT>
DEV void project(float (&c)[COUNT][4], const Fragment (&x)[COUNT], u32 w, const float (&c0)[4],
                 const Lanes& l) {
    u32 b[4];
    load_transposed(b, w + l.contiguous);
    project(c, x, b, c0);
}

// Numbers of a lane's two columns, equal in all rows, as start values of accumulators.
DEV void load_columns(float (&c)[4], u32 at, int column) {
    float x[2];
    load_two(x, at + column * 4);
    c[0] = c[2] = x[0];
    c[1] = c[3] = x[1];
}

// q, k and v of row tiles from `first` on, to three matrices that follow each other from `to` on;
// `rows` is of the last one.
template <int COUNT, typename... Trash>
DEV void project_qkv(const Fragment (&z)[COUNT], u32 w, u32 to, int first, int rows, const Lanes& l,
                     Trash... trash) {
    // Weights are loaded before the stores that precede their use, which would hold them up.
    constexpr int COLUMNS_HIGH = D / 8 * BLOCK;
    u32 b[2][2][4];
    load_transposed(b[0][0], w + l.contiguous);
    load_transposed(b[0][1], w + COLUMNS_HIGH + l.contiguous);
#pragma unroll
    for (int n = 0; n < 3 * D / 16; ++n) {
        float c[2][COUNT][4];  // [8 columns][tile]
        const float zero[4] = {0, 0, 0, 0};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            project(c[half], z, b[n % 2][half], zero);
            if (n + 1 < 3 * D / 16)
                load_transposed(b[(n + 1) % 2][half],
                                w + (2 * n + 2 + half) * COLUMNS_HIGH + l.contiguous);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            u32 out[4];
            to_operand(out, c[0][i], c[1][i], i == COUNT - 1 ? rows : 2);
            if (exists(first + i)) put(to, 2 * n, first + i, out, l, trash...);
        }
    }
}

DEV u32 hash_word(u32 position, u32 key0, u32 key1) {
    u32 x = position * 0x9E3779B9u + key0;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15) ^ key1) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Where the number of the image of sample `n` of the batch is.
DEV const int* number_of(const Step& s, int m, int step, int n) {
    return s.order + (i64)m * s.samples + (i64)step * s.batch + n;
}
DEV const u8* image_of(const Step& s, int number) {
    return s.images + (i64)number * s.wide * s.wide;
}
// Copy an image to shared memory while other work goes on, in vectors of 16 bytes by `threads`; its
// first byte is that many after `to`.
DEV u32 copy_image(u32 to, const Step& s, int number, int thread, int threads) {
    const u8* image = image_of(s, number);
    const int before = (i64)image % 16;
#pragma unroll 1
    for (int i = thread * 16; i < before + s.wide * s.wide; i += threads * 16)
        copy_vector(to + i, image - before + i);
    return before;
}
// Prefetch an image of up to 4 KB.
DEV void prefetch_image(const Step& s, int number, int lane) {
    if (lane * 128 < s.wide * s.wide) prefetch(image_of(s, number) + lane * 128);
}
// Random crop of sample `n` by the two numbers at `crop_key`, as the number of its first pixel.
DEV const int* crop_key(const Step& s, int m, int step) {
    return s.crop + ((i64)m * s.max_steps + step) * 2;
}
DEV u32 crop_of(const Step& s, int n, u32 key0, u32 key1) {
    u32 word = hash_word(n, key0, key1);
    u32 shifts = 2 * PADDING + 1;
    u32 down = ((word & 0xFFFF) * shifts) >> 16, right = ((word >> 16) * shifts) >> 16;
    return down * s.wide + right;
}

// In shared memory: where the pixels of a patch are from its first one on, and the patches.
constexpr int TABLE = (16 + TOKENS + 3) / 4 * 16;
DEV void copy_table(u32 to, const Step& s, int i) {
    if (i < 16 + TOKENS)
        copy_word(to + i * 4, s.table + (i < PATCH ? i : i < 16 ? 0 : (i - 16) * PATCH),
                  i < PATCH || i >= 16);
}
// 16 patches as an operand; white is 1, black −1. The second block of rows only if `rows` is 2.
DEV void patches(u32 (&out)[4], const Step& s, u32 image, u32 table, int tile, int rows,
                 const Lanes& l) {
    float factor = 2.0f / s.white;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (r >= rows) {
            out[r] = unused(), out[2 + r] = unused();
            continue;
        }
        int row = 16 * tile + l.row + 8 * r;
        const u32 patch = image + load_word(table + (16 + (row < TOKENS ? row : TOKENS - 1)) * 4);
        float value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool there = 2 * l.pair + i / 2 * 8 + i % 2 < PATCH;
            const u32 pixel = load_word(table + (2 * l.pair + i / 2 * 8 + i % 2) * 4);
            value[i] = there ? load_byte(patch + pixel) * factor - 1.0f : 0.0f;
        }
        out[r] = pack(value[0], value[1]);
        out[2 + r] = pack(value[2], value[3]);
    }
}

// The mask words of row `row` of sample `n` at the first dropout site.
DEV const int* masks_of(const Step& s, int m, int n, int row) {
    return s.bits + ((i64)m * SITES * s.batch + n) * TOKENS + row;
}
// A lane's mask of the 32 rows of two tiles; and those of its rows of each tile, from all lanes.
DEV u32 rows_masks(const Step& s, const int* masks, int site, int first, int lane) {
    const int* at = masks + (i64)(site * s.batch * TOKENS + 16 * first);
    return 16 * first + lane < TOKENS ? (u32)*at : 0u;
}
DEV void masks_of_tiles(u32 (&words)[2][2], u32 mask, int row) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = shuffle_from(mask, 8 * i + row);
}
DEV void keep_rows(float* to, const float (&x)[2], int tile, const Lanes& l) {
#pragma unroll
    for (int r = 0; r < rows_in(tile); ++r)
        if (l.pair == 0) to[16 * tile + l.row + 8 * r] = x[r];
}

// ---------------------------------------------------------------------------------------- forward
// A warp has a sample, from its pixels to the mean token. Its q, k and v are in shared memory.

constexpr int F_EMBEDDING = BLOCKS * S_BLOCK, F_BIAS = F_EMBEDDING + 16 * D * 2;
constexpr int F_BLOCK_BIAS = (F + D) * 4;  // b_A, b_B as float32
constexpr int F_POSITIONS = (F_BIAS + BLOCKS * F_BLOCK_BIAS + 127) / 128 * 128;
constexpr int F_TABLE = F_POSITIONS + TOKENS * D * 4, F_QKV = (F_TABLE + TABLE + 127) / 128 * 128;
static_assert(CHUNK <= 32 * WARPS, "a lane has one image of the warp");
constexpr int F_SAMPLE = 12 * ROWS * BLOCK, F_IMAGE = 4 * ROWS * BLOCK;  // instead of keys
constexpr int FORWARD_SHARED = F_QKV + WARPS * F_SAMPLE;
static_assert(FORWARD_SHARED <= 230400, "shared memory");

// Positions with the embedding's bias, the start values of a token. A row's blocks of 8 columns are
// exchanged such that lanes of four rows read different banks.
DEV u32 position_at(int row, int column) {
    return row * (D * 4) + ((column / 8 ^ row % 4) * 8 + column % 8) * 4;
}
struct Positions {
    static constexpr int EACH = (TOKENS * D + THREADS - 1) / THREADS;
    float sums[EACH];

    DEV void load(const float* positions, const float* bias) {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            int i = thread() + n * THREADS;
            sums[n] = i < TOKENS * D ? positions[i] + bias[i % D] : 0.0f;
        }
    }
    DEV void store(u32 to) const {
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            int i = thread() + n * THREADS;
            if (i < TOKENS * D) store_float(to + position_at(i / D, i % D), sums[n]);
        }
    }
};

// Scores of two row tiles minus the maximum of their row over the keys there are.
DEV void subtract_top(float (&score)[2][ROWS + 1][4], float (&top)[2][2], int pair) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float most = -1e30f;
#pragma unroll
            for (int n = 0; n < ROWS; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + 2 * pair + e < TOKENS) most = fmaxf(most, score[i][n][2 * r + e]);
            top[i][r] = quad_max(most);
#pragma unroll
            for (int n = 0; n < ROWS; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) score[i][n][2 * r + e] -= top[i][r];
        }
}

// One head of two row tiles of queries: softmax(q·kᵀ)·v as operands of the output projection.
// Exponentials of the scores as they are; only if a sum leaves the range in which that is exact,
// again with the maxima of the rows subtracted.
DEV void attend(Fragment (&a)[2], float* lse, u32 qkv, int head, int first, const Lanes& l) {
    const u32 query = qkv + 2 * head * ROWS * BLOCK;
    const u32 key = query + 4 * ROWS * BLOCK, value = key + 4 * ROWS * BLOCK;
    float top[2][2] = {}, out[2][3][4];
#pragma unroll 1
    for (bool shifted = false;; shifted = true) {
        u32 q[2][4], b[4];
        float score[2][ROWS + 1][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int tile = exists(first + i) ? first + i : first;
            load_matrices(q[i], query + 2 * tile * BLOCK + l.rows_first);
        }
#pragma unroll
        for (int n = 0; n < ROWS; n += 2) {
            const float zero[4] = {0, 0, 0, 0};
            load_matrices(b, key + n * BLOCK + l.columns_first);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                mma(score[i][n], q[i], b[0], b[1], zero);
                if (n + 1 < ROWS) mma(score[i][n + 1], q[i], b[2], b[3], zero);
            }
        }
        if (shifted) subtract_top(score, top, l.pair);
        // Probabilities as left operands, 16 keys each; they are divided by their sums at the end.
        u32 p[2][TILES][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < ROWS; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    u32& pair = p[i][n / 2][2 * (n % 2) + r];
                    if (r >= rows_in(first + i)) {
                        pair = unused();
                        continue;
                    }
                    pair = pack(exp2_of(score[i][n][2 * r]),
                                8 * n + 1 < TOKENS ? exp2_of(score[i][n][2 * r + 1]) : 0.0f);
                    // Of the last block, keys past the end.
                    if (8 * n + 2 * l.pair >= TOKENS) pair = 0;
                    if (8 * n + 2 * l.pair + 1 >= TOKENS) pair &= 0xffffu;
                }
        // The last product is with a matrix of ones: the sums of the rows.
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < 3; ++n) clear(out[i][n]);
#pragma unroll
        for (int k = 0; k < TILES; ++k) {
            load_transposed(b, value + 2 * k * BLOCK + l.rows_first);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (k < HALVES) {
                    add_product(out[i][0], p[i][k], b[0], b[1]);
                    add_product(out[i][1], p[i][k], b[2], b[3]);
                    add_product(out[i][2], p[i][k], ONES, ONES);
                } else {
                    mma_half(out[i][0], p[i][k][0], p[i][k][1], b[0]);
                    mma_half(out[i][1], p[i][k][0], p[i][k][1], b[2]);
                    mma_half(out[i][2], p[i][k][0], p[i][k][1], ONES);
                }
        }
        bool exact = true;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int r = 0; r < rows_in(first + i); ++r)
                exact &= out[i][2][2 * r] > 1e-30f && out[i][2][2 * r] < 1e30f;
        if (shifted || all_lanes(exact)) break;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < rows_in(first + i); ++r) {
            float sum = out[i][2][2 * r], total = reciprocal(sum);
            top[i][r] = -top[i][r] - log2_of(sum);
#pragma unroll
            for (int e = 0; e < 4; ++e) out[i][e / 2][2 * r + e % 2] *= total;
        }
        keep_rows(lse, top[i], first + i, l);
        to_operand(a[i][head], out[i][0], out[i][1], rows_in(first + i));
    }
}

// y = relu(x·W_A + b_A)·W_B + b_B of two row tiles, 16 neurons at a time.
DEV void mlp(Tile (&y)[2], const Fragment (&x)[2], u32 w, u32 bias, int first, const Lanes& l) {
#pragma unroll
    for (int f = 0; f < F / 16; ++f) {
        float h[2][2][4], b_a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load_columns(b_a, bias, 16 * f + 8 * half + 2 * l.pair);
            project(h[half], x, w + S_A + (2 * f + half) * (D / 8) * BLOCK, b_a, l);
        }
        u32 operand[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            to_positive(operand[i], h[0][i], h[1][i], rows_in(first + i));
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            u32 b[4];
            load_transposed(b, w + S_B + (n * (F / 8) + 2 * f) * BLOCK + l.grid(BLOCK, F / 8 * BLOCK));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float b_b[4];
                if (f == 0) load_columns(b_b, bias, F + 8 * (n + half) + 2 * l.pair);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (f == 0)
                        mma(y[i][n + half], operand[i], b[2 * half], b[2 * half + 1], b_b);
                    else
                        add_product(y[i][n + half], operand[i], b[2 * half], b[2 * half + 1]);
            }
        }
    }
}

DEV void forward_samples(const Step& s) {
    const u32 base = shared_base();
    const int m = network_of_block(), chunk = chunk_of_block();
    const int step = *s.step;
    if (step >= s.steps[m]) return;
    const float* w = s.weights + (i64)m * WEIGHTS;
    // All loads before the first store, which would wait for those before it.
    BlockWeights<THREADS> blocks[BLOCKS];
    Weights<PATCH, D, THREADS> embedding;
    Positions positions;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const float* from = w + FIRST_BLOCK + b * BLOCK_WEIGHTS;
        const int i = thread();
        if (i < F + D)
            copy_word(base + F_BIAS + b * F_BLOCK_BIAS + i * 4, from + (i < F ? B_A + i : B_B + i - F),
                      true);
        blocks[b].load(from);
    }
    copy_table(base + F_TABLE, s, thread());
    embedding.load(w);
    positions.load(s.positions, w + EMBEDDING_BIAS);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) blocks[b].store(base + b * S_BLOCK);
    embedding.store(base + F_EMBEDDING);
    positions.store(base + F_POSITIONS);

    const int warp = warp_number();
    const Lanes l((u32)thread() % 32);
    const u32 qkv = base + F_QKV + warp * F_SAMPLE;
    const float scale = s.scale[m];
    const int end = (chunk + 1) * CHUNK < s.batch ? (chunk + 1) * CHUNK : s.batch;
    // Of the warp's samples, one per lane: the number of the image and its crop.
    const int begin = chunk * CHUNK + warp, mine = begin + WARPS * l.lane;
    const u32 number = mine < end ? *number_of(s, m, step, mine) : 0;
    const int* key = crop_key(s, m, step);
    const u32 crop = crop_of(s, mine, key[0], key[1]);
    u32 image = 0;
    if (begin < end) image = copy_image(qkv + F_IMAGE, s, shuffle_from(number, 0), l.lane, 32);
    wait_copies();
    sync_block();
#pragma unroll 1
    for (int n = begin; n < end; n += WARPS) {
        const i64 sample = (i64)m * s.batch + n;
        u32* kept = s.kept + sample * KEPT * MATRIX;
        float* stats = s.stats + sample * STATS * STAT_ROWS;
        image += qkv + F_IMAGE + shuffle_from(crop, (n - begin) / WARPS);
        const int* masks = masks_of(s, m, n, l.lane);
        float factor[2];
        wait_copies();
        sync_warp();
#pragma unroll
        for (int first = 0; first < TILES; first += 2) {
            u32 x[2][4], b[4], words[2][2], mask = rows_masks(s, masks, 0, first, l.lane);
            Tile c[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                patches(x[i], s, image, base + F_TABLE, first + i, rows_in(first + i), l);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int block_row = 16 * (first + i) + 8 * r;
                        int row = block_row + l.row;
                        if (block_row + 8 > TOKENS) row = row < TOKENS ? row : TOKENS - 1;
                        float start[2] = {0, 0};
                        if (r < rows_in(first + i))
                            load_two(start, base + F_POSITIONS + position_at(row, 8 * k + 2 * l.pair));
                        c[i][k][2 * r] = start[0];
                        c[i][k][2 * r + 1] = start[1];
                    }
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                load_transposed(b, base + F_EMBEDDING + k * 2 * BLOCK + l.contiguous);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    add_product(c[i][k], x[i], b[0], b[1]);
                    add_product(c[i][k + 1], x[i], b[2], b[3]);
                }
            }
            masks_of_tiles(words, mask, l.row);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int rows = rows_in(first + i);
                Fragment z;
                drop(c[i], words[i], l.pair, rows);
                layer_norm(c[i], factor, scale, rows);
                to_operand(z, c[i], rows);
                keep_tile(kept, z, first, i, l.lane);
                keep_rows(stats + HEADS * STAT_ROWS, factor, first + i, l);
                put(qkv, first + i, z, l);
            }
        }
        float mean[4][2] = {};
#pragma unroll 1
        for (int block = 0; block < BLOCKS; ++block) {
            const u32 weights = base + block * S_BLOCK;
            float* stat = stats + block * (HEADS + 2) * STAT_ROWS;
            const bool last = block == BLOCKS - 1;
            const int next = last ? (HEADS + 2) * BLOCKS : (block + 1) * (HEADS + 2) + HEADS;
            sync_warp();
            {
                Fragment z[TILES];
#pragma unroll
                for (int i = 0; i < TILES; ++i) get(z[i], qkv, i, l);
                sync_warp();
                project_qkv(z, weights + S_QKV, qkv, 0, rows_in(TILES - 1), l);
            }
            sync_warp();
#pragma unroll
            for (int first = 0; first < TILES; first += 2) {
                Fragment x[2];
                Tile c[2];
                // Loaded before they are needed.
                const u32 mask_a = rows_masks(s, masks, 1 + 2 * block, first, l.lane);
                const u32 mask_b = rows_masks(s, masks, 2 + 2 * block, first, l.lane);
                u32 words[2][2];
#pragma unroll
                for (int head = 0; head < HEADS; ++head)
                    attend(x, stat + head * STAT_ROWS, qkv, head, first, l);
                if (last && first + 2 >= TILES && n + WARPS < end) {
                    const u32 next = shuffle_from(number, (n - begin) / WARPS + 1);
                    image = copy_image(qkv + F_IMAGE, s, next, l.lane, 32);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    keep_tile(kept + (3 * block + 1) * MATRIX, x[i], first, i, l.lane);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float y[2][4];
                    const float zero[4] = {0, 0, 0, 0};
                    project(y, x, weights + S_O + k * (D / 8) * BLOCK, zero, l);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        c[0][k][e] = y[0][e];
                        c[1][k][e] = y[1][e];
                    }
                }
                masks_of_tiles(words, mask_a, l.row);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int rows = rows_in(first + i);
                    drop(c[i], words[i], l.pair, rows);
                    layer_norm(c[i], factor, scale, rows);
                    to_operand(x[i], c[i], rows);
                    keep_tile(kept + (3 * block + 2) * MATRIX, x[i], first, i, l.lane);
                    keep_rows(stat + (HEADS + 1) * STAT_ROWS, factor, first + i, l);
                }
                mlp(c, x, weights, base + F_BIAS + block * F_BLOCK_BIAS, first, l);
                masks_of_tiles(words, mask_b, l.row);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int rows = rows_in(first + i);
                    drop(c[i], words[i], l.pair, rows);
                    layer_norm(c[i], factor, scale, rows);
                    to_operand(x[i], c[i], rows);
                    keep_tile(kept + (3 * block + 3) * MATRIX, x[i], first, i, l.lane);
                    keep_rows(stats + next * STAT_ROWS, factor, first + i, l);
                    if (last) {
#pragma unroll
                        for (int k = 0; k < 4; ++k)
#pragma unroll
                            for (int e = 0; e < 2 * rows; ++e) mean[k][e % 2] += c[i][k][e];
                    } else {
                        put(qkv, first + i, x[i], l);
                    }
                }
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = mean[k][e];
                sum += shuffle_xor(sum, 4);
                sum += shuffle_xor(sum, 8);
                sum += shuffle_xor(sum, 16);
                if (l.row == 0) s.pooled[sample * D + 8 * k + 2 * l.pair + e] = sum * (1.0f / TOKENS);
            }
    }
}

// --------------------------------------------------------------------------------------- backward
// A block of threads has a network, with three groups of four warps that need not wait for each
// other. A group has two samples at a time, a warp two row tiles of one and one of its heads. What
// a weight gradient multiplies is put into shared memory; then each warp of the group adds a 32×32
// part of the gradient over the rows of both samples.

constexpr int SAMPLES = 2 * GROUPS;
// Matrices of a sample's part of shared memory, in block columns: first for the gradients of W_A
// and W_B, then for those of W_O and W_QKV, at last for that of the embedding.
constexpr int C_Y = 0, C_DOUT = 4, C_H = 8, C_DH = 16;
constexpr int C_A = 0, C_DY = 4, C_DA = 8, C_Z = 12, C_QKV = 16, COLUMNS = 28;
constexpr int C_DX = 0, C_PATCHES = 4, C_IMAGE = C_DA;
constexpr int COLUMN = ROWS * BLOCK;
// Of each pair of queries of a head: minus log-sums, then minus products of da and a.
constexpr int SAMPLE_STATS = COLUMNS * COLUMN;
// Then numbers of rows: factors and masks of LayerNorms and dropouts, in the order of their use.
enum { LAST_FACTOR, LAST_MASK, Y_FACTOR, Y_MASK, Z_FACTOR, Z_MASK, ROW_NUMBERS };
constexpr int SAMPLE_ROWS = SAMPLE_STATS + HEADS * PADDED * 8;
constexpr int SAMPLE_IMAGE = SAMPLE_ROWS + ROW_NUMBERS * PADDED * 4;  // its number, for each warp
constexpr int SAMPLE_KEY = SAMPLE_IMAGE + 8, SAMPLE_BYTES = SAMPLE_KEY + 8;
constexpr int B_BIAS = S_BLOCK, B_TABLE = B_BIAS + F * 4, TRASH = B_TABLE + TABLE;
constexpr int B_SUMS = TRASH + BLOCK;
constexpr int PART = 32 * 32 * 4;  // bytes of a part of a gradient
constexpr int B_SAMPLES = B_SUMS + 4 * GROUPS * PART;
constexpr int BACKWARD_SHARED = B_SAMPLES + SAMPLES * SAMPLE_BYTES;
static_assert(SAMPLE_BYTES % 16 == 0 && BACKWARD_SHARED <= 230400, "shared memory");

// Where accumulators in shared memory have an entry: blocks of 16×8, each four numbers of 32 lanes.
DEV u32 entry_of(u32 row, u32 column) {
    u32 lane = row % 8 * 4 + column % 8 / 2, entry = row / 8 * 2 + column % 2;
    return column / 8 * 512 + lane * 16 + entry * 4;
}

// A 32×32 part of a transposed gradient: [16 outputs][8 inputs][entry].
typedef float Part[2][4][4];

// part += dyᵀ·x over 16 rows, in two blocks of rows `apart` bytes from each other; `sums` are of
// the columns of dy.
template <bool WITH_SUMS>
DEV void add_rows(Part& part, float (&sums)[2][4], u32 dy, u32 x, u32 apart, const Lanes& l) {
    u32 a[2][4], b[4];
    load_transposed(a[0], dy + l.grid(COLUMN, apart));
    load_transposed(a[1], dy + 2 * COLUMN + l.grid(COLUMN, apart));
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        load_transposed(b, x + n * COLUMN + l.grid(apart, COLUMN));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            add_product(part[i][n], a[i], b[0], b[1]);
            add_product(part[i][n + 1], a[i], b[2], b[3]);
        }
    }
    if (WITH_SUMS) {
        add_product(sums[0], a[0], ONES, ONES);
        add_product(sums[1], a[1], ONES, ONES);
    }
}
// The same over two samples; an odd last block of rows is taken of both at once.
template <bool WITH_SUMS>
DEV void add_samples(Part& part, float (&sums)[2][4], u32 dy, u32 x, const Lanes& l) {
#pragma unroll 1
    for (u32 sample = 0; sample < 2 * SAMPLE_BYTES; sample += SAMPLE_BYTES)
#pragma unroll
        for (int k = 0; k < HALVES; ++k) {
            u32 at = sample + 2 * k * BLOCK;
            add_rows<WITH_SUMS>(part, sums, dy + at, x + at, BLOCK, l);
        }
    if (ODD) {
        u32 at = (ROWS - 1) * BLOCK;
        add_rows<WITH_SUMS>(part, sums, dy + at, x + at, SAMPLE_BYTES, l);
    }
}

DEV u32 query_stat(u32 sample, int head, int query) {
    return sample + SAMPLE_STATS + (head * PADDED + query) / 2 * 16 + query % 2 * 4;
}

// Gradients of q, k and v of a head, in their place. Keys are rows, 32 at a time, and queries
// columns: only the gradient of the scores is transposed, in registers. The gradient of a query is
// that of the multiplied one.
struct Head {
    u32 query, key, value, da, stats;
};

// Transpose the blocks of two row tiles, of which the second block of columns may be unused.
DEV void transpose(u32 (&x)[2][4], int first, int columns) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int k = 0; k < 2 * columns; ++k)
            if (k % 2 < rows_in(first + i)) x[i][k] = transposed(x[i][k]);
}

// Two row tiles of keys; of the last one there may be rows past the end.
DEV void key_tiles(float (&dq)[ROWS + 1][4], const Head& at, int first, u32 trash, const Lanes& l) {
    u32 k[2][4], v[2][4], kt[2][4];
    float dv[2][2][4], dk[2][2][4];  // [tile][8 columns]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int tile = exists(first + i) ? first + i : first;
        load_matrices(k[i], at.key + 2 * tile * BLOCK + l.rows_first);
        load_matrices(v[i], at.value + 2 * tile * BLOCK + l.rows_first);
        load_transposed(kt[i], at.key + 2 * tile * BLOCK + l.columns_first);
#pragma unroll
        for (int n = 0; n < 2; ++n) clear(dv[i][n]), clear(dk[i][n]);
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
        const int columns = rows_in(j);
        u32 q[4], da[4], b[4], p[2][4], ds[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        load_matrices(q, at.query + 2 * j * BLOCK + l.columns_first);
        load_matrices(da, at.da + 2 * j * BLOCK + l.columns_first);
#pragma unroll
        for (int n = 0; n < columns; ++n) {
            const float zero[4] = {0, 0, 0, 0};
            float stat[4];
            load_four(stat, at.stats + (16 * j + 8 * n) * 8);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float score[4], dp[4];
                mma(score, k[i], q[2 * n], q[2 * n + 1], zero);
                mma(dp, v[i], da[2 * n], da[2 * n + 1], zero);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int key = 16 * (first + i) + 8 * r;
                    if (r >= rows_in(first + i)) {
                        p[i][2 * n + r] = unused(), ds[i][2 * n + r] = unused();
                        continue;
                    }
                    const float left = exp2_of(score[2 * r] + stat[0]);
                    const float right = exp2_of(score[2 * r + 1] + stat[1]);
                    p[i][2 * n + r] = pack(left, right);
                    ds[i][2 * n + r] =
                        pack(left * (dp[2 * r] + stat[2]), right * (dp[2 * r + 1] + stat[3]));
                    if (key + 8 > TOKENS && key + l.row >= TOKENS)
                        p[i][2 * n + r] = ds[i][2 * n + r] = 0;
                }
            }
        }
        load_transposed(b, at.da + 2 * j * BLOCK + l.rows_first);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (columns == 2) {
                add_product(dv[i][0], p[i], b[0], b[1]);
                add_product(dv[i][1], p[i], b[2], b[3]);
            } else {
                mma_half(dv[i][0], p[i][0], p[i][1], b[0]);
                mma_half(dv[i][1], p[i][0], p[i][1], b[2]);
            }
        load_transposed(b, at.query + 2 * j * BLOCK + l.rows_first);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (columns == 2) {
                add_product(dk[i][0], ds[i], b[0], b[1]);
                add_product(dk[i][1], ds[i], b[2], b[3]);
            } else {
                mma_half(dk[i][0], ds[i][0], ds[i][1], b[0]);
                mma_half(dk[i][1], ds[i][0], ds[i][1], b[2]);
            }
        // In turn where the keys and the values were.
        transpose(ds, first, columns);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < columns; ++n)
                if (rows_in(first + i) == 2)
                    add_product(dq[2 * j + n], kt[i], ds[i][2 * n], ds[i][2 * n + 1]);
                else if (rows_in(first + i) == 1)
                    mma_half(dq[2 * j + n], kt[i][0], kt[i][1], ds[i][2 * n]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (!exists(first + i)) continue;
        u32 out[4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) dk[i][n][e] *= LN2;
        to_operand(out, dk[i][0], dk[i][1], rows_in(first + i));
        put(at.key, 0, first + i, out, l, trash);
        to_operand(out, dv[i][0], dv[i][1], rows_in(first + i));
        put(at.value, 0, first + i, out, l, trash);
    }
}

DEV void attention_backward(u32 sample, int head, u32 trash, const Lanes& l) {
    Head at;
    at.query = sample + (C_QKV + 2 * head) * COLUMN;
    at.key = at.query + 4 * COLUMN;
    at.value = at.key + 4 * COLUMN;
    at.da = sample + (C_DA + 2 * head) * COLUMN;
    at.stats = sample + SAMPLE_STATS + (head * PADDED + 2 * l.pair) * 8;
    float dq[ROWS + 1][4];  // transposed
#pragma unroll
    for (int n = 0; n <= ROWS; ++n) clear(dq[n]);
#pragma unroll
    for (int first = 0; first < TILES; first += 2) key_tiles(dq, at, first, trash, l);
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
        u32 out[4], to = at.query + 2 * j * BLOCK + l.columns_first;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[2 * j + n][e] *= LN2;
        to_operand(out, dq[2 * j], dq[2 * j + 1]);
        if (2 * j + 1 == ROWS && l.lane >= 16) to = trash + l.in_block;
        store_transposed(to, out);
    }
}

// Numbers of a lane's rows of a tile.
DEV void rows_of(float (&x)[2], u32 sample, int which, int tile, const Lanes& l) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        x[r] = load_float(sample + SAMPLE_ROWS + (which * PADDED + 16 * tile + l.row + 8 * r) * 4);
}
DEV void rows_of(u32 (&x)[2], u32 sample, int which, int tile, const Lanes& l) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
        x[r] = load_word(sample + SAMPLE_ROWS + (which * PADDED + 16 * tile + l.row + 8 * r) * 4);
}

// Copy the numbers of row `row` of sample `n`, and its log-sums, while other work goes on. Nothing
// is kept of rows past the end, or if the sample is not `there`.
template <bool LAST>
DEV void copy_rows(u32 to, const Step& s, int m, int n, int block, int row, bool there) {
    if (row >= PADDED) return;
    const float* stats = s.stats + ((i64)m * s.batch + n) * STATS * STAT_ROWS + row;
    const float* stat = stats + block * (HEADS + 2) * STAT_ROWS;
    const int* masks = masks_of(s, m, n, row < TOKENS ? row : 0);
    const i64 site = (i64)s.batch * TOKENS;
    const u32 at = to + SAMPLE_ROWS + row * 4;
    there = there && row < TOKENS;
    if (LAST) {
        copy_word(at + LAST_FACTOR * PADDED * 4, stats + (HEADS + 2) * BLOCKS * STAT_ROWS, true);
        copy_word(at + LAST_MASK * PADDED * 4, masks + 2 * BLOCKS * site, there);
    }
    copy_word(at + Y_FACTOR * PADDED * 4, stat + (HEADS + 1) * STAT_ROWS, true);
    copy_word(at + Y_MASK * PADDED * 4, masks + (1 + 2 * block) * site, there);
    copy_word(at + Z_FACTOR * PADDED * 4, stat + HEADS * STAT_ROWS, true);
    copy_word(at + Z_MASK * PADDED * 4, masks + 2 * block * site, there);
#pragma unroll
    for (int head = 0; head < HEADS; ++head)
        copy_word(query_stat(to, head, row), stat + head * STAT_ROWS, true);
}

// What backward begins a sample with, two row tiles each: the input of the MLP; and the block's
// output with a lane's number of the gradient of the mean token, or the gradient of that output.
template <bool LAST>
DEV void load_inputs(Fragment (&x)[2], Fragment (&z)[2], u32& dpooled, const Step& s, i64 sample,
                     int block, int first, int lane) {
    const u32* kept = s.kept + (sample * KEPT + 3 * block) * MATRIX;
    if (LAST) dpooled = ((const u32*)s.dpooled)[sample * D + lane];
    if (!exists(first)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        load_tile(x[i], kept + 2 * MATRIX, first, i, lane);
        load_tile(z[i], LAST ? kept + 3 * MATRIX : s.between + sample * MATRIX, first, i, lane);
    }
}

template <bool FIRST, bool LAST>
DEV void backward_samples(const Step& s) {
    const u32 base = shared_base();
    const int m = network_of_block(), chunk = chunk_of_block();
    const int step = *s.step;
    if (step >= s.steps[m]) return;
    const int block = FIRST ? 0 : LAST ? BLOCKS - 1 : s.block;
    const float* w = s.weights + (i64)m * WEIGHTS + FIRST_BLOCK + block * BLOCK_WEIGHTS;
    BlockWeights<BACKWARD_THREADS> weights;
    weights.load(w);
    weights.store(base);
    for (int i = thread(); i < F; i += BACKWARD_THREADS) store_float(base + B_BIAS + i * 4, w[B_A + i]);
    if (FIRST) copy_table(base + B_TABLE, s, thread());

    const u32 warp = warp_number(), group = warp / 4, half = warp % 2, first = 2 * half;
    const Lanes l((u32)thread() % 32);
    const u32 samples = base + B_SAMPLES + 2 * group * SAMPLE_BYTES;
    const u32 mine = samples + warp / 2 % 2 * SAMPLE_BYTES, trash = base + TRASH;
    const int end = (chunk + 1) * CHUNK < s.batch ? (chunk + 1) * CHUNK : s.batch;

    // The parts of gradients that this warp adds. In the first phase: outputs 0 to 31 of W_A, then
    // 32 to 63, inputs 0 to 31 of W_B, then 32 to 63; in the second: W_Q, W_K, W_V, W_O.
    const u32 part = (warp + group) % 4;
    Part mlp_part = {};
    float mlp_sums[2][4] = {}, embedding[2][4] = {}, embedding_sum[4] = {};
    // Those of the second phase are kept in shared memory.
    const u32 sums = base + B_SUMS + (group * 4 + part) * PART + l.contiguous;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float zero[4] = {0, 0, 0, 0};
        store_four(sums + i * 512, zero);
    }
    // A warp copies the numbers of the rows that it has.
    const int row = half * 32 + l.lane;
    Fragment x[2], dx[2], z[2];
    u32 dpooled = 0;
    {
        const int next = chunk * CHUNK + 2 * group + warp / 2 % 2;
        const int known = next < end ? next : end - 1;
        copy_rows<LAST>(mine, s, m, known, block, row, next < end);
        if (FIRST && l.lane == 0) {
            copy_word(mine + SAMPLE_IMAGE + half * 4, number_of(s, m, step, known), true);
            copy_word(mine + SAMPLE_KEY + half * 4, crop_key(s, m, step) + half, true);
        }
        load_inputs<LAST>(x, z, dpooled, s, (i64)m * s.batch + known, block, first, l.lane);
    }
    wait_copies();
    sync_block();

#pragma unroll 1
    for (int begin = chunk * CHUNK + 2 * group; begin < end; begin += SAMPLES) {
        // A sample past the end is the last one again with nothing kept: its gradients are zero.
        const bool there = begin + (int)(warp / 2 % 2) < end;
        const int n = there ? begin + warp / 2 % 2 : end - 1;
        const i64 sample = (i64)m * s.batch + n;
        const u32* kept = s.kept + (sample * KEPT + 3 * block) * MATRIX;
        if (n + SAMPLES < end) {
            constexpr int LINES = (LAST ? 4 : 3) * MATRIX / 32;
            const int line = half * 32 + l.lane;
            const u32* next = kept + (i64)SAMPLES * KEPT * MATRIX + line * 32;
#pragma unroll
            for (int i = 0; i < LINES; i += 64)
                if (line + i < LINES) prefetch(next + i * 32);
            if (!LAST && line < MATRIX / 32)
                prefetch(s.between + (sample + SAMPLES) * MATRIX + line * 32);
        }
        if (FIRST) prefetch_image(s, load_word(mine + SAMPLE_IMAGE + half * 4), l.lane);
        // Of two row tiles.
        u32 words[2][2];
        float factor[2][2];
        Tile c[2];

        float pooled[4][2];
        if (LAST) {
#pragma unroll
            for (int k = 0; k < 8; ++k)
                pooled[k / 2][k % 2] =
                    as_float(shuffle_from(dpooled, 8 * (k / 2) + 2 * l.pair + k % 2));
        }
        // The MLP, 16 neurons at a time: x is its input, dx the gradient of its output.
        if (exists(first)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int tile = first + i;
                place_half(x[i], first, i), place_half(z[i], first, i);
                if (LAST) {
#pragma unroll
                    for (int k = 0; k < 4; ++k)
#pragma unroll
                        for (int e = 0; e < 4; ++e) c[i][k][e] = pooled[k][e % 2];
                    rows_of(factor[i], mine, LAST_FACTOR, tile, l);
                    rows_of(words[i], mine, LAST_MASK, tile, l);
                    layer_norm_backward(c[i], z[i], factor[i]);
                    to_operand(dx[i], c[i]);
                    drop(dx[i], words[i], l.pair);
                } else {
#pragma unroll
                    for (int k = 0; k < 8; ++k) dx[i][k / 4][k % 4] = there ? z[i][k / 4][k % 4] : 0u;
                }
                if (exists(tile)) {
                    put(mine + C_Y * COLUMN, tile, x[i], l, trash);
                    put(mine + C_DOUT * COLUMN, tile, dx[i], l, trash);
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) clear(c[i][k]);
            }
#pragma unroll
            for (int f = 0; f < F / 16; ++f) {
                float h[2][2][4], dh[2][2][4];  // [8 neurons][tile]
                u32 b[4];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float bias[4];
                    load_columns(bias, base + B_BIAS, 16 * f + 8 * k + 2 * l.pair);
                    project(h[k], x, base + S_A + (2 * f + k) * (D / 8) * BLOCK, bias, l);
                    load_matrices(b, base + S_B + (2 * f + k) * BLOCK + l.line(F / 8 * BLOCK));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        clear(dh[k][i]);
                        add_product(dh[k][i], dx[i][0], b[0], b[1]);
                        add_product(dh[k][i], dx[i][1], b[2], b[3]);
                    }
                }
                u32 d[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32 out[4];
                    to_positive(out, h[0][i], h[1][i], 2);
                    to_operand(d[i], dh[0][i], dh[1][i]);
#pragma unroll
                    for (int k = 0; k < 4; ++k) d[i][k] &= positive(out[k]);
                    if (exists(first + i)) {
                        put(mine + C_H * COLUMN, 2 * f, first + i, out, l, trash);
                        put(mine + C_DH * COLUMN, 2 * f, first + i, d[i], l, trash);
                    }
                }
#pragma unroll
                for (int k = 0; k < 4; k += 2) {
                    load_matrices(b, base + S_A + (2 * f * (D / 8) + k) * BLOCK +
                                         l.grid(D / 8 * BLOCK, BLOCK));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        add_product(c[i][k], d[i], b[0], b[1]);
                        add_product(c[i][k + 1], d[i], b[2], b[3]);
                    }
                }
            }
            // Through the LayerNorm and dropout to the output of the attention.
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                rows_of(factor[i], mine, Y_FACTOR, first + i, l);
                rows_of(words[i], mine, Y_MASK, first + i, l);
                layer_norm_backward(c[i], x[i], factor[i]);
                to_operand(dx[i], c[i]);
                drop(dx[i], words[i], l.pair);
                load_tile(x[i], kept + MATRIX, first, i, l.lane);
                load_tile(z[i], kept, first, i, l.lane);
            }
        }
        sync_some(1 + group, 128);
        // Both halves of W_B have the bias's gradient; that of the first is used.
        add_samples<true>(mlp_part, mlp_sums,
                          samples + (part < 2 ? C_DH + 4 * part : (u32)C_DOUT) * COLUMN,
                          samples + (part < 2 ? (u32)C_Y : C_H + 4 * (part - 2)) * COLUMN, l);
        sync_some(1 + group, 128);

        // The output projection; then q, k and v again from the block's input.
        if (exists(first)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                place_half(x[i], first, i), place_half(z[i], first, i);
                if (exists(first + i)) {
                    put(mine + C_A * COLUMN, first + i, x[i], l, trash);
                    put(mine + C_DY * COLUMN, first + i, dx[i], l, trash);
                }
            }
#pragma unroll
            for (int head = 0; head < HEADS; ++head) {
                float da[2][2][4], delta[2][2] = {};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    u32 b[4];
                    load_matrices(b, base + S_O + (2 * head + k) * BLOCK + l.line(D / 8 * BLOCK));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        clear(da[k][i]);
                        add_product(da[k][i], dx[i][0], b[0], b[1]);
                        add_product(da[k][i], dx[i][1], b[2], b[3]);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            u32 a = x[i][head][2 * k + e / 2];
                            delta[i][e / 2] += da[k][i][e] * (e % 2 ? high_half(a) : low_half(a));
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32 out[4];
                    to_operand(out, da[0][i], da[1][i]);
                    if (exists(first + i))
                        put(mine + C_DA * COLUMN, 2 * head, first + i, out, l, trash);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float along = quad_sum(delta[i][r]);
                        const int token = 16 * (first + i) + l.row + 8 * r;
                        if (l.pair == 0 && token < PADDED)
                            store_float(query_stat(mine, head, token) + 8, -along);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (exists(first + i)) put(mine + C_Z * COLUMN, first + i, z[i], l, trash);
            project_qkv(z, base + S_QKV, mine + C_QKV * COLUMN, first, 2, l, trash);
        }
        sync_some(1 + GROUPS + warp / 2, 64);
        attention_backward(mine, half, trash, l);
        sync_some(1 + GROUPS + warp / 2, 64);

        // The projections to q, k and v, LayerNorm and dropout.
        if (exists(first)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int k = 0; k < 4; ++k) clear(c[i][k]);
            }
            const int second = exists(first + 1) ? first + 1 : first;
#pragma unroll
            for (int o = 0; o < 3 * D / 16; ++o) {
                u32 a[2][4], b[4];
                u32 at = mine + (C_QKV + 2 * o) * COLUMN + l.rows_first;
                load_matrices(a[0], at + 2 * first * BLOCK);
                load_matrices(a[1], at + 2 * second * BLOCK);
#pragma unroll
                for (int k = 0; k < 4; k += 2) {
                    load_matrices(b, base + S_QKV + (2 * o * (D / 8) + k) * BLOCK +
                                         l.grid(D / 8 * BLOCK, BLOCK));
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        add_product(c[i][k], a[i], b[0], b[1]);
                        add_product(c[i][k + 1], a[i], b[2], b[3]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                get(x[i], mine + C_Z * COLUMN, i ? second : first, l);
                rows_of(factor[i], mine, Z_FACTOR, first + i, l);
                rows_of(words[i], mine, Z_MASK, first + i, l);
                layer_norm_backward(c[i], x[i], factor[i]);
                to_operand(dx[i], c[i]);
                drop(dx[i], words[i], l.pair);
                if (!FIRST && there) keep_tile(s.between + sample * MATRIX, dx[i], first, i, l.lane);
            }
        }
        u32 image = mine + C_IMAGE * COLUMN;
        if (FIRST) {
            const int number = load_word(mine + SAMPLE_IMAGE + half * 4);
            image += copy_image(image, s, number, row, 64);
            image += crop_of(s, n, load_word(mine + SAMPLE_KEY), load_word(mine + SAMPLE_KEY + 4));
        }
        {
            const int next = begin + SAMPLES + warp / 2 % 2, known = next < end ? next : end - 1;
            sync_warp();
            copy_rows<LAST>(mine, s, m, known, block, row, next < end);
            if (FIRST && l.lane == 0)
                copy_word(mine + SAMPLE_IMAGE + half * 4, number_of(s, m, step, known), true);
            load_inputs<LAST>(x, z, dpooled, s, (i64)m * s.batch + known, block, first, l.lane);
        }
        sync_some(1 + group, 128);
        {
            Part sum;
#pragma unroll
            for (int i = 0; i < 8; ++i) load_four(sum[i / 4][i % 4], sums + i * 512);
            add_samples<false>(sum, mlp_sums, samples + (part < 3 ? C_QKV + 4 * part : C_DY) * COLUMN,
                               samples + (part < 3 ? C_Z : C_A) * COLUMN, l);
#pragma unroll
            for (int i = 0; i < 8; ++i) store_four(sums + i * 512, sum[i / 4][i % 4]);
        }
        wait_copies();
        sync_some(1 + group, 128);

        // The embedding: each warp adds 16 columns of its own sample.
        if (FIRST) {
            u32 patch[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                patches(patch[i], s, image, base + B_TABLE, first + i, 2, l);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (exists(first + i)) {
                    put(mine + C_PATCHES * COLUMN, 0, first + i, patch[i], l, trash);
                    put(mine + C_DX * COLUMN, first + i, dx[i], l, trash);
                }
            sync_some(1 + GROUPS + warp / 2, 64);
            const u32 from = mine + C_PATCHES * COLUMN, to = mine + (C_DX + 2 * half) * COLUMN;
            u32 a[4], b[4];
#pragma unroll
            for (int k = 0; k < HALVES; ++k) {
                load_transposed(a, to + 2 * k * BLOCK + l.grid(COLUMN, BLOCK));
                load_transposed(b, from + 2 * k * BLOCK + l.grid(BLOCK, COLUMN));
                add_product(embedding[0], a, b[0], b[1]);
                add_product(embedding[1], a, b[2], b[3]);
                add_product(embedding_sum, a, ONES, ONES);
            }
            if (ODD) {
                const u32 at = (ROWS - 1) * BLOCK;
                load_transposed(a, to + at + l.grid(COLUMN, 0));
                load_transposed(b, from + at + l.grid(0, COLUMN));
                mma_half(embedding[0], a[0], a[1], b[0]);
                mma_half(embedding[1], a[0], a[1], b[2]);
                mma_half(embedding_sum, a[0], a[1], ONES);
            }
            sync_some(1 + GROUPS + warp / 2, 64);
        }
    }

    // The sum of the groups' parts in a fixed order: of the first phase, their sums over rows, and
    // those of the embedding, after the ones of the second phase in shared memory.
    constexpr int ALL = 4 * GROUPS * PART;
    const u32 mlp_at = base + B_SAMPLES, bias_at = mlp_at + ALL, patch_at = bias_at + 32 * 16 * GROUPS;
    sync_block();
#pragma unroll
    for (int i = 0; i < 8; ++i)
        store_four(mlp_at + (group * 4 + part) * PART + i * 512 + l.contiguous, mlp_part[i / 4][i % 4]);
    if (l.pair == 0) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                store_float(bias_at + ((group * 4 + part) * 32 + 16 * n + 8 * r + l.row) * 4,
                            mlp_sums[n][2 * r]);
    }
    if (FIRST) {
#pragma unroll
        for (int n = 0; n < 3; ++n)
            store_four(patch_at + (warp * 3 + n) * 512 + l.contiguous,
                       n < 2 ? embedding[n] : embedding_sum);
    }
    sync_block();
    float* out = s.gradients + ((i64)chunk * s.networks + m) * WEIGHTS;
    float* to = out + FIRST_BLOCK + block * BLOCK_WEIGHTS;
    // Four numbers of a part at a time: two inputs, each of two outputs.
    for (u32 i = thread(); i < 2 * 4 * 256; i += BACKWARD_THREADS) {
        const u32 p = i / 256 % 4, block_of_part = i / 32 % 8, lane = i % 32;
        const u32 at = (i < 1024 ? mlp_at : base + B_SUMS) + p * PART + i % 256 * 16;
        float sum[4] = {};
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            float more[4];
            load_four(more, at + g * 4 * PART);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += more[e];
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const u32 output = block_of_part / 4 * 16 + lane / 4 + e / 2 * 8;
            const u32 input = block_of_part % 4 * 8 + lane % 4 * 2 + e % 2;
            if (i < 1024 && p < 2)
                to[W_A + input * F + 32 * p + output] = sum[e];
            else if (i < 1024)
                to[W_B + (32 * (p - 2) + input) * D + output] = sum[e];
            else if (p < 3)
                to[W_QKV + input * 3 * D + 32 * p + output] = p == 0 ? sum[e] * FACTOR : sum[e];
            else
                to[W_O + input * D + output] = sum[e];
        }
    }
    for (u32 i = thread(); i < F + D; i += BACKWARD_THREADS) {
        float sum = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) sum += load_float(bias_at + (g * 128 + i) * 4);
        to[i < F ? B_A + i : B_B + i - F] = sum;
    }
    if (FIRST) {
        for (u32 i = thread(); i < (PATCH + 1) * D; i += BACKWARD_THREADS) {
            // Outputs 0 to 15 are those of even warps; the bias follows 16 inputs.
            const u32 row = i / D < PATCH ? i / D : 16, column = i % D;
            const u32 at = patch_at + column / 16 * 1536 + entry_of(column % 16, row);
            float sum = 0;
            for (int n = 0; n < SAMPLES; ++n) sum += load_float(at + n * 2 * 1536);
            out[i] = sum;
        }
    }
}

KERNEL(forward, THREADS) { forward_samples(s); }
KERNEL(backward_first, BACKWARD_THREADS) { backward_samples<true, BLOCKS == 1>(s); }
KERNEL(backward_middle, BACKWARD_THREADS) { backward_samples<false, false>(s); }
KERNEL(backward_last, BACKWARD_THREADS) { backward_samples<BLOCKS == 1, true>(s); }
