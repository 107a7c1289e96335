"""OpenVINO: a model of one scaled_dot_product_attention, compiled for the CPU."""

import numpy
import openvino
from openvino import opset13

from case import Case, bf16_bits, bf16_numbers
from worker import Unsupported


class Peer:
    version = openvino.__version__.split("-")[0]

    def __init__(self):
        self.core = openvino.Core()

    def prepare(self, fields):
        case = self.case = Case(fields)
        if case.softcap:
            raise Unsupported("no softcap")
        if case.elements == "bf16" and "BF16" not in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise Unsupported("no bf16 on this machine, where it would compute in f32")
        how = f"scaled_dot_product_attention of opset 13, {case.elements}"
        q, k, v = case.q, case.k, case.v
        if case.group > 1:
            # Heads must be as many on either side, or one: key/value heads become batches. For one row a head, those
            # that share keys are rows of one head.
            q = q.reshape(-1, 1 if case.decode else case.group, case.group * case.q_len if case.decode else case.q_len,
                          case.head_dim)
            k, v = [x.reshape(-1, 1, case.kv_len, x.shape[-1]) for x in (k, v)]
            how += ", query heads as rows" if case.decode else ", key/value heads as batches"
        # Row-major copies, aligned as OpenVINO wants them, that outlive this function.
        self.tensors = [self.tensor(x) for x in (q, k, v)]
        inputs = [opset13.parameter(tensor.shape, tensor.element_type) for tensor in self.tensors]
        if case.window:
            # No option for it; a mask that all heads share.
            rows, keys = numpy.arange(case.q_len)[:, None], numpy.arange(case.kv_len)
            seen = (keys <= rows) & (rows - keys < case.window)
            mask = numpy.where(seen, numpy.float32(0), numpy.float32(-numpy.inf))
            self.tensors.append(self.tensor(mask))
            inputs.append(opset13.parameter(mask.shape, self.tensors[-1].element_type))
            how += ", window as a mask"
        node = opset13.scaled_dot_product_attention(*inputs, causal=case.causal and not case.window)
        settings = {
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": case.elements,
            "INFERENCE_NUM_THREADS": case.threads,
        }
        request = self.core.compile_model(openvino.Model([node], inputs), "CPU", settings).create_infer_request()
        for index, tensor in enumerate(self.tensors):
            request.set_input_tensor(index, tensor)
        self.request, self.run = request, request.infer
        return how

    def tensor(self, data):
        """One in elements of the case's type."""
        if self.case.elements == "f32":
            return openvino.Tensor(numpy.ascontiguousarray(data))
        return openvino.Tensor(bf16_bits(data), openvino.Shape(data.shape), openvino.Type.bf16)

    def output(self):
        out = self.request.get_output_tensor(0)
        return out.data if out.element_type == openvino.Type.f32 else bf16_numbers(out.data.view(numpy.uint16))
