"""torch: BERT in its plain operations, with its fused attention, on the same weights."""

import torch
from torch.nn.functional import embedding, gelu, layer_norm, linear, normalize, scaled_dot_product_attention

import bert


class Peer:
    version = torch.__version__

    def __init__(self, name):
        self.batching = name.split("-")[1]
        torch.inference_mode().__enter__()

    def prepare(self, texts):
        torch.set_num_threads(texts["threads"])
        self.dtype = torch.float64 if texts["exact"] else torch.float32
        self.config, weights = bert.load(texts["model"])
        self.weights = {name: torch.from_numpy(weight).to(self.dtype) for name, weight in weights.items()}
        self.tokens = texts["tokens"]
        self.batches = texts["batches"][self.batching]
        return f"BERT in torch operations, {bert.WAYS[self.batching]}"

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
