// Every element-wise op over strided operands: broadcasts, transposes, slices.

#define ELEMENTWISE_BROADCAST
#include "elementwise_template.metal"

ELEMENTWISE_OPS  // what an op compares is not a guard
