"""One token after the other, from a checkpoint to text, with every step in this file.

    python examples/generate_step_by_step.py [--model smollm2] [--prompt TEXT] [--tokens 12] [--device cpu]

Traces the model with its KV cache as inputs and outputs, compiles that graph, loads the weights, and runs the program
for each token of the prompt and each new one. Prints the text, and whether `LanguageModel` generates the same tokens.
`LanguageModel` does more: it computes many tokens of a prompt at once, chooses tokens on the device, and launches steps
before the results of earlier ones are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

import npu_compiler
from npu_runtime import Device, DeviceBuffer, Executor, NPUBuffer, load_weights
from npu_sim.llm import Checkpoint, LanguageModel, extract_graph, load_checkpoint
from npu_sim.llm.graph import layer_states, program_formats, state_with_buffers
from npu_sim.llm.state import state_inputs

CACHE_LENGTH = 128  # tokens: prompt and answer together


class Decoder:
    """A compiled decode step and its state: keys and values of each layer, for all tokens so far."""

    def __init__(self, checkpoint: Checkpoint, device: Device) -> None:
        # PyTorch to IR: transformers' module on meta tensors (no weights), one token, caches k and v of each layer.
        graph = extract_graph(checkpoint, tokens=1, cache_length=CACHE_LENGTH)

        # IR to a program: passes, fusions, kernels, one arena. Weights in few bits stay as they are.
        program = npu_compiler.compile(
            graph,
            device.backend.target,
            npu_compiler.CompileOptions(compute_dtype=checkpoint.dtype, quantization=program_formats(checkpoint)),
        )
        print(f"{len(program.kernels)} kernel calls a token")

        # The checkpoint's tensors, as the program's recipes want them, on the device.
        self._weights = load_weights(state_with_buffers(checkpoint), program, device)
        self._executor = Executor(program, device)

        # The state begins as zeros. `state_inputs` names it: k_0, v_0, k_1, …
        names = state_inputs(layer_states(checkpoint))
        self._state: dict[str, DeviceBuffer] = {
            spec.name: NPUBuffer.zeros(spec.shape, device, spec.storage, spec.alloc_shape)
            for spec in program.input_specs
            if spec.name in names
        }
        self._logits = program.output_specs[0].name

    def step(self, token: int, position: int) -> np.ndarray:
        """Write the token's keys and values to row `position` of the caches; the logits [vocab] after it.

        The caches are donated: the program updates them in place.
        """
        ids, positions = np.array([[token]]), np.array([position])
        outputs = self._executor.run({"input_ids": ids, "positions": positions, **self._state}, self._weights)
        return outputs[self._logits].to_numpy().astype(np.float32).reshape(-1)


def generate(decoder: Decoder, prompt: list[int], end_ids: frozenset[int]) -> Iterator[int]:
    """Tokens that continue a prompt, each the most probable one after those before it."""
    for position, token in enumerate(prompt):
        logits = decoder.step(token, position)
    for position in range(len(prompt), CACHE_LENGTH):
        token = int(logits.argmax())
        if token in end_ids:
            return
        yield token
        logits = decoder.step(token, position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="Hugging Face id, folder, .gguf file or 'smollm2'.")
    parser.add_argument("--prompt", default="The capital of France is", help="Text to continue.")
    parser.add_argument("--tokens", type=int, default=12, help="Maximum number of new tokens.")
    parser.add_argument("--device", help="Device name. Default: the best one on this machine.")
    args = parser.parse_args()

    checkpoint = load_checkpoint(args.model)
    tokenizer, end_ids = checkpoint.tokenizer, checkpoint.end_ids()
    device = Device(args.device) if args.device else Device()
    prompt = tokenizer.encode(args.prompt)
    print(f"prompt: {prompt}")

    decoder, tokens = Decoder(checkpoint, device), list[int]()
    for token in generate(decoder, prompt, end_ids):
        tokens.append(token)
        print(f"{token:6} {tokenizer.decode([token])!r}")
        if len(tokens) == args.tokens:
            break

    print(f"text: {tokenizer.decode(tokens)!r}")
    model = LanguageModel(checkpoint, device=device, cache_length=CACHE_LENGTH)
    print(f"the same tokens as LanguageModel: {tokens == list(model.generate(prompt, args.tokens))}")


if __name__ == "__main__":
    main()
