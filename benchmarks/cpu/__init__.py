"""Language models and networks on the CPU device, beside PyTorch, ONNX Runtime, OpenVINO and llama.cpp."""
