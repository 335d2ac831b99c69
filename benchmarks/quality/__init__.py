"""Quality of quantized models: perplexity of language models, answers of vision models."""
