// How the runtime calls a kernel, and what the kernel's parameters are.
#pragma once

namespace cuda_host {

// One parameter as text: "*" for a pointer, "c" where it points to const, a letter, the bytes of one element.
// e float16, b bfloat16, f float, i signed, u unsigned (and bool), s a struct or vector type, v void.
template <class T>
void describe(char*& to) {
  using Pointed = std::remove_pointer_t<T>;
  using U = std::remove_cv_t<Pointed>;
  constexpr bool pointer = std::is_pointer<T>::value;
  const char* letter = std::is_same<U, half>::value            ? "e"
                       : std::is_same<U, __nv_bfloat16>::value ? "b"
                       : std::is_floating_point<U>::value      ? "f"
                       : std::is_signed<U>::value              ? "i"
                       : std::is_unsigned<U>::value            ? "u"
                       : std::is_void<U>::value                ? "v"
                                                               : "s";
  to += sprintf(to, "%s%s%s%d ", pointer ? "*" : "", pointer && std::is_const<Pointed>::value ? "c" : "", letter,
                (int)sizeof(std::conditional_t<std::is_void<U>::value, char, U>));
}
template <class... Parameters>
const char* parameters(void (*)(Parameters...)) {
  static char text[16 * sizeof...(Parameters) + 1];
  char* to = text;
  *to = 0;
  (describe<Parameters>(to), ...);
  return text;
}

template <class... Parameters, size_t... I>
int launch(void (*kernel)(Parameters...), const cuda_host_launch* launch, std::index_sequence<I...>) {
  struct Call {
    void (*kernel)(Parameters...);
    void** arguments;
  } call{kernel, launch->arguments};
  return cuda_host_run(
      launch,
      [](void* of) __attribute__((no_sanitize_thread)) {
        auto* call = (Call*)of;
        call->kernel(*(std::remove_cv_t<Parameters>*)call->arguments[I]...);
      },
      &call);
}

}  // namespace cuda_host

// What a module offers for its kernel number `i`, written `expression`.
#define CUDA_HOST_KERNEL(i, ...)                                                                               \
  CUDA_HOST_API int cuda_host_launch_##i(const cuda_host_launch* launch) {                                     \
    return cuda_host::launch(&__VA_ARGS__, launch, cuda_host::indices(&__VA_ARGS__));                          \
  }                                                                                                            \
  CUDA_HOST_API const char* cuda_host_parameters_##i() { return cuda_host::parameters(&__VA_ARGS__); }         \
  CUDA_HOST_API void* cuda_host_address_##i() { return (void*)&__VA_ARGS__; }
namespace cuda_host {
template <class... Parameters>
std::index_sequence_for<Parameters...> indices(void (*)(Parameters...)) { return {}; }
}  // namespace cuda_host

// The part of a module's image that holds its code, constants and tables: all but its zero-initialised variables.
extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char __bss_start[] __attribute__((visibility("hidden")));
}
#define CUDA_HOST_IMAGE                                                  \
  CUDA_HOST_API char* cuda_host_image_start() { return __ehdr_start; } \
  CUDA_HOST_API char* cuda_host_image_end() { return __bss_start; }
