// The strided element-wise kernels whose expressions call functions of the compiler's own.

#define ELEMENTWISE_BROADCAST
#include "elementwise_template.metal"

ELEMENTWISE_OPS  // what an op compares is not a guard
