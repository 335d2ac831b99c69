"""The commands of `npu-sim`: functions whose signatures declare their command lines."""
