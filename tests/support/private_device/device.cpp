// A PrivateUse1 device whose memory is the host's. Operations without a kernel here leave for the
// CPU and come back, by PyTorch's own fallback.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <new>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kFirst(kDevice, 0);
std::atomic<long long> operations{0};

struct Memory final : c10::Allocator {
  static void release(void* pointer) { ::operator delete(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? ::operator new(bytes, std::nothrow) : nullptr;
    return {pointer, pointer, &release, kFirst};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kFirst; }
  c10::Device getDevice() const override { return kFirst; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kFirst);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kFirst); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kFirst; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
const bool is_hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor create_empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor create_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resize_memory(
    const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* self = tensor.unsafeGetTensorImpl();
  self->set_sizes_contiguous(size);
  const auto bytes = at::detail::computeStorageNbytesContiguous(
      size, self->dtype().itemsize(), self->storage_offset());
  at::native::maybe_resize_storage_cpu(self, bytes);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_memory(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor convolve(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> offset;
  if (bias && bias->defined()) offset = on_host(*bias);
  return at::convolution(
      on_host(input), on_host(weight), offset, stride, padding, dilation, transposed,
      output_padding, groups).to(kFirst);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolve_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const std::array<int64_t, 1> channels{gradient.size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), channels, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  auto move = [](const at::Tensor& t) { return t.defined() ? t.to(kFirst) : t; };
  return {move(of_input), move(of_weight), move(of_bias)};
}

void leave(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++operations;
  at::native::cpu_fallback(op, stack);
}

REGISTER_ALLOCATOR(kDevice, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &create_empty);
  m.impl("empty_strided", &create_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view", &at::native::view);
  m.impl("resize_", &resize_memory);
  m.impl("convolution_overrideable", &convolve);
  m.impl("convolution_backward_overrideable", &convolve_backward);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&leave>());
}

}  // namespace

extern "C" long long count_operations() { return operations; }
