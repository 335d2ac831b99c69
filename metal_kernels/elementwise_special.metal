// The dense element-wise kernels whose expressions call functions of the compiler's own.

#define ELEMENTWISE_DENSE
#include "elementwise_template.metal"

ELEMENTWISE_OPS  // what an op compares is not a guard
