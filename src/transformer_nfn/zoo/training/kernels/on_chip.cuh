// What on_chip.cu needs from the GPU, as inline PTX; emulation.h of the tests has the same functions
// for a CPU. No headers, so that NVRTC compiles it alone.

typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

#define DEV __device__ __forceinline__
// A kernel of one argument `s`; one block of threads per multiprocessor.
#define KERNEL(name, threads) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Step s)

extern __shared__ __align__(128) u8 shared_memory[];

DEV u32 shared_base() { return (u32)__cvta_generic_to_shared(shared_memory); }
DEV int thread() { return threadIdx.x; }
// The shuffle tells the compiler that all lanes have the same number.
DEV int warp_number() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
DEV int network_of_block() { return blockIdx.x; }
DEV int chunk_of_block() { return blockIdx.y; }

DEV void sync_block() { __syncthreads(); }
DEV void sync_warp() { __syncwarp(); }
DEV void sync_some(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEV float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEV u32 shuffle_from(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
DEV bool all_lanes(bool x) { return __all_sync(0xffffffffu, x); }

// A register whose content does not matter.
DEV u32 unused() {
    u32 x;
    asm volatile("" : "=r"(x));
    return x;
}

// Two floats rounded to bf16, the first in the low half.
DEV u32 pack(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// The same of max(x, 0).
DEV u32 pack_positive(float low, float high) {
    u32 out;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// All bits of a half that is above zero.
DEV u32 positive(u32 x) {
    u32 out;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(0));
    return out;
}
// Bytes 0 to 3 of `low` and 4 to 7 of `high`, chosen by the nibbles of `choice`; a nibble of 8 or
// more gives the sign of that byte in all bits.
DEV u32 permuted(u32 low, u32 high, u32 choice) {
    u32 out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(choice));
    return out;
}
DEV float as_float(u32 x) { return __uint_as_float(x); }
DEV float low_half(u32 x) { return __uint_as_float(x << 16); }
DEV float high_half(u32 x) { return __uint_as_float(x & 0xffff0000u); }

DEV float exp2_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEV float log2_of(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEV float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEV float reciprocal_root(float x) {
    float out;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// c = a·b + c0: a 16×16, b 16×8, c 16×8.
DEV void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c0)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%11,%12,%13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0[0]), "f"(c0[1]),
          "f"(c0[2]), "f"(c0[3]));
}
DEV void add_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// c += a·b: a 16×8, b 8×8.
DEV void mma_half(float (&c)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// Four 8×8 matrices of 16-bit numbers; lane l holds the address of row l % 8 of matrix l / 8.
DEV void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEV void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
DEV void store_matrices(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
DEV void store_transposed(u32 at, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// Two matrices; lanes 0 to 15 hold the addresses.
DEV void store_two_matrices(u32 at, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(a),
                 "r"(b)
                 : "memory");
}
DEV u32 transposed(u32 x) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
    return out;
}

DEV void store_word(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
DEV void store_float(u32 at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
DEV float load_float(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
DEV u32 load_word(u32 at) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
DEV u32 load_byte(u32 at) {
    u32 x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
DEV void load_two(float (&x)[2], u32 at) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(at) : "memory");
}

DEV void load_four(float (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(at)
                 : "memory");
}
DEV void store_four(u32 at, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}

// Four words in device memory, at a multiple of 16 bytes. They are used once, so that L1, of which
// shared memory leaves little, need not keep them.
DEV void load_words(u32 (&x)[4], const u32* at) {
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(at)
                 : "memory");
}
DEV void store_words(u32* at, const u32 (&x)[4]) {
    asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}
// A word or 16 bytes from device to shared memory, there after `wait_copies`; 0 if not `there`.
DEV void copy_word(u32 to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 4 : 0)
                 : "memory");
}
DEV void copy_vector(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEV void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEV void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
