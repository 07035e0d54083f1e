"""Writes the kinds of `.nemo` that NeMo makes and we only read, by the format's description alone.

Inputs are canonical weights. Nothing here calls the code under test.
"""

import io
import json
import re
import tarfile
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
import yaml

_ROLES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
TE_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_LEGACY_NAMES = {
    "embedding.": "language_model.embedding.",
    "decoder.": "language_model.encoder.",
    "output_layer.": "language_model.output_layer.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}


def write_archive(path, members, *, mode="w"):
    """A tar with ``./`` in front of every name, as NeMo packs it."""
    with tarfile.open(path, mode) as tar:
        root = tarfile.TarInfo("./")
        root.type = tarfile.DIRTYPE
        tar.addfile(root)
        for name, data in members.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def config_members(vocab_size, **keys):
    """``model_config.yaml`` with a byte-pair vocabulary of the wanted size beside it."""
    tokens = [*(f"t{i}" for i in range(vocab_size - 1)), "<|endoftext|>"]
    vocab = json.dumps({token: i for i, token in enumerate(tokens)})
    prefix = "0123456789abcdef0123456789abcdef_"
    tokenizer = {"library": "megatron", "type": "GPT2BPETokenizer", "model": None}
    tokenizer |= {name: f"nemo:{prefix}{file}" for name, file in _ROLES.items()}
    config = {
        **{"mcore_gpt": True, "transformer_engine": True, "target": "nemo.collections.gone.Gone"},
        **{"num_query_groups": None, "kv_channels": None},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
        **keys,
        "tokenizer": tokenizer,
    }
    return {
        "model_config.yaml": yaml.safe_dump(config).encode(),
        f"{prefix}vocab.json": vocab.encode(),
        f"{prefix}merges.txt": b"#version: 0.2\n",
    }


def saved(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def padded(weights, multiple):
    """Vocabulary rows padded (with rubbish, which no one may read) to a multiple."""
    result = dict(weights)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in result:
            rows = -result[name].shape[0] % multiple
            result[name] = F.pad(result[name], (0, 0, 0, rows), value=7.0)
    return result


def single_file(weights, names=None, prefix="model.", extra=True):
    """``model_weights.ckpt``; ``names`` replaces parts of names."""
    state = OrderedDict()
    for name, tensor in weights.items():
        for old, new in (names or {}).items():
            name = re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{new}", name)
        state[prefix + name] = tensor
    if extra:
        state[f"{prefix}decoder.layers.0.mlp.linear_fc1._extra_state"] = None
        state[f"{prefix}decoder.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"x")
        state[f"{prefix}decoder.layers.0.mlp.linear_fc2._extra_state"] = torch.empty(0).byte()
    return {"model_weights.ckpt": saved(state)}


def legacy_single_file(weights, unfused_gate=False):
    members = dict(weights)
    if unfused_gate:
        for name in [n for n in members if ".mlp.linear_fc1." in n]:
            gate, up = members[name].chunk(2)
            members[name] = gate
            members[name.replace("linear_fc1", "dense_h_to_4h_2")] = up
    return single_file(members, _LEGACY_NAMES, extra=False)


def rank_files(weights, architecture, tp, pp, style="tp_rank"):
    """One file a rank: layers renumbered in every stage, a tied copy in the last."""
    weights = padded(weights, architecture.make_vocab_size_divisible_by * tp)
    per_stage = architecture.num_layers // pp
    members = {}
    for stage in range(pp):
        for rank in range(tp):
            state = OrderedDict()
            for name, tensor in weights.items():
                match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
                if match:
                    if int(match[1]) // per_stage != stage:
                        continue
                    key = f"decoder.layers.{int(match[1]) % per_stage}.{match[2]}"
                elif stage != (0 if name.startswith("embedding") else pp - 1):
                    continue
                else:
                    key = name
                state[f"model.{key}"] = _rank_part(name, tensor, architecture, rank, tp)
            if architecture.tie_embeddings and stage == pp - 1 and pp > 1:
                embedding = weights["embedding.word_embeddings.weight"]
                state["model.output_layer.weight"] = embedding.chunk(tp)[rank].clone()
            folder = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}"
            folder = f"mp_rank_{rank:02d}" if style == "mp_rank" else folder
            members[f"{folder}/model_weights.ckpt"] = saved(state)
    return members


def _rank_part(name, tensor, architecture, rank, tp):
    rows = ("word_embeddings.", "output_layer.", "linear_qkv.", "linear_fc1.")
    if "linear_fc1" in name and architecture.activation in ("swiglu", "geglu"):
        gate, up = tensor.chunk(2)
        part = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    elif any(part in name for part in rows):
        part = tensor.chunk(tp)[rank]
    elif name.endswith(("linear_proj.weight", "linear_fc2.weight", "rm_head.weight")):
        part = tensor.chunk(tp, dim=1)[rank]
    else:
        part = tensor
    return part.clone()


def zarr_members(weights, architecture, row_chunks=2):
    """``model_weights/`` zarr v2: stacked layers, TE norm names, rows in chunks."""
    stacks = {}
    for name, tensor in padded(weights, architecture.make_vocab_size_divisible_by).items():
        match = re.match(r"decoder\.layers\.\d+\.(.*)", name)
        key = f"decoder.layers.{match[1]}" if match else name
        for old, new in TE_NAMES.items():
            key = key.replace(old, new)
        stacks.setdefault(key, []).append((tensor, bool(match)))
    members = {
        "model_weights/metadata.json": b'{"sharded_backend": "zarr", "sharded_backend_version": 1}',
        "model_weights/common.pt": saved({}),
        "model_weights/model.decoder.layers.mlp.linear_fc1._extra_state/shard_0_2.pt": b"junk",
    }
    for key, parts in stacks.items():
        stacked = parts[0][1]
        array = torch.stack([t for t, _ in parts]) if stacked else parts[0][0]
        members |= _zarr_array(f"model_weights/model.{key}", array, stacked, row_chunks)
    return members


def _zarr_array(folder, array, stacked, row_chunks):
    shape = list(array.shape)
    axis = 1 if stacked else 0
    chunks = [1] * stacked + shape[axis:]
    chunks[axis] = -(-shape[axis] // row_chunks)
    name = {torch.bfloat16: "bfloat16", torch.float32: "<f4"}[array.dtype]
    header = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": name, "order": "C"}
    header |= dict.fromkeys(("compressor", "filters", "fill_value"))
    members = {f"{folder}/.zarray": json.dumps(header).encode()}
    for position in np.ndindex(*[-(-s // c) for s, c in zip(shape, chunks, strict=True)]):
        where = tuple(slice(p * c, (p + 1) * c) for p, c in zip(position, chunks, strict=True))
        part = array[where]
        full = torch.zeros(chunks, dtype=array.dtype)
        full[tuple(slice(0, n) for n in part.shape)] = part
        raw = full.view(torch.int16 if array.dtype == torch.bfloat16 else torch.int32)
        members[f"{folder}/{'.'.join(map(str, position))}"] = raw.numpy().tobytes()
    return members
