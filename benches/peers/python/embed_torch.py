"""torch: BERT in its plain operations, with its fused attention, on the same weights."""

import json
import pathlib

import torch
from torch.nn.functional import embedding, gelu, layer_norm, linear, normalize, scaled_dot_product_attention


class Peer:
    version = torch.__version__

    def __init__(self, name):
        self.batching = name.split("-")[1]
        torch.inference_mode().__enter__()

    def prepare(self, texts):
        torch.set_num_threads(texts["threads"])
        folder = pathlib.Path(texts["model"])
        self.config = json.loads((folder / "config.json").read_text())
        self.dtype = torch.float64 if texts["exact"] else torch.float32
        self.weights = read_safetensors(folder / "model.safetensors", self.dtype)
        self.fuse_projections()
        self.tokens = texts["tokens"]
        self.batches = texts["batches"][self.batching]
        return {
            "padded": "BERT in torch operations, all texts in one batch, padded",
            "sorted": "BERT in torch operations, eight texts at a time, sorted by length, padded",
            "single": "BERT in torch operations, one text at a time",
        }[self.batching]

    def fuse_projections(self):
        """Queries, keys and values of a layer by one multiplication."""
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"encoder.layer.{layer}.attention.self."
            for part in "weight", "bias":
                each = [self.weights.pop(f"{prefix}{name}.{part}") for name in ("query", "key", "value")]
                self.weights[f"{prefix}qkv.{part}"] = torch.cat(each)

    def run(self):
        self.answer = torch.empty(len(self.tokens), self.config["hidden_size"], dtype=self.dtype)
        for batch in self.batches:
            self.answer[batch] = self.embed([self.tokens[text] for text in batch])

    def embed(self, tokens):
        lengths = [len(text) for text in tokens]
        longest = max(lengths)
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in tokens])
        if min(lengths) == longest:
            return normalize(self.hidden(ids, None).mean(1), dim=1)
        seen = torch.arange(longest) < torch.tensor(lengths)[:, None]
        hidden = self.hidden(ids, seen[:, None, None, :])
        weights = (seen / torch.tensor(lengths)[:, None]).to(self.dtype)
        return normalize(torch.bmm(weights[:, None], hidden)[:, 0], dim=1)

    def hidden(self, ids, mask):
        """The last hidden states, [texts, tokens, hidden]."""
        w, heads = self.weights, self.config["num_attention_heads"]
        texts, length = ids.shape
        x = embedding(ids, w["embeddings.word_embeddings.weight"])
        x = x + w["embeddings.position_embeddings.weight"][:length] + w["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x, "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"encoder.layer.{layer}."
            qkv = self.linear(x, prefix + "attention.self.qkv").view(texts, length, 3, heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            context = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(x.shape)
            x = self.norm(x + self.linear(context, prefix + "attention.output.dense"), prefix + "attention.output.LayerNorm")
            wide = gelu(self.linear(x, prefix + "intermediate.dense"))
            x = self.norm(x + self.linear(wide, prefix + "output.dense"), prefix + "output.LayerNorm")
        return x

    def linear(self, x, name):
        return linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def norm(self, x, name):
        weight, bias = self.weights[name + ".weight"], self.weights[name + ".bias"]
        return layer_norm(x, weight.shape, weight, bias, self.config["layer_norm_eps"])

    def output(self):
        return self.answer.numpy()


def read_safetensors(file, dtype):
    """A header in JSON, then plain numbers: no package needed."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] == "F32":
            first, last = entry["data_offsets"]
            numbers = torch.frombuffer(bytearray(data[start + first : start + last]), dtype=torch.float32)
            tensors[name] = numbers.view(entry["shape"]).to(dtype)
    return tensors
