// Vectors of numbers, and sums of rows that stay in registers.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int kWidest = 16;
#else
constexpr int kWidest = 8;
#endif

// Number of outputs whose weights are fetched ahead. SmolLM2's head takes 0.54 of the time without this with 8, and 1.0
// of it with 16.
constexpr int kAhead = 8;

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
  typedef uint16_t Shorts __attribute__((vector_size(2 * L)));
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

// Returns a * b + c, rounded once where the machine has an instruction for that. Left to itself (-ffp-contract), a
// compiler rounds once for some numbers of rows and twice for others, which then have other last bits.
template <typename Floats>
DECODAX_INLINE inline Floats MultiplyAdd(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
  if constexpr (sizeof(Floats) == 64) return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__x86_64__) && defined(__FMA__)
  if constexpr (sizeof(Floats) == 32) return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
#ifdef __FP_FAST_FMAF
  for (unsigned i = 0; i < sizeof(Floats) / sizeof(float); ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
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

// Calls `some(row, n, Number<R>(), Number<O>())` until all rows and the outputs from `first` to `last` are computed, R
// rows from `row` on and O outputs from `n` on at a time, whose sums stay in registers. An addition waits for the one
// before it to the same sum, so several sums are computed side by side.
template <typename Some>
inline void ByRows(int64_t rows, int64_t first, int64_t last, const Some& some) {
  int64_t row = 0;
  auto take = [&](auto count, auto together) {
    int64_t n = first;
    for (; n + together <= last; n += together) some(row, n, count, together);
    for (; n < last; ++n) some(row, n, count, Number<1>());
    row += count;
  };
  constexpr bool kRegisters = kWidest == 16;       // 32 of them, not 16
  while (rows - row >= 8) take(Number<8>(), Number<1>());
  switch (rows - row) {
    case 7: take(Number<4>(), Number<kRegisters ? 4 : 2>()); [[fallthrough]];
    case 3: return take(Number<3>(), Number<kRegisters ? 4 : 2>());
    case 6: return take(Number<6>(), Number<kRegisters ? 2 : 1>());
    case 5: return take(Number<5>(), Number<kRegisters ? 2 : 1>());
    case 4: return take(Number<4>(), Number<kRegisters ? 4 : 2>());
    case 2: return take(Number<2>(), Number<2>());
    case 1: return take(Number<1>(), Number<4>());
  }
}

}  // namespace
