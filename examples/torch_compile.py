"""`torch.compile` with our backend: SmolLM2-135M-Instruct answers through Hugging Face's own `generate()`.

    python examples/torch_compile.py [--tokens 8]

The cache of keys and values is static, so that every step has the same shapes. Prints the answer, the time per token in
eager PyTorch and compiled, and whether both wrote the same tokens, as they do in float32.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from npu_runtime.torch_arrays import numpy_to_tensor
from npu_sim.llm.loading import load_checkpoint

QUESTION = "What is the capital of France?"


def smollm2() -> tuple[Any, Any]:
    """The model as a module of transformers in float32, and its tokenizer."""
    checkpoint = load_checkpoint("smollm2", quantization="none")
    config = AutoConfig.for_model(**checkpoint.config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: numpy_to_tensor(checkpoint.state[name]) for name in checkpoint.state}
    model.load_state_dict(state, strict=False)  # the output layer's weights are the embedding's
    return model, checkpoint.tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8, help="Maximum number of new tokens.")
    args = parser.parse_args()

    model, tokenizer = smollm2()
    chat = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    options = {"max_new_tokens": args.tokens, "do_sample": False, "cache_implementation": "static"}

    def answer() -> tuple[torch.Tensor, float]:
        """The new tokens, and milliseconds for each."""
        start = time.perf_counter()
        with torch.no_grad():
            tokens = model.generate(prompt, **options, disable_compile=True)[0, prompt.shape[1] :]
        return tokens, 1000 * (time.perf_counter() - start) / len(tokens)

    expected, eager = answer()
    model.forward = torch.compile(model.forward, backend="npu_sim")
    answer()  # compiles
    tokens, compiled = answer()
    print(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
    print(f"eager {eager:.0f} ms a token, compiled {compiled:.0f} ms; same tokens: {torch.equal(tokens, expected)}")


if __name__ == "__main__":
    main()
