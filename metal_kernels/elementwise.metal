// The dense element-wise kernels that models use most: add, relu and copy.

#define ELEMENTWISE_DENSE
#include "elementwise_template.metal"

ELEMENTWISE_OPS  // what an op compares is not a guard
