// All other dense element-wise kernels, and those of elementwise.metal and add_relu.metal with a scalar operand.

#define ELEMENTWISE_DENSE
#include "elementwise_template.metal"

ELEMENTWISE_OPS  // what an op compares is not a guard
