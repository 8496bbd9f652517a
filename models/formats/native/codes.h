// Products of a few rows with kernels of 4 to 8 bits.
//
// A weight is (code - offset) * scale + minimum. The codes of one output are adjacent, so a thread reads its outputs as
// one stream, decodes some weights at a time in registers, and multiplies them with all rows before it reads on. XLA's
// own fusions do not keep several sums in registers, and decode weights one by one when they add up inputs.

#pragma once

#include "vectors.h"

namespace {

// Kernels of codes of 4 to 8 bits, as `GgmlBlocks` in blocks.py has them with `by_group`.
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
#define DECODAX_WEIGHTS(...) \
  MultiplyAdd(__builtin_convertvector((__VA_ARGS__), Floats), Floats{} + scale, Floats{} + low)
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
              Unrolled<R>([&](auto r) DECODAX_INLINE {
                sums[o][r] = MultiplyAdd(w, Load<Floats>(at + r * stride + place), sums[o][r]);
              });
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
  ByRows(rows, first, last, [&](int64_t row, int64_t n, auto count, auto together) {
    constexpr int R = decltype(count)::value, O = decltype(together)::value;
    Outputs<kGroup, kBits, R, O>(k, n, x + row * stride, stride, y + row * outputs, outputs);
  });
}

using Run = decltype(&Range<32, 4>);

Run Choose(int64_t group, int64_t bits) {
  if (group == 32 && bits == 4) return Range<32, 4>;
  if (group == 32 && bits == 5) return Range<32, 5>;
  if (group == 32 && bits == 8) return Range<32, 8>;
  if (group == 16 && bits == 6) return Range<16, 6>;
  return nullptr;
}

}  // namespace
