// Products of a few rows with the kernels of a model, as custom calls of XLA on CPU.

#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

#include "codes.h"
#include "rows.h"
#include "threads.h"

namespace {

ffi::Error Matmul(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, int64_t group,
                  int64_t bits, int64_t offset, bool minima, bool high, bool steps, bool minimum_steps) {
  const auto run = Choose(group, bits);
  if (run == nullptr) return ffi::Error::InvalidArgument("no product for this group and number of bits");
  const size_t wanted = 3u + minima + high + steps + minimum_steps;
  if (args.size() != wanted) return ffi::Error::InvalidArgument("the number of arrays is not that of the flags");
  size_t count = 0;
  auto next = [&] { return *args.get<ffi::AnyBuffer>(count++); };
  const auto x = next(), codes = next(), scales = next();
  const auto xs = x.dimensions(), cs = codes.dimensions(), ss = scales.dimensions();
  if (xs.size() != 2 || cs.size() != 3 || ss.size() != 2 || xs[1] != cs[1] * group || ss[0] != cs[0] || ss[1] == 0 ||
      cs[1] % ss[1] || cs[2] != (bits == 8 ? group : group / 2) || x.element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("the shapes of rows, codes and scales do not fit");
  Kernel k{};
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
  const auto from = static_cast<const float*>(x.untyped_data());
  const auto to = static_cast<float*>(y->untyped_data());
  const int64_t rows = xs[0], stride = xs[1], outputs = cs[0];
  Compute(pool, outputs, stride,
          [=](int64_t first, int64_t last) { run(k, first, last, from, rows, stride, to, outputs); });
  return ffi::Error::Success();
}

ffi::Error Rows(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::Result<ffi::AnyBuffer> y) {
  const auto run = ChooseRows(kernel.element_type());
  if (run == nullptr) return ffi::Error::InvalidArgument("no product for weights of this type");
  const auto xs = x.dimensions(), ks = kernel.dimensions();
  if (xs.size() != 2 || ks.size() != 2 || xs[1] != ks[1] || x.element_type() != ffi::F32)
    return ffi::Error::InvalidArgument("the shapes of rows and kernel do not fit");
  const auto from = static_cast<const float*>(x.untyped_data());
  const auto weights = static_cast<const uint8_t*>(kernel.untyped_data());
  const auto to = static_cast<float*>(y->untyped_data());
  const int64_t rows = xs[0], inputs = xs[1], outputs = ks[0];
  Compute(pool, outputs, inputs,
          [=](int64_t first, int64_t last) { run(weights, first, last, from, rows, inputs, to, outputs); });
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodaxRows, Rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
