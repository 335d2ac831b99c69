// relu(a + b) over row-major operands.

#define ELEMENTWISE_DENSE
#include "elementwise_template.metal"

ELEMENTWISE_OPS  // what an op compares is not a guard
