// The functions of on_chip.cuh on a CPU, to test on_chip.cu without a GPU.
//
// Every thread of a block is a fiber. An operation of a whole warp stops each lane until all 32
// have arrived, and the last one computes the results; a barrier stops whole warps. So lanes run in
// lockstep from one such operation to the next, and a result depends on no timing.

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

// Compiling takes longer than running: the kernels themselves are compiled without optimisation.
#pragma GCC push_options
#pragma GCC optimize("O2")

typedef uint32_t u32;
typedef unsigned char u8;
typedef long long i64;

#define DEV inline
#define KERNEL(name, threads)                                                 \
    static void name(Step s);                                                 \
    extern "C" void launch_##name(int grid_x, int grid_y, const Step* s) {    \
        emulation::launch<Step, name>(grid_x, grid_y, threads, *s);           \
    }                                                                         \
    static void name(Step s)

namespace emulation {

constexpr int LANES = 32, MOST_WARPS = 32, STACK = 1 << 16, SHARED = 230400, BARRIERS = 16;

struct Lane {
    jmp_buf place;
    bool started, done;
    u32 in[12], out[4];
};
struct Warp {
    Lane lanes[LANES];
    int arrived, at;  // lanes that have arrived, and the lane to resume
    unsigned generation;
    bool blocked, done;
};

struct Copies {
    int count;
    u32 to[16];
    const void* from[16];
    int bytes[16];
};

static Warp warps[MOST_WARPS];
static Copies copies[MOST_WARPS * LANES];
static u8 stacks[MOST_WARPS * LANES][STACK];
static ucontext_t main_context, start_context;
static jmp_buf main_place;
static u8 shared[SHARED];
static int threads, warp_now, lane_now, block_x, block_y, waiting[BARRIERS], at_barrier[MOST_WARPS];
static void (*body)(const void*);
static const void* argument;

static Lane& me() { return warps[warp_now].lanes[lane_now]; }

static void fail(const char* what) {
    std::fprintf(stderr, "emulation: %s\n", what);
    std::abort();
}

static void entry();

// Continue another lane, which starts if it has not yet.
__attribute__((noinline)) static void resume(int warp, int lane) {
    warp_now = warp;
    lane_now = lane;
    warps[warp].at = lane;
    Lane& to = me();
    if (to.started) _longjmp(to.place, 1);
    to.started = true;
    getcontext(&start_context);
    start_context.uc_stack.ss_sp = stacks[warp * LANES + lane];
    start_context.uc_stack.ss_size = STACK;
    start_context.uc_link = nullptr;
    makecontext(&start_context, entry, 0);
    setcontext(&start_context);
}

__attribute__((noinline)) static void leave(int warp, int lane) {
    if (_setjmp(me().place) == 0) resume(warp, lane);
}

// The next warp that can run, or the end of the block.
static void next_warp() {
    int count = threads / LANES;
    for (int i = 1; i <= count; ++i) {
        int warp = (warp_now + i) % count;
        if (!warps[warp].done && !warps[warp].blocked) resume(warp, warps[warp].at);
    }
    for (int i = 0; i < count; ++i)
        if (!warps[i].done) fail("warps wait at a barrier that others never reach");
    _longjmp(main_place, 1);
}

static void entry() {
    body(argument);
    Warp& warp = warps[warp_now];
    me().done = true;
    if (warp.arrived) fail("a lane ended while others wait for it");
    for (int i = 1; i < LANES; ++i) {
        int lane = (lane_now + i) % LANES;
        if (!warp.lanes[lane].done) resume(warp_now, lane);
    }
    warp.done = true;
    next_warp();
}

__attribute__((noinline)) static void leave_warp() {
    if (_setjmp(me().place) == 0) next_warp();
}

// Wait for all lanes of the warp; the last one calls `operation` on them.
template <typename Operation>
static void together(Operation operation) {
    Warp& warp = warps[warp_now];
    if (++warp.arrived == LANES) {
        warp.arrived = 0;
        operation(warp.lanes);
        ++warp.generation;
        return;
    }
    unsigned generation = warp.generation;
    while (warp.generation == generation) leave(warp_now, (lane_now + 1) % LANES);
}

static void barrier(int id, int count) {
    together([=](Lane*) {
        waiting[id] += LANES;
        at_barrier[warp_now] = id;
        if (waiting[id] == count) {
            waiting[id] = 0;
            for (int i = 0; i < threads / LANES; ++i)
                if (at_barrier[i] == id) warps[i].blocked = false, at_barrier[i] = -1;
            return;
        }
        warps[warp_now].blocked = true;
        leave_warp();
    });
}

static float to_float(u32 bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static u32 to_bits(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static u32 bf16(float x) {
    u32 bits = to_bits(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float half_of(u32 pair, int high) { return to_float(high ? pair & 0xffff0000u : pair << 16); }
static u8* shared_at(u32 at) {
    if (at >= SHARED) fail("address outside shared memory");
    return shared + at;
}

// c = a·b + c for 16×(8·halves) and (8·halves)×8, as the tensor cores place the entries on lanes.
static void multiply(Lane* lanes, int halves) {
    static float a[16][16], b[16][8];
    for (int lane = 0; lane < LANES; ++lane) {
        int g = lane / 4, t = lane % 4;
        const u32* in = lanes[lane].in;
        for (int half = 0; half < halves; ++half)
            for (int e = 0; e < 2; ++e) {
                a[g][8 * half + 2 * t + e] = half_of(in[2 * half], e);
                a[g + 8][8 * half + 2 * t + e] = half_of(in[2 * half + 1], e);
                b[8 * half + 2 * t + e][g] = half_of(in[4 + half], e);
            }
    }
    for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            float sum = 0;
            for (int k = 0; k < 8 * halves; ++k) sum += a[row][k] * b[k][column];
            lanes[lane].out[i] = to_bits(sum + to_float(lanes[lane].in[6 + i]));
        }
}

static void matrices(Lane* lanes, int count, bool store, bool transpose) {
    for (int matrix = 0; matrix < count; ++matrix)
        for (int lane = 0; lane < LANES; ++lane)
            for (int e = 0; e < 2; ++e) {
                int row = lane / 4, column = 2 * (lane % 4) + e;
                if (transpose) {
                    int swapped = row;
                    row = column;
                    column = swapped;
                }
                u32 at = lanes[8 * matrix + row].in[0];
                if (at % 16) fail("row of a matrix not at a multiple of 16 bytes");
                uint16_t* entry = reinterpret_cast<uint16_t*>(shared_at(at)) + column;
                if (store)
                    *entry = static_cast<uint16_t>(lanes[lane].in[1 + matrix] >> (16 * e));
                else
                    lanes[lane].out[matrix] =
                        (e ? lanes[lane].out[matrix] : 0) | (u32(*entry) << (16 * e));
            }
}

template <typename Argument, void (*kernel)(Argument)>
static void launch(int grid_x, int grid_y, int thread_count, const Argument& value) {
    threads = thread_count;
    argument = &value;
    body = [](const void* at) { kernel(*static_cast<const Argument*>(at)); };
    for (block_y = 0; block_y < grid_y; ++block_y)
        for (block_x = 0; block_x < grid_x; ++block_x) {
            std::memset(warps, 0, sizeof warps);
            std::memset(shared, 0xff, sizeof shared);  // NaN, so that unwritten numbers show
            for (int i = 0; i < MOST_WARPS; ++i) at_barrier[i] = -1;
            if (_setjmp(main_place) == 0) resume(0, 0);
        }
}

}  // namespace emulation

DEV u32 shared_base() { return 0; }
DEV int thread() { return emulation::warp_now * emulation::LANES + emulation::lane_now; }
DEV int warp_number() { return emulation::warp_now; }
DEV int network_of_block() { return emulation::block_x; }
DEV int chunk_of_block() { return emulation::block_y; }

DEV void sync_block() { emulation::barrier(0, emulation::threads); }
DEV void sync_warp() {
    emulation::together([](emulation::Lane*) {});
}
DEV void sync_some(int barrier, int threads) { emulation::barrier(barrier, threads); }

DEV float shuffle_xor(float x, int mask) {
    emulation::me().in[0] = emulation::to_bits(x);
    emulation::together([mask](emulation::Lane* lanes) {
        for (int i = 0; i < emulation::LANES; ++i) lanes[i].out[0] = lanes[i ^ mask].in[0];
    });
    return emulation::to_float(emulation::me().out[0]);
}
DEV u32 shuffle_from(u32 x, int lane) {
    emulation::me().in[0] = x;
    emulation::me().in[1] = static_cast<u32>(lane);
    emulation::together([](emulation::Lane* lanes) {
        for (int i = 0; i < emulation::LANES; ++i) lanes[i].out[0] = lanes[lanes[i].in[1]].in[0];
    });
    return emulation::me().out[0];
}
DEV bool all_lanes(bool x) {
    emulation::me().in[0] = x;
    emulation::together([](emulation::Lane* lanes) {
        u32 all = 1;
        for (int i = 0; i < emulation::LANES; ++i) all &= lanes[i].in[0];
        for (int i = 0; i < emulation::LANES; ++i) lanes[i].out[0] = all;
    });
    return emulation::me().out[0];
}

DEV u32 unused() { return 0x7fff7fff; }  // NaN

DEV u32 pack(float low, float high) {
    return emulation::bf16(low) | (emulation::bf16(high) << 16);
}
DEV u32 pack_positive(float low, float high) {
    return pack(std::fmax(low, 0.0f), std::fmax(high, 0.0f));
}
DEV u32 positive(u32 x) {
    u32 low = emulation::half_of(x, 0) > 0 ? 0xffffu : 0u;
    return low | (emulation::half_of(x, 1) > 0 ? 0xffff0000u : 0u);
}
DEV u32 permuted(u32 low, u32 high, u32 choice) {
    uint64_t bytes = (uint64_t(high) << 32) | low;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) {
        u32 nibble = (choice >> (4 * i)) & 15, byte = (bytes >> (8 * (nibble & 7))) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        out |= byte << (8 * i);
    }
    return out;
}
DEV float as_float(u32 x) { return emulation::to_float(x); }
DEV float low_half(u32 x) { return emulation::half_of(x, 0); }
DEV float high_half(u32 x) { return emulation::half_of(x, 1); }
DEV float exp2_of(float x) { return std::exp2(x); }
DEV float log2_of(float x) { return std::log2(x); }
DEV float reciprocal(float x) { return 1 / x; }
DEV float reciprocal_root(float x) { return 1 / std::sqrt(x); }

DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c0)[4]) {
    emulation::Lane& lane = emulation::me();
    u32 in[6] = {a[0], a[1], a[2], a[3], b0, b1};
    std::memcpy(lane.in, in, sizeof in);
    std::memcpy(lane.in + 6, c0, sizeof c0);
    emulation::together([](emulation::Lane* lanes) { emulation::multiply(lanes, 2); });
    std::memcpy(c, lane.out, sizeof c);
}
DEV void add_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(c, a, b0, b1, c); }
DEV void mma_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    emulation::Lane& lane = emulation::me();
    u32 in[6] = {a0, a1, 0, 0, b0, 0};
    std::memcpy(lane.in, in, sizeof in);
    std::memcpy(lane.in + 6, c, sizeof c);
    emulation::together([](emulation::Lane* lanes) { emulation::multiply(lanes, 1); });
    std::memcpy(c, lane.out, sizeof c);
}

