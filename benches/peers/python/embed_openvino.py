"""OpenVINO: BERT in its operations, compiled for the CPU, with inference precision f32 or, as a hint, bf16."""

import numpy
import openvino
from openvino import opset13

import bert
from worker import Unsupported


class Peer:
    version = openvino.__version__.split("-")[0]

    def __init__(self, name):
        # openvino-padded, or openvino-bf16-padded.
        *precision, self.batching = name.split("-")[1:]
        self.precision = precision[0] if precision else "f32"
        self.core = openvino.Core()
        if self.precision == "bf16" and "BF16" not in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise Unsupported("no bf16 on this machine, where it would compute in f32")

    def prepare(self, texts):
        if texts["exact"]:
            raise Unsupported("no f64")
        self.config, self.weights = bert.load(texts["model"])
        self.batches = texts["batches"][self.batching]
        self.inputs = [inputs([texts["tokens"][text] for text in batch]) for batch in self.batches]
        settings = {
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self.precision,
            "INFERENCE_NUM_THREADS": texts["threads"],
        }
        # One for batches of texts of one length, without a mask, and one for others.
        needed = {len(arrays) for arrays in self.inputs}
        compiled = {n: self.core.compile_model(self.model(n > 1), "CPU", settings) for n in needed}
        self.requests = {n: model.create_infer_request() for n, model in compiled.items()}
        self.answer = numpy.empty((len(texts["tokens"]), self.config["hidden_size"]), numpy.float32)
        in_use = {str(model.get_property("INFERENCE_PRECISION_HINT")) for model in compiled.values()}
        return f"BERT in opset 13, inference precision {', '.join(in_use)}, {bert.WAYS[self.batching]}"

    def run(self):
        for batch, arrays in zip(self.batches, self.inputs):
            request = self.requests[len(arrays)]
            request.infer(arrays, share_inputs=True)
            self.answer[batch] = request.get_output_tensor(0).data

    def model(self, masked):
        """Embeddings [texts, hidden] of ids [texts, tokens] and, if masked, of 1 where there is a token and 0 elsewhere."""
        ids = opset13.parameter([-1, -1], numpy.int32)
        seen = opset13.parameter([-1, 1, -1], numpy.float32) if masked else None
        hidden = self.hidden(ids, seen)
        if masked:
            sums = opset13.squeeze(opset13.matmul(seen, hidden, False, False), constant([1]))
            mean = opset13.divide(sums, opset13.reduce_sum(seen, constant([2]), False))
        else:
            mean = opset13.reduce_mean(hidden, constant([1]), False)
        # Its length, squared, is far above this.
        embeddings = opset13.normalize_l2(mean, constant([1]), 1e-12, "max")
        return openvino.Model([embeddings], [ids, seen] if masked else [ids])

    def hidden(self, ids, seen):
        """The last hidden states, [texts, tokens, hidden]."""
        words = opset13.gather(self.weight("embeddings.word_embeddings.weight"), ids, constant(0))
        length = opset13.gather(opset13.shape_of(ids), constant([1]), constant(0))
        positions = opset13.slice(
            self.weight("embeddings.position_embeddings.weight"), constant([0]), length, constant([1]), constant([0])
        )
        kind = opset13.constant(self.weights["embeddings.token_type_embeddings.weight"][0])
        x = self.norm(opset13.add(opset13.add(words, positions), kind), "embeddings.LayerNorm")
        # [texts, 1, 1, tokens]; true where there is a token.
        mask = opset13.convert(opset13.unsqueeze(seen, constant([1])), "boolean") if seen else None
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"encoder.layer.{layer}."
            context = self.attention(x, mask, prefix + "attention.self.qkv")
            x = opset13.add(x, self.linear(context, prefix + "attention.output.dense"))
            x = self.norm(x, prefix + "attention.output.LayerNorm")
            wide = opset13.gelu(self.linear(x, prefix + "intermediate.dense"), "erf")
            x = self.norm(opset13.add(x, self.linear(wide, prefix + "output.dense")), prefix + "output.LayerNorm")
        return x

    def attention(self, x, mask, name):
        width, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        parts = opset13.reshape(self.linear(x, name), constant([0, 0, 3, heads, width // heads]), True)
        parts = opset13.transpose(parts, constant([2, 0, 3, 1, 4]))
        q, k, v = [opset13.gather(parts, constant(part), constant(0)) for part in range(3)]
        out = opset13.scaled_dot_product_attention(q, k, v, *([mask] if mask else []), causal=False)
        return opset13.reshape(opset13.transpose(out, constant([0, 2, 1, 3])), constant([0, 0, width]), True)

    def linear(self, x, name):
        product = opset13.matmul(x, self.weight(name + ".weight"), False, True)
        return opset13.add(product, self.weight(name + ".bias"))

    def norm(self, x, name):
        normal = opset13.mvn(x, constant([-1]), True, self.config["layer_norm_eps"], "inside_sqrt")
        return opset13.add(opset13.multiply(normal, self.weight(name + ".weight")), self.weight(name + ".bias"))

    def weight(self, name):
        return opset13.constant(self.weights[name])

    def output(self):
        return self.answer


def inputs(tokens):
    """Ids, and which of them are tokens, if not all are."""
    lengths = numpy.array([len(text) for text in tokens])
    longest = lengths.max()
    ids = numpy.array([text + [0] * (longest - len(text)) for text in tokens], numpy.int32)
    seen = numpy.arange(longest) < lengths[:, None]
    return [ids] if seen.all() else [ids, seen[:, None].astype(numpy.float32)]


def constant(number):
    return opset13.constant(numpy.array(number, numpy.int64))
