// Products of a few rows with kernels of 4 to 8 bits, as a custom call of XLA on CPU.
//
// A weight is (code - offset) * scale + minimum. The codes of one output are adjacent, so a thread reads its outputs as
// one stream, decodes some weights at a time in registers, and multiplies them with all rows before it reads on. XLA's
// own fusions do not keep several sums in registers, and decode weights one by one when they add up inputs.
//
// Layouts are those of `GgmlBlocks` in blocks.py with `by_group`.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>

#ifdef __F16C__
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

// Vectors of L numbers.
template <int L>
struct Vector {
  typedef float Floats __attribute__((vector_size(4 * L)));
  typedef int32_t Ints __attribute__((vector_size(4 * L)));
  typedef uint16_t Shorts __attribute__((vector_size(2 * L)));
  typedef int16_t SignedShorts __attribute__((vector_size(2 * L)));
  typedef uint8_t Bytes __attribute__((vector_size(L)));
  typedef int8_t SignedBytes __attribute__((vector_size(L)));
};

template <typename T>
inline T Load(const void* at) {
  T made;
  std::memcpy(&made, at, sizeof made);
  return made;
}

// Widens bytes in two steps: compilers have an instruction for each, but not for both.
template <int L>
inline typename Vector<L>::Ints Codes(const void* at) {
  typedef Vector<L> V;
  const auto shorts = __builtin_convertvector(Load<typename V::Bytes>(at), typename V::Shorts);
  return __builtin_convertvector(shorts, typename V::Ints);
}

template <int L>
inline typename Vector<L>::Ints SignedCodes(const void* at) {
  typedef Vector<L> V;
  const auto shorts = __builtin_convertvector(Load<typename V::SignedBytes>(at), typename V::SignedShorts);
  return __builtin_convertvector(shorts, typename V::Ints);
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

  float Number(const void* of, int64_t i) const {
    return wide ? static_cast<const float*>(of)[i] : Half(static_cast<const uint16_t*>(of)[i]);
  }
};

// Decodes group g of output n, whose scale is number s of the output, and hands L weights at a time to `use`, with the
// place of the first in the group.
template <int kGroup, int kBits, int L, typename Use>
inline void Decode(const Kernel& k, int64_t n, int64_t g, int64_t s, Use use) {
  typedef typename Vector<L>::Floats Floats;
  constexpr int kBytes = kBits == 8 ? kGroup : kGroup / 2, kWidth = 32 / kGroup;
  const int64_t at = n * k.groups + g;
  const uint8_t* codes = k.codes + at * kBytes;
  float scale = k.Number(k.scales, n * k.shared + s);
  float low = k.minima ? k.Number(k.minima, n * k.shared + s) : 0.f;
  if (k.steps) scale *= k.is_signed ? static_cast<float>(static_cast<int8_t>(k.steps[at]))
                                    : static_cast<float>(k.steps[at]);
  if (k.minimum_steps) low *= static_cast<float>(k.minimum_steps[at]);
  low -= k.offset * scale;
#define DECODAX_WEIGHTS(code) (__builtin_convertvector(code, Floats) * scale + low)
  if constexpr (kBits == 8) {
#pragma GCC unroll 4
    for (int place = 0; place < kGroup; place += L) use(DECODAX_WEIGHTS(SignedCodes<L>(codes + place)), place);
  } else {
#pragma GCC unroll 4
    for (int place = 0; place < kBytes; place += L) {
      const auto both = Codes<L>(codes + place);
      auto first = both & 15, second = both >> 4;
      if constexpr (kBits > 4) {
        constexpr int kMask = (1 << kWidth) - 1;
        first |= (Shifted<L>(k.high[at], place, kWidth) & kMask) << 4;
        second |= (Shifted<L>(k.high[at], place + kBytes, kWidth) & kMask) << 4;
      }
      use(DECODAX_WEIGHTS(first), place);
      use(DECODAX_WEIGHTS(second), place + kBytes);
    }
  }
#undef DECODAX_WEIGHTS
}

// Multiplies R rows by the weights of O outputs from n on. The order of additions depends on neither number.
template <int kGroup, int kBits, int R, int O>
inline void Outputs(const Kernel& k, int64_t n, const float* x, int64_t stride, float* y, int64_t outputs) {
  constexpr int kMost = kBits == 8 ? kGroup : kGroup / 2, L = kMost < kWidest ? kMost : kWidest;
  typedef typename Vector<L>::Floats Floats;
  const int64_t per = k.groups / k.shared;
  Floats sums[O][R];
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) sums[o][r] = Floats{};
  for (int64_t s = 0, g = 0; s < k.shared; ++s) {
    for (int64_t end = g + per; g < end; ++g) {
      const float* at = x + g * kGroup;
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o)
        Decode<kGroup, kBits, L>(k, n + o, g, s, [&](const Floats& w, int place) {
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sums[o][r] += w * Load<Floats>(at + r * stride + place);
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
  k.groups = codes.dimensions()[1];
  k.shared = scales.dimensions()[1];
  work->x = static_cast<const float*>(x.untyped_data());
  work->y = static_cast<float*>(y->untyped_data());
  work->rows = x.dimensions()[0];
  work->stride = x.dimensions()[1];
  work->outputs = codes.dimensions()[0];
  work->block = kProducts / (work->rows * work->stride + 1) + 1;
  work->blocks = (work->outputs + work->block - 1) / work->block;
  const int64_t threads = pool.num_threads();
  for (int64_t t = 1; t < threads && t < work->blocks; ++t) pool.Schedule([work] { work->Take(); });
  work->Take();
  while (work->done.load(std::memory_order_acquire) < work->blocks) std::this_thread::yield();
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