template <bool STORE, bool TRANSPOSE, int COUNT = 4>
static inline void move_matrices(u32 (&r)[4], u32 at) {
    emulation::Lane& lane = emulation::me();
    lane.in[0] = at;
    std::memcpy(lane.in + 1, r, sizeof r);
    emulation::together(
        [](emulation::Lane* lanes) { emulation::matrices(lanes, COUNT, STORE, TRANSPOSE); });
    if (!STORE) std::memcpy(r, lane.out, sizeof r);
}
DEV void load_matrices(u32 (&r)[4], u32 at) { move_matrices<false, false>(r, at); }
DEV void load_transposed(u32 (&r)[4], u32 at) { move_matrices<false, true>(r, at); }
DEV void store_matrices(u32 at, const u32 (&r)[4]) {
    u32 copy[4] = {r[0], r[1], r[2], r[3]};
    move_matrices<true, false>(copy, at);
}
DEV void store_transposed(u32 at, const u32 (&r)[4]) {
    u32 copy[4] = {r[0], r[1], r[2], r[3]};
    move_matrices<true, true>(copy, at);
}
DEV void store_two_matrices(u32 at, u32 a, u32 b) {
    u32 copy[4] = {a, b};
    move_matrices<true, false, 2>(copy, at);
}
DEV u32 transposed(u32 x) {
    emulation::me().in[0] = x;
    emulation::together([](emulation::Lane* lanes) {
        for (int lane = 0; lane < emulation::LANES; ++lane) {
            lanes[lane].out[0] = 0;
            for (int e = 0; e < 2; ++e) {
                int row = 2 * (lane % 4) + e, column = lane / 4;
                u32 pair = lanes[4 * row + column / 2].in[0];
                lanes[lane].out[0] |= ((pair >> (16 * (column % 2))) & 0xffff) << (16 * e);
            }
        }
    });
    return emulation::me().out[0];
}

