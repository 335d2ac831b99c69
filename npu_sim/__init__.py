"""The people's side: the `npu-sim` command, model extraction, LLM and vision front ends, verification, reports."""
