"""Language models and networks on the CUDA device, beside PyTorch eager and `torch.compile`."""
