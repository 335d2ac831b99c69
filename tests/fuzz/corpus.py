"""Writes the corpus: small, valid files of each kind from which the fuzzers start. Programs are compiled from its IR.

python tests/fuzz/corpus.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import numpy as np  # noqa: E402
from ir_builder import IRBuilder  # noqa: E402


def vision() -> IRBuilder:
    """Convolutions with what is folded into them, pooling, resizing and padding."""
    g = IRBuilder("vision")
    x = g.input("x", 1, 3, 8, 8)
    norm = [g.weight(f"bn.{name}", 4) for name in ("gamma", "beta", "mean", "var")]
    y = g("aten.conv2d.default", x, g.weight("conv.weight", 4, 3, 3, 3), g.weight("conv.bias", 4), [1, 1], [1, 1])
    y = g("aten.relu.default", g("aten.batch_norm.default", y, *norm, False, 0.1, 1e-5, True))
    y = g("aten.conv2d.default", y, g.weight("depthwise", 4, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 4)
    y = g("aten.max_pool2d.default", y, [2, 2])
    y = g("aten.upsample_nearest2d.vec", y, None, [2.0, 2.0])
    y = g("aten.avg_pool2d.default", g("aten.constant_pad_nd.default", y, [1, 1, 1, 1], 0.5), [2, 2])
    y = g(
        "aten.linear.default", g("aten.flatten.using_ints", y, 1), g.weight("fc.weight", 6, 100), g.weight("fc.bias", 6)
    )
    return g.output(g("aten.softmax.int", y, -1))


def language() -> IRBuilder:
    """A step of a language model: embedding, norm, attention over a cache that it updates, and the next token."""
    g = IRBuilder("language")
    ids, at = g.input("ids", 2, dtype="int64"), g.input("at", 2, dtype="int64")
    x = g("aten.embedding.default", g.weight("table", 16, 8), ids)
    x = g("aten.layer_norm.default", x, [8], g.weight("norm.weight", 8), g.weight("norm.bias", 8))
    keys = g("aten.index_copy.default", g.input("keys", 4, 8), 0, at, g("aten.linear.default", x, g.weight("k", 8, 8)))
    q, k = (g("aten.view.default", t, [1, n, 2, 4]) for t, n in ((x, 2), (keys, 4)))
    q, k = (g("aten.transpose.int", t, 1, 2) for t in (q, k))
    y = g("aten.scaled_dot_product_attention.default", q, k, k)
    y = g("aten.reshape.default", g("aten.transpose.int", y, 1, 2), [2, 8])
    logits = g("aten.matmul.default", g("aten.silu.default", y), g("aten.t.default", g.weight("head", 16, 8)))
    return g.output(keys, g("aten.argmax.default", logits, -1))


def tensors() -> IRBuilder:
    """Reductions, selections, movement and constants."""
    g = IRBuilder("tensors")
    x = g.input("x", 3, 5)
    y = g("aten.add.Tensor", x, g.constant("offset", np.arange(5, dtype=np.float32)))
    y = g("aten.where.self", g("aten.gt.Scalar", y, 0.5), y, g("aten.cumsum.default", x, 1))
    values, indices = g("aten.topk.default", y, 2)
    y = g("aten.cat.default", [g("aten.slice.Tensor", y, 1, 1, 4), g.getitem((values, indices), 0)], 1)
    y = g("aten.clamp.default", g("aten.mul.Tensor", y, 3), -1.0, 2.0)
    return g.output(g("aten.sum.dim_IntList", y, [1]), g("aten.permute.default", y, [1, 0]))


GRAPHS = (vision, language, tensors)


def language_model(path: Path) -> None:
    """A GGUF file with one layer of a Llama, some of its weights quantized."""
    shapes = {f"blk.0.{name}": (rows, 32) for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16))}
    shapes |= {f"blk.0.{name}": (32, 32) for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    _write_gguf(path, "llama", shapes, "Q4_0", head_count=2, head_count_kv=1)


def experts(path: Path) -> None:
    """A GGUF file with one layer of a Qwen3 with experts, whose weights are quantized by the package gguf's MXFP4."""
    shapes = {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.attn_q_norm": (16,), "blk.0.attn_k_norm": (16,), "blk.0.ffn_gate_inp": (2, 32)}
    shapes |= {f"blk.0.ffn_{name}_exps": (2, 32, 32) for name in ("gate", "up", "down")}
    counts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
    _write_gguf(path, "qwen3moe", shapes, "MXFP4", head_count=2, head_count_kv=2, **counts)


def _write_gguf(path: Path, architecture: str, layer: dict[str, tuple[int, ...]], encoding: str, **counts: int) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32, **counts}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b"])
    writer.add_token_merges(["a b"])
    shapes = {"token_embd": (4, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), **layer}
    kinds = gguf.GGMLQuantizationType
    for name, shape in shapes.items():
        values = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        kind = kinds[encoding if "ffn_" in name and len(shape) > 1 else "F16" if len(shape) == 2 else "F32"]
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checkpoint() -> bytes:
    """A safetensors file with tensors of several dtypes, an empty one and metadata."""
    from safetensors.numpy import save

    values = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.ones(5, np.float16),
        "ids": np.arange(3),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.full((), 1.5),
    }
    return bytes(save(values, {"format": "np"}))


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main() -> None:
    for graph in GRAPHS:
        write(CORPUS / "ir" / f"{graph.__name__}.json", json.dumps(graph().ir()).encode())
    write(CORPUS / "safetensors" / "checkpoint.safetensors", checkpoint())
    with tempfile.TemporaryDirectory() as folder:
        for save, name in ((language_model, "llama.gguf"), (experts, "qwen3moe.gguf")):
            save(Path(folder, name))
            write(CORPUS / "gguf" / name, Path(folder, name).read_bytes())


if __name__ == "__main__":
    main()
