// What the compiler's own checks call: -fsanitize=bounds for arrays whose size it knows (locals and struct members),
// and -fsanitize=integer-divide-by-zero. The layouts are those of the compilers' runtime library, which is not linked.
#pragma once

#include "memory.h"

#if defined(METAL_CHECKS)

namespace metal_runtime {

struct SourceLocation {
    const char *file;
    u32 line;
    u32 column;
};

// What the handlers get begins with the place in the source.
struct CheckedOperation {
    SourceLocation place;
};

}  // namespace metal_runtime

extern "C" void __ubsan_handle_out_of_bounds(metal_runtime::CheckedOperation *operation, unsigned long index) {
    metal_scheduler->fault(&metal_runtime::current(), "index %lld is outside of the array at %s:%u",
                           static_cast<long long>(index), operation->place.file, operation->place.line);
}

extern "C" void __ubsan_handle_divrem_overflow(metal_runtime::CheckedOperation *operation, unsigned long,
                                               unsigned long) {
    metal_scheduler->fault(&metal_runtime::current(), "division by zero, or overflow of one, at %s:%u",
                           operation->place.file, operation->place.line);
}

#endif