DEV void store_word(u32 at, u32 x) { std::memcpy(emulation::shared_at(at), &x, 4); }
DEV void store_float(u32 at, float x) { std::memcpy(emulation::shared_at(at), &x, 4); }
DEV float load_float(u32 at) {
    float x;
    std::memcpy(&x, emulation::shared_at(at), 4);
    return x;
}
DEV u32 load_word(u32 at) { return emulation::to_bits(load_float(at)); }
DEV u32 load_byte(u32 at) { return *emulation::shared_at(at); }
DEV void load_two(float (&x)[2], u32 at) { std::memcpy(x, emulation::shared_at(at), 8); }

DEV void load_four(float (&x)[4], u32 at) { std::memcpy(x, emulation::shared_at(at), 16); }
DEV void store_four(u32 at, const float (&x)[4]) { std::memcpy(emulation::shared_at(at), x, 16); }

DEV void load_words(u32 (&x)[4], const u32* at) {
    if (reinterpret_cast<uintptr_t>(at) % 16) emulation::fail("words not at a multiple of 16 bytes");
    std::memcpy(x, at, 16);
}
DEV void store_words(u32* at, const u32 (&x)[4]) {
    if (reinterpret_cast<uintptr_t>(at) % 16) emulation::fail("words not at a multiple of 16 bytes");
    std::memcpy(at, x, 16);
}
// As late as can be: when the thread waits.
static inline void copy_bytes(u32 to, const void* from, int bytes) {
    emulation::Copies& copies = emulation::copies[thread()];
    if (copies.count == 16) emulation::fail("too many copies");
    if (to % bytes || reinterpret_cast<uintptr_t>(from) % bytes) emulation::fail("copy not aligned");
    copies.to[copies.count] = to;
    copies.from[copies.count] = from;
    copies.bytes[copies.count++] = bytes;
}
DEV void copy_word(u32 to, const void* from, bool there) { copy_bytes(to, there ? from : nullptr, 4); }
DEV void copy_vector(u32 to, const void* from) { copy_bytes(to, from, 16); }
DEV void wait_copies() {
    emulation::Copies& copies = emulation::copies[thread()];
    for (int i = 0; i < copies.count; ++i) {
        u8* to = emulation::shared_at(copies.to[i]);
        if (copies.from[i])
            std::memcpy(to, copies.from[i], copies.bytes[i]);
        else
            std::memset(to, 0, copies.bytes[i]);
    }
    copies.count = 0;
}
DEV void prefetch(const void*) {}

#pragma GCC pop_options
