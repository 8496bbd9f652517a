// Products of a few rows with kernels of 4 to 8 bits, as a custom call of XLA on CPU.
//
// A weight is (code - offset) * scale + minimum. The codes of one output are adjacent, so a thread reads its outputs as
// one stream, decodes some weights at a time in registers, and multiplies them with all rows before it reads on. XLA's
// own fusions do not keep several sums in registers, and decode weights one by one when they add up inputs.
//
// Layouts are those of `GgmlBlocks` in blocks.py with `by_group`.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#ifdef __AVX512F__
constexpr int kWidest = 16;
#else
constexpr int kWidest = 8;
#endif

template <int kValue>
using Number = std::integral_constant<int, kValue>;

#define DECODAX_INLINE __attribute__((always_inline))

// Calls `body` with Number<0>(), Number<1>() and so on. Sums stay in registers only in loops that are unrolled.
template <int... kValues, typename Body>
DECODAX_INLINE inline void Unrolled(std::integer_sequence<int, kValues...>, const Body& body) {
  (body(Number<kValues>()), ...);
}

template <int kCount, typename Body>
DECODAX_INLINE inline void Unrolled(const Body& body) {
  Unrolled(std::make_integer_sequence<int, kCount>(), body);
}

// Vectors of L numbers.
template <int L>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * L)));
  typedef int32_t Ints __attribute__((vector_size(4 * L)));
  typedef uint8_t Bytes __attribute__((vector_size(L)));
  typedef int8_t SignedBytes __attribute__((vector_size(L)));
};

template <typename T>
inline T Load(const void* at) {
  T made;
  std::memcpy(&made, at, sizeof made);
  return made;
}

