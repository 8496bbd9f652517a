// Products of a few rows with kernels of floats or 8-bit integers, `[N, K]`.
//
// The weights of one output are adjacent. XLA reads such a kernel at the memory's speed for one row, but takes up to
// twice as long for two to eight.

#pragma once

#include "vectors.h"

#include "xla/ffi/api/ffi.h"

namespace {

// Types of weights of B bytes.
struct Float32 { static constexpr int B = 4; };
struct BFloat16 { static constexpr int B = 2; };
struct Float16 { static constexpr int B = 2; };
struct Int8 { static constexpr int B = 1; };

template <typename T, int L>
DECODAX_INLINE inline typename Vector<L>::Floats Weights(const uint8_t* at) {
  typedef typename Vector<L>::Floats Floats;
  if constexpr (std::is_same_v<T, Float32>) {
    return Load<Floats>(at);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef __AVX512F__
    if constexpr (L == 16) return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load<__m256i>(at)), 16);
#endif
#ifdef __AVX2__
    if constexpr (L == 8) return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load<__m128i>(at)), 16);
#endif
    return (Floats)(__builtin_convertvector(Load<typename Vector<L>::Shorts>(at), typename Vector<L>::Ints) << 16);
  } else if constexpr (std::is_same_v<T, Int8>) {
    return __builtin_convertvector(Codes<L, true>(at), Floats);
  } else {
#if defined(__AVX512F__)
    if constexpr (L == 16) return (Floats)_mm512_cvtph_ps(Load<__m256i>(at));
#endif
#if defined(__F16C__)
    if constexpr (L == 8) return (Floats)_mm256_cvtph_ps(Load<__m128i>(at));
#endif
    Floats made;
    for (int i = 0; i < L; ++i) made[i] = Half(Load<uint16_t>(at + 2 * i));
    return made;
  }
}

// Multiplies R rows by the weights of O outputs. The order of additions depends on neither number.
template <typename T, int R, int O>
inline void RowOutputs(const uint8_t* kernel, const float* x, int64_t K, float* y, int64_t outputs) {
  constexpr int L = kWidest;
  typedef typename Vector<L>::Floats Floats;
  Floats sums[O][R];
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) sums[o][r] = Floats{};
  int64_t i = 0;
  for (; i + L <= K; i += L)
    Unrolled<O>([&](auto o) DECODAX_INLINE {
      const uint8_t* at = kernel + (o * K + i) * T::B;
      __builtin_prefetch(at + kAhead * K * T::B);
      const Floats w = Weights<T, L>(at);
      Unrolled<R>([&](auto r) DECODAX_INLINE { sums[o][r] = MultiplyAdd(w, Load<Floats>(x + r * K + i), sums[o][r]); });
    });
  if (i < K)
    for (int o = 0; o < O; ++o) {
      uint8_t rest[4 * L] = {};
      std::memcpy(rest, kernel + (o * K + i) * T::B, (K - i) * T::B);
      const Floats w = Weights<T, L>(rest);
      for (int r = 0; r < R; ++r) {
        float own[L] = {};
        std::memcpy(own, x + r * K + i, (K - i) * sizeof *own);
        sums[o][r] = MultiplyAdd(w, Load<Floats>(own), sums[o][r]);
      }
    }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float all[L];
      std::memcpy(all, &sums[o][r], sizeof all);
      y[r * outputs + o] = Sum(all, Number<L>());
    }
}

// Multiplies all rows by the outputs from `first` to `last`.
template <typename T>
void RowRange(const uint8_t* kernel, int64_t first, int64_t last, const float* x, int64_t rows, int64_t K, float* y,
              int64_t outputs) {
  ByRows(rows, first, last, [&](int64_t row, int64_t n, auto count, auto together) {
    constexpr int R = decltype(count)::value, O = decltype(together)::value;
    RowOutputs<T, R, O>(kernel + n * K * T::B, x + row * K, K, y + row * outputs + n, outputs);
  });
}

inline decltype(&RowRange<Float32>) ChooseRows(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F32: return RowRange<Float32>;
    case xla::ffi::BF16: return RowRange<BFloat16>;
    case xla::ffi::F16: return RowRange<Float16>;
    case xla::ffi::S8: return RowRange<Int8>;
    default: return nullptr;
  }
}

}  // namespace
