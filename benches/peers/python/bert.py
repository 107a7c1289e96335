"""The model of `embed` as numpy arrays, and what its peers share."""

import json
import pathlib

import numpy

WAYS = {
    "padded": "all texts in one batch, padded",
    "sorted": "eight texts at a time, sorted by length, padded",
    "single": "one text at a time",
}


def load(folder):
    """Its config, and its weights by name: queries, keys and values of a layer by one multiplication, `qkv`."""
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = read_safetensors(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}.attention.self."
        for part in "weight", "bias":
            each = [weights.pop(f"{prefix}{name}.{part}") for name in ("query", "key", "value")]
            weights[f"{prefix}qkv.{part}"] = numpy.concatenate(each)
    return config, weights


def read_safetensors(file):
    """A header in JSON, then plain numbers: no package needed."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] == "F32":
            first, last = entry["data_offsets"]
            numbers = numpy.frombuffer(data[start + first : start + last], numpy.float32)
            tensors[name] = numbers.reshape(entry["shape"]).copy()
    return tensors