// Widens L bytes, which are signed or not. Compilers find the instructions for it only in part.
template <int L, bool kSigned>
inline typename Vector<L>::Ints Codes(const void* at) {
  typedef Vector<L> V;
#ifdef __AVX512F__
  if constexpr (L == 16) {
    const __m128i v = Load<__m128i>(at);
    return (typename V::Ints)(kSigned ? _mm512_cvtepi8_epi32(v) : _mm512_cvtepu8_epi32(v));
  }
#endif
#ifdef __AVX2__
  if constexpr (L == 8) {
    const __m128i v = _mm_cvtsi64_si128(Load<int64_t>(at));
    return (typename V::Ints)(kSigned ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
  }
#endif
  typedef std::conditional_t<kSigned, typename V::SignedBytes, typename V::Bytes> Bytes;
  return __builtin_convertvector(Load<Bytes>(at), typename V::Ints);
}

// Returns `v >> width * (first + i)` for the i-th number.
template <int L>
inline typename Vector<L>::Ints Shifted(uint32_t v, int first, int width) {
  typename Vector<L>::Ints places;
  for (int i = 0; i < L; ++i) places[i] = width * (first + i);
  return (typename Vector<L>::Ints{} + static_cast<int32_t>(v)) >> places;
}

// Adds up a vector: half to half, which does not depend on the number of rows or outputs.
inline float Sum(const float* v, Number<1>) { return v[0]; }

template <int L>
inline float Sum(const float* v, Number<L>) {
  float half[L / 2];
  for (int i = 0; i < L / 2; ++i) half[i] = v[i] + v[i + L / 2];
  return Sum(half, Number<L / 2>());
}

inline float Half(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = static_cast<uint32_t>(bits & 0x7fff) << 13;
  float made = Load<float>(&rest) * 0x1p112f;
  uint32_t found = Load<uint32_t>(&made);
  if ((bits & 0x7c00) == 0x7c00) found = 0x7f800000u | rest;      // infinity and NaN
  found |= sign;
  return Load<float>(&found);
#endif
}

struct Kernel {
  const uint8_t* codes;
  const void* scales;
  const void* minima;             // or null
  const uint32_t* high;           // or null
  const uint8_t* steps;           // or null
  const uint8_t* minimum_steps;   // or null
  int64_t groups, shared;         // number of groups of an output, and of its scales
  float offset;
  bool wide, is_signed;           // scales have 32 bits; steps may be negative
};

// Reads `count` numbers of 16 or 32 bits.
inline void Numbers(const void* of, bool wide, int64_t first, int64_t count, float* made) {
  if (wide) {
    std::memcpy(made, static_cast<const float*>(of) + first, count * sizeof *made);
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(of) + first;
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(made + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
#endif
  for (; i < count; ++i) made[i] = Half(halves[i]);
}

constexpr int kChunk = 64;      // groups whose scales are converted at a time
constexpr int kAhead = 8;       // outputs; 8 fetch SmolLM2's head in 0.54 of the time without, 16 in 1.0 of it

// Sets the scale of each of `count` groups of output n from group `first` on.
inline void Scales(const Kernel& k, const void* of, const uint8_t* steps, bool is_signed, int64_t n, int64_t first,
                   int64_t count, float* made) {
  const int64_t per = k.groups / k.shared;
  if (per == 1) {
    Numbers(of, k.wide, n * k.shared + first, count, made);
  } else {
    for (int64_t i = 0, s = first / per; i < count; ++s) {
      float own;
      Numbers(of, k.wide, n * k.shared + s, 1, &own);
      for (int64_t end = (s + 1) * per - first; i < end && i < count; ++i) made[i] = own;
    }
  }
  if (steps == nullptr) return;
  steps += n * k.groups + first;
  if (is_signed) {
    for (int64_t i = 0; i < count; ++i) made[i] *= static_cast<float>(static_cast<int8_t>(steps[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) made[i] *= static_cast<float>(steps[i]);
  }
}

// Decodes group g of output n and hands L weights at a time to `use`, with the place of the first in the group.
template <int kGroup, int kBits, int L, typename Use>
DECODAX_INLINE inline void Decode(const Kernel& k, int64_t n, int64_t g, float scale, float low, const Use& use) {
  typedef typename Vector<L>::Floats Floats;
  constexpr int kBytes = kBits == 8 ? kGroup : kGroup / 2, kWidth = 32 / kGroup;
  const int64_t at = n * k.groups + g;
  const uint8_t* codes = k.codes + at * kBytes;
  __builtin_prefetch(codes + kAhead * k.groups * kBytes);
#define DECODAX_WEIGHTS(...) (__builtin_convertvector((__VA_ARGS__), Floats) * scale + low)
  if constexpr (kBits == 8) {
    Unrolled<kGroup / L>([&](auto i) DECODAX_INLINE {
      use(DECODAX_WEIGHTS(Codes<L, true>(codes + i * L)), i * L);
    });
  } else {
    Unrolled<kBytes / L>([&](auto i) DECODAX_INLINE {
      const int place = i * L;
      const auto both = Codes<L, false>(codes + place);
      auto first = both & 15, second = both >> 4;
      if constexpr (kBits > 4) {
        constexpr int kMask = (1 << kWidth) - 1;
        first |= (Shifted<L>(k.high[at], place, kWidth) & kMask) << 4;
        second |= (Shifted<L>(k.high[at], place + kBytes, kWidth) & kMask) << 4;
      }
      use(DECODAX_WEIGHTS(first), place);
      use(DECODAX_WEIGHTS(second), place + kBytes);
    });
  }
#undef DECODAX_WEIGHTS
}

// Multiplies R rows by the weights of O outputs from n on. The order of additions depends on neither number.
template <int kGroup, int kBits, int R, int O>
inline void Outputs(const Kernel& k, int64_t n, const float* x, int64_t stride, float* y, int64_t outputs) {
  constexpr int kMost = kBits == 8 ? kGroup : kGroup / 2, L = kMost < kWidest ? kMost : kWidest;
  typedef typename Vector<L>::Floats Floats;
  Floats sums[O][R];
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) sums[o][r] = Floats{};
  for (int64_t first = 0; first < k.groups; first += kChunk) {
    const int64_t count = k.groups - first < kChunk ? k.groups - first : kChunk;
    float scales[O][kChunk], lows[O][kChunk];
    for (int o = 0; o < O; ++o) {
      Scales(k, k.scales, k.steps, k.is_signed, n + o, first, count, scales[o]);
      if (k.minima) Scales(k, k.minima, k.minimum_steps, false, n + o, first, count, lows[o]);
      for (int64_t i = 0; i < count; ++i) lows[o][i] = (k.minima ? lows[o][i] : 0.f) - k.offset * scales[o][i];
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* at = x + (first + i) * kGroup;
      Unrolled<O>([&](auto o) DECODAX_INLINE {
        Decode<kGroup, kBits, L>(
            k, n + o, first + i, scales[o][i], lows[o][i], [&](const Floats& w, int place) DECODAX_INLINE {
              Unrolled<R>([&](auto r) DECODAX_INLINE { sums[o][r] += w * Load<Floats>(at + r * stride + place); });
            });
      });
    }
  }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float all[L];
      std::memcpy(all, &sums[o][r], sizeof all);
      y[r * outputs + n + o] = Sum(all, Number<L>());
    }
}

// Multiplies all rows by the outputs from `first` to `last`.
template <int kGroup, int kBits>
void Range(const Kernel& k, int64_t first, int64_t last, const float* x, int64_t rows, int64_t stride, float* y,
           int64_t outputs) {
  auto some = [&](auto count, auto together) {
    constexpr int R = decltype(count)::value, O = decltype(together)::value;
    int64_t n = first;
    for (; n + O <= last; n += O) Outputs<kGroup, kBits, R, O>(k, n, x, stride, y, outputs);
    for (; n < last; ++n) Outputs<kGroup, kBits, R, 1>(k, n, x, stride, y, outputs);
    x += R * stride;
    y += R * outputs;
    rows -= R;
  };
  while (rows >= 8) some(Number<8>(), Number<1>());
  while (rows >= 4) some(Number<4>(), Number<1>());
  while (rows >= 2) some(Number<2>(), Number<2>());
  while (rows >= 1) some(Number<1>(), Number<4>());
}

using Run = decltype(&Range<32, 4>);

Run Choose(int64_t group, int64_t bits) {
  if (group == 32 && bits == 4) return Range<32, 4>;
  if (group == 32 && bits == 5) return Range<32, 5>;
  if (group == 32 && bits == 8) return Range<32, 8>;
  if (group == 16 && bits == 6) return Range<16, 6>;
  return nullptr;
}

// Blocks of outputs that threads take in turn. A thread that comes late finds none and does not touch the arrays, so
// the call need not wait for it.
struct Work {
  Kernel kernel{};
  Run run = nullptr;
  const float* x = nullptr;
  float* y = nullptr;
  int64_t rows = 0, stride = 0, outputs = 0, block = 1, blocks = 0;
  std::atomic<int64_t> next{0}, done{0};

  void Take() {
    for (int64_t i = next++; i < blocks; i = next++) {
      const int64_t last = (i + 1) * block < outputs ? (i + 1) * block : outputs;
      run(kernel, i * block, last, x, rows, stride, y, outputs);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

constexpr int64_t kProducts = 1 << 16;      // of a block
constexpr auto kPatience = std::chrono::microseconds(50);

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The newest work, and the threads that help with it. To wake a thread takes longer than most products, so a helper
// stays for a while after its work and waits for the next.
class Board {
 public:
  void Post(ffi::ThreadPool& pool, const std::shared_ptr<Work>& work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      newest_ = work;
    }
    version_.fetch_add(1);
    const int64_t most = pool.num_threads() - 1;
    for (int64_t i = 1; i <= most && i < work->blocks && helpers_.load() < most; ++i) {
      helpers_.fetch_add(1);
      pool.Schedule([this] { Help(); });
    }
  }

 private:
  void Help() {
    uint64_t seen = 0;
    for (;;) {
      const auto until = std::chrono::steady_clock::now() + kPatience;
      uint64_t now;
      while ((now = version_.load()) == seen && std::chrono::steady_clock::now() < until) Pause();
      if (now == seen) {
        helpers_.fetch_sub(1);
        return;
      }
      seen = now;
      std::shared_ptr<Work> work;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        work = newest_;
      }
      work->Take();
    }
  }

  std::mutex mutex_;
  std::shared_ptr<Work> newest_;
  std::atomic<uint64_t> version_{0};
  std::atomic<int64_t> helpers_{0};
};

ffi::Error Matmul(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, int64_t group,
                  int64_t bits, int64_t offset, bool minima, bool high, bool steps, bool minimum_steps) {
  auto work = std::make_shared<Work>();
  work->run = Choose(group, bits);
  if (work->run == nullptr) return ffi::Error::InvalidArgument("no product for this group and number of bits");
  const size_t wanted = 3u + minima + high + steps + minimum_steps;
  if (args.size() != wanted) return ffi::Error::InvalidArgument("the number of arrays is not that of the flags");
  size_t count = 0;
  auto next = [&] { return *args.get<ffi::AnyBuffer>(count++); };
  const auto x = next(), codes = next(), scales = next();
  const auto xs = x.dimensions(), cs = codes.dimensions(), ss = scales.dimensions();
  if (xs.size() != 2 || cs.size() != 3 || ss.size() != 2 || xs[1] != cs[1] * group || ss[0] != cs[0] || ss[1] == 0 ||
      cs[1] % ss[1] || cs[2] != (bits == 8 ? group : group / 2) || x.element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("the shapes of rows, codes and scales do not fit");
  Kernel& k = work->kernel;
  k.codes = static_cast<const uint8_t*>(codes.untyped_data());
  k.scales = scales.untyped_data();
  k.wide = scales.element_type() == ffi::F32;
  if (minima) k.minima = next().untyped_data();
  if (high) k.high = static_cast<const uint32_t*>(next().untyped_data());
  if (steps) {
    const auto own = next();
    k.steps = static_cast<const uint8_t*>(own.untyped_data());
    k.is_signed = own.element_type() == ffi::S8;
  }
  if (minimum_steps) k.minimum_steps = static_cast<const uint8_t*>(next().untyped_data());
  k.offset = static_cast<float>(offset);
  k.groups = cs[1];
  k.shared = ss[1];
  work->x = static_cast<const float*>(x.untyped_data());
  work->y = static_cast<float*>(y->untyped_data());
  work->rows = xs[0];
  work->stride = xs[1];
  work->outputs = cs[0];
  work->block = (kProducts / (work->rows * work->stride + 1) + 4) / 4 * 4;
  work->blocks = (work->outputs + work->block - 1) / work->block;
  static Board* board = new Board;        // never destroyed: helpers may outlive the process's static objects
  if (work->blocks > 1) board->Post(pool, work);
  work->Take();
  while (work->done.load(std::memory_order_acquire) < work->blocks) Pause();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodaxMatmul, Matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("offset")
                                  .Attr<bool>("minima")
                                  .Attr<bool>("high")
                                  .Attr<bool>("steps")
                                  .Attr<bool>("minimum_steps"));
