"""The commands of `npu-sim`, as plain functions whose signatures are their command lines."""
