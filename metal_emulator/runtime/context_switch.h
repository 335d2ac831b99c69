// Switching between stacks: callee-saved registers go on the stack that is left and come off the one that is entered.
#pragma once

#include "launch.h"

#if defined(__x86_64__) || defined(__aarch64__)

// Saves the running context's stack pointer in *saved and continues the context whose stack pointer is `next`.
extern "C" void metal_switch_context(void **saved, void *next);

#if defined(__APPLE__)
#define METAL_SWITCH_SYMBOL "_metal_switch_context"
#else
#define METAL_SWITCH_SYMBOL "metal_switch_context"
#endif

#if defined(__x86_64__)
asm(".text\n"
    ".globl " METAL_SWITCH_SYMBOL "\n" METAL_SWITCH_SYMBOL ":\n"
    "    pushq %rbp\n"
    "    pushq %rbx\n"
    "    pushq %r12\n"
    "    pushq %r13\n"
    "    pushq %r14\n"
    "    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n"
    "    popq %r14\n"
    "    popq %r13\n"
    "    popq %r12\n"
    "    popq %rbx\n"
    "    popq %rbp\n"
    "    ret\n");
#else
asm(".text\n"
    ".globl " METAL_SWITCH_SYMBOL "\n" METAL_SWITCH_SYMBOL ":\n"
    "    sub sp, sp, #160\n"
    "    stp x19, x20, [sp, #0]\n"
    "    stp x21, x22, [sp, #16]\n"
    "    stp x23, x24, [sp, #32]\n"
    "    stp x25, x26, [sp, #48]\n"
    "    stp x27, x28, [sp, #64]\n"
    "    stp x29, x30, [sp, #80]\n"
    "    stp d8, d9, [sp, #96]\n"
    "    stp d10, d11, [sp, #112]\n"
    "    stp d12, d13, [sp, #128]\n"
    "    stp d14, d15, [sp, #144]\n"
    "    mov x9, sp\n"
    "    str x9, [x0]\n"
    "    mov sp, x1\n"
    "    ldp x19, x20, [sp, #0]\n"
    "    ldp x21, x22, [sp, #16]\n"
    "    ldp x23, x24, [sp, #32]\n"
    "    ldp x25, x26, [sp, #48]\n"
    "    ldp x27, x28, [sp, #64]\n"
    "    ldp x29, x30, [sp, #80]\n"
    "    ldp d8, d9, [sp, #96]\n"
    "    ldp d10, d11, [sp, #112]\n"
    "    ldp d12, d13, [sp, #128]\n"
    "    ldp d14, d15, [sp, #144]\n"
    "    add sp, sp, #160\n"
    "    ret\n");
#endif

namespace metal_runtime {

inline void switch_context(void **saved, void *next) { metal_switch_context(saved, next); }

// The stack pointer of a context that will enter `function`, on the stack that ends at `top`.
inline void *prepare_context(void *top, void (*function)()) {
    void **end = reinterpret_cast<void **>(reinterpret_cast<uptr>(top) & ~uptr(63));
#if defined(__x86_64__)
    // Six registers, the return address, and a zero for the caller that fiber code believes it has.
    void **stack = end - 8;
    for (int i = 0; i < 8; ++i) stack[i] = nullptr;
    stack[6] = reinterpret_cast<void *>(function);
#else
    void **stack = end - 20;
    for (int i = 0; i < 20; ++i) stack[i] = nullptr;
    stack[11] = reinterpret_cast<void *>(function);
#endif
    return stack;
}

}  // namespace metal_runtime

#else

#include <ucontext.h>

namespace metal_runtime {

inline void switch_context(void **saved, void *next) {
    ucontext_t here;
    *saved = &here;
    swapcontext(&here, static_cast<ucontext_t *>(next));
}

inline void *prepare_context(void *top, void (*function)()) {
    const uptr end = reinterpret_cast<uptr>(top) & ~uptr(63);
    ucontext_t *context = reinterpret_cast<ucontext_t *>(end - (sizeof(ucontext_t) + 63) / 64 * 64);
    const uptr bottom = (end & ~(STACK_SIZE - 1)) + 4096;
    getcontext(context);
    context->uc_stack.ss_sp = reinterpret_cast<void *>(bottom);
    context->uc_stack.ss_size = reinterpret_cast<uptr>(context) - bottom;
    context->uc_link = nullptr;
    makecontext(context, function, 0);
    return context;
}

}  // namespace metal_runtime

#endif
