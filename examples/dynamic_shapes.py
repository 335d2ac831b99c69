"""One trace for all batch sizes and lengths: a BERT that is given sentences of several lengths.

    python examples/dynamic_shapes.py [--layers 12]

The weights are random, from a fixed seed. Prints, for each shape, how long its first call took, in which its program is
made without tracing again, and how its answer agrees with PyTorch's.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.export import Dim
from transformers import BertConfig, BertModel

import npu_sim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=args.layers)).eval()
    sizes = {0: Dim("batch", min=1, max=32), 1: Dim("length", min=2, max=512)}
    example = {"input_ids": torch.ones(2, 16, dtype=torch.long), "attention_mask": torch.ones(2, 16, dtype=torch.long)}

    compiled = npu_sim.compile(model, kwargs=example, dynamic_shapes=dict.fromkeys(example, sizes))

    with torch.no_grad():
        for shape in ((1, 12), (4, 30), (2, 64), (1, 12)):
            ids, mask = torch.randint(0, 30522, shape), torch.ones(shape, dtype=torch.long)
            mask[0, shape[1] // 2 :] = 0
            start = time.perf_counter()
            ours = compiled(input_ids=ids, attention_mask=mask)
            seconds = time.perf_counter() - start
            theirs = model(input_ids=ids, attention_mask=mask)
            error = (ours.pooler_output - theirs.pooler_output).abs().max()
            print(f"{shape}: {seconds:.2f} s, largest difference from PyTorch {error:.1e}")
    print(compiled.report())


if __name__ == "__main__":
    main()
