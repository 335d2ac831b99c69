"""Qwen2.5-1.5B's configuration, cut to a few layers, generating tokens with its KV cache on the device.

    python examples/qwen.py [--layers 2] [--vocabulary 151936] [--tokens 8] [--device cpu]

The weights are random, from a fixed seed. One program prefills the prompt, another decodes a token; both update the
cache in place (each `index_copy` is donated its input) and share one set of weights. Prints what the decode program
does, the tokens that it generates beside PyTorch's, and how the logits of the prompt agree. With random weights many
logits are nearly equal, so after a while the tokens may differ.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from npu_sim.llm import Checkpoint, LanguageModel


def configuration(layers: int, vocabulary: int) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="Number of layers, of 28.")
    parser.add_argument("--vocabulary", type=int, default=151936, help="Number of token ids.")
    parser.add_argument("--tokens", type=int, default=8, help="Number of tokens to generate.")
    parser.add_argument("--device", help="Device name. Default: the best one on this machine.")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = configuration(args.layers, args.vocabulary)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    checkpoint = Checkpoint(
        "qwen2.5-cut", config, reference.state_dict(), "bfloat16", load_tokenizer=lambda: None, eos_ids=frozenset()
    )
    model = LanguageModel(checkpoint, device=args.device, cache_length=128, chunk=32)
    program = model.decode_program
    print(program.describe(kernels=False))

    prompt = np.random.default_rng(0).integers(0, args.vocabulary, 20).tolist()
    with torch.no_grad():
        ids = torch.tensor([prompt])
        wanted = reference(ids).logits[0, -1].float().numpy()
        theirs = reference.generate(ids, max_new_tokens=args.tokens, do_sample=False)[0, len(prompt) :].tolist()
    logits = model.prefill(prompt)
    ours = list(model.generate(prompt, args.tokens, stop=frozenset()))

    print(f"\n{args.layers} layers on {model.device}: {len(program.kernels)} kernel calls a token,")
    print(f"{len(program.plan.donations)} tensors updated in place")
    print(f"ours:    {ours}\nPyTorch: {theirs}")
    print(f"Pearson r of the prompt's logits with PyTorch in bfloat16: {np.corrcoef(logits, wanted)[0, 1]:.6f}")


if __name__ == "__main__":
    main()
