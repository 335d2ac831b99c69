"""BERT-base, partitioned: what the device supports runs there, the rest on the CPU through PyTorch.

    python examples/bert.py [--layers 12] [--tokens 64] [--cpu aten.gelu] [--device cpu]

Every op of BERT is supported, so by default there is one partition; `--cpu` keeps an op off the device, which shows how
the graph is split and what has to cross. The weights are random, from a fixed seed. Prints the plan, and how the last
hidden state agrees with PyTorch's in float32.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from npu_compiler import is_op_supported, partition
from npu_runtime import DAGExecutor, Device, Profiler
from npu_sim.extract import extract_ir


class Encoder(nn.Module):
    """Token ids and mask [1, tokens] → last hidden state [1, tokens, 768]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bert = BertModel(BertConfig(num_hidden_layers=layers), add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="Number of layers.")
    parser.add_argument("--tokens", type=int, default=64, help="Length of the sequence.")
    parser.add_argument("--cpu", metavar="OP", help="An op to keep off the device.")
    parser.add_argument("--device", help="Device name. Default: the best one on this machine.")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Encoder(args.layers).eval()
    ids = torch.randint(0, 30522, (1, args.tokens))
    mask = (torch.arange(args.tokens) < args.tokens - 5).long()[None]
    ir = extract_ir(model, (ids, mask), name="bert-base")

    def supported(op_type: str) -> bool:
        return is_op_supported(op_type) and not (args.cpu and op_type.startswith(args.cpu))

    plan = partition(ir, supported)
    print(plan)

    device = Device(args.device)
    dag = DAGExecutor(plan, device)
    dag.load_weights(model.state_dict())
    profiler = Profiler()
    inputs = dict(zip(plan.graph.inputs, (ids.numpy(), mask.numpy()), strict=True))
    dag.execute(inputs)  # the first run prepares everything
    (hidden,) = dag.execute(inputs, profiler).values()

    with torch.no_grad():
        reference = model(ids, mask).numpy()
    print(f"\nBERT with {args.layers} layers on {device}, {plan.compute_dtype}")
    print(f"Pearson r with PyTorch in float32: {np.corrcoef(hidden.ravel(), reference.ravel())[0, 1]:.6f}")


if __name__ == "__main__":
    main()
