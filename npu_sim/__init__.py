"""The user-facing package: the `npu-sim` command, IR extraction, language models, vision models and verification."""
