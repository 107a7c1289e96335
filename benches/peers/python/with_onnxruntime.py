"""ONNX Runtime: its contributed operators, inputs and outputs bound to memory that stays where it is."""

import numpy
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from case import Case, bf16_bits, bf16_numbers, packed, unpacked
from worker import Unsupported


class Peer:
    version = onnxruntime.__version__

    def prepare(self, fields):
        case = self.case = Case(fields)
        if case.causal or case.group > 1:
            how = self.prepare_grouped()
        else:
            how = self.prepare_plain()
        # The arrays of a case are the largest there are, and packed by now.
        del case.q, case.k, case.v
        return how

    def prepare_plain(self):
        """Bidirectional. (Its causal form has `unidirectional`, which is slower than GroupQueryAttention.)"""
        case = self.case
        inputs = {"q": packed(case.q), "k": packed(case.k), "v": packed(case.v)}
        attributes = {"num_heads": case.heads}
        self.session("MultiHeadAttention", inputs, attributes, ["y"])
        self.bind_output("y", (case.batch, case.q_len, case.heads * case.value_dim))
        return "MultiHeadAttention, bound"

    def prepare_grouped(self):
        """Causal. Keys and values go to a cache that is as long as they are and is updated in place."""
        case = self.case
        if case.head_dim != case.value_dim:
            raise Unsupported("head_dim and value_dim must be equal")
        if case.q_len not in (1, case.kv_len):
            raise Unsupported("a whole prompt or one row")
        # In decoding the last key and value are the new ones; the cache has room for them.
        new = slice(case.kv_len - case.q_len, None)
        inputs = {
            "q": packed(case.q),
            "k": packed(case.k[:, :, new]),
            "v": packed(case.v[:, :, new]),
            "past_k": case.k.copy(),
            "past_v": case.v.copy(),
            "last": numpy.full([case.batch], case.kv_len - 1, numpy.int32),
            "total": numpy.array(case.kv_len, numpy.int32),
        }
        attributes = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
        if case.window:
            attributes["local_window_size"] = case.window
        if case.softcap:
            attributes["softcap"] = case.softcap
        self.session("GroupQueryAttention", inputs, attributes, ["y", "now_k", "now_v"])
        self.bind_output("y", (case.batch, case.q_len, case.heads * case.value_dim))
        for now, past in ("now_k", "past_k"), ("now_v", "past_v"):
            self.binding.bind_ortvalue_output(now, self.values[past])
        return "GroupQueryAttention, bound, cache in place"

    def session(self, operator, inputs, attributes, outputs):
        """A model of one node, and its inputs bound."""
        self.elements = {"f32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16}[self.case.elements]
        types = {"float32": self.elements, "int32": TensorProto.INT32}
        info = [helper.make_tensor_value_info(n, types[str(x.dtype)], x.shape) for n, x in inputs.items()]
        node = helper.make_node(operator, list(inputs), outputs, domain="com.microsoft", **attributes)
        shapeless = [helper.make_tensor_value_info(name, self.elements, None) for name in outputs]
        graph = helper.make_graph([node], "one node", info, shapeless)
        operators = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=operators, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.case.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        providers = ["CPUExecutionProvider"]
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
        except NoKernel:
            raise Unsupported(f"no {operator} in {self.case.elements}") from None
        self.binding = session.io_binding()
        # These are views of the arrays, which must live as long.
        self.arrays, self.values = {}, {}
        for name, array in inputs.items():
            self.bind(name, array)
            self.binding.bind_ortvalue_input(name, self.values[name])
        self.run = lambda: session.run_with_iobinding(self.binding)

    def bind_output(self, name, shape):
        self.bind(name, numpy.zeros(shape, numpy.float32))
        self.binding.bind_ortvalue_output(name, self.values[name])

    def bind(self, name, array):
        """Keeps an array, floats in the case's type, and a view of it."""
        if array.dtype == numpy.float32 and self.elements == TensorProto.BFLOAT16:
            array = bf16_bits(array)
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, self.elements)
        else:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        self.arrays[name], self.values[name] = array, value

    def output(self):
        y = self.arrays["y"]
        return unpacked(y if y.dtype == numpy.float32 else bf16_numbers(y), self.case.heads)
