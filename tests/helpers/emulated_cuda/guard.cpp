// A device guard for CUDA that does nothing: a PyTorch without CUDA has none, and its bindings ask for one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

static c10::impl::DeviceGuardImplRegistrar registered(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
