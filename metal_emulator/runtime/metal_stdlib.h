// What `#include <metal_stdlib>` gives a kernel that is compiled as C++.
#pragma once

#include "limits.h"
#include "math_functions.h"
#include "memory.h"
#include "sanitizer.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#include "types.h"

// Barriers and bounds guards are switched off one at a time, at run time, in a library that is compiled for that.
#if defined(METAL_MUTANTS)
static unsigned metal_mutant;
extern "C" void metal_set_mutant(unsigned mutant) { metal_mutant = mutant; }
#define METAL_UNLESS_MUTANT(ID, ...) (metal_mutant != ID ? (__VA_ARGS__) : (void)0)
#define METAL_TRUE_IN_MUTANT(ID, ...) (metal_mutant == ID || (__VA_ARGS__))
#define METAL_FALSE_IN_MUTANT(ID, ...) (metal_mutant != ID && (__VA_ARGS__))
#else
#define METAL_UNLESS_MUTANT(ID, ...) __VA_ARGS__
#define METAL_TRUE_IN_MUTANT(ID, ...) (__VA_ARGS__)
#define METAL_FALSE_IN_MUTANT(ID, ...) (__VA_ARGS__)
#endif

const metal_runtime::Scheduler *metal_scheduler;
extern "C" void metal_attach(const metal_runtime::Scheduler *scheduler) { metal_scheduler = scheduler; }
