"""ggml, llama.cpp's library: one ggml_flash_attn_ext on tensors of its own, on its CPU backend."""

import ctypes
import pathlib
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import numpy

from case import Case
from worker import Unsupported

LIBRARIES = pathlib.Path(__file__).parent.parent / "target" / "ggml" / "bin"

# ggml's enum ggml_type, whose numbers files carry: they stay.
F32, F16 = 0, 1
KEPT = {"f32": ("f32", F32), "bf16": ("bf16", 30), "f16": ("f16", F16), "int8": ("q8_0", 8)}

# Room for what a graph of a few tensors is made of; their elements are elsewhere.
OVERHEAD = 1 << 20


class InitParams(ctypes.Structure):
    """The one structure that its functions take by value."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


# Everything else is a pointer that is handed on. Library, function, result, arguments.
FUNCTIONS = [
    ("base", "ggml_version", c_char_p, []),
    ("base", "ggml_init", c_void_p, [InitParams]),
    ("base", "ggml_free", None, [c_void_p]),
    ("base", "ggml_blck_size", c_int64, [c_int]),
    ("base", "ggml_row_size", c_size_t, [c_int, c_int64]),
    ("base", "ggml_new_tensor_4d", c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64, c_int64]),
    ("base", "ggml_view_4d", c_void_p, [c_void_p] * 2 + [c_int64] * 4 + [c_size_t] * 4),
    ("base", "ggml_flash_attn_ext", c_void_p, [c_void_p] * 5 + [c_float] * 3),
    ("base", "ggml_new_graph", c_void_p, [c_void_p]),
    ("base", "ggml_build_forward_expand", None, [c_void_p, c_void_p]),
    (
        "base",
        "ggml_quantize_chunk",
        c_size_t,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(c_float)],
    ),
    ("base", "ggml_backend_alloc_ctx_tensors", c_void_p, [c_void_p, c_void_p]),
    ("base", "ggml_backend_buffer_free", None, [c_void_p]),
    ("base", "ggml_backend_tensor_set", None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    ("base", "ggml_backend_tensor_get", None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    ("base", "ggml_backend_supports_op", c_bool, [c_void_p, c_void_p]),
    ("base", "ggml_backend_graph_plan_create", c_void_p, [c_void_p, c_void_p]),
    ("base", "ggml_backend_graph_plan_free", None, [c_void_p, c_void_p]),
    ("base", "ggml_backend_graph_plan_compute", c_int, [c_void_p, c_void_p]),
    ("cpu", "ggml_backend_cpu_init", c_void_p, []),
    ("cpu", "ggml_backend_cpu_set_n_threads", None, [c_void_p, c_int]),
]


def load():
    """The functions by name."""
    if not (LIBRARIES / "libggml-cpu.so").exists():
        raise Unsupported(f"its libraries are not in {LIBRARIES}; python/setup.py builds them")
    libraries = {part: ctypes.CDLL(str(LIBRARIES / f"libggml-{part}.so")) for part in ("base", "cpu")}
    functions = {}
    for part, name, result, arguments in FUNCTIONS:
        function = functions[name.removeprefix("ggml_")] = getattr(libraries[part], name)
        function.restype, function.argtypes = result, arguments
    return functions


class Peer:
    def __init__(self):
        self.ggml = load()
        self.version = self.ggml["version"]().decode()
        self.backend = self.ggml["backend_cpu_init"]()
        self.context = self.buffer = self.plan = None

    def prepare(self, fields):
        case = self.case = Case(fields)
        name, kept = KEPT[case.elements]
        block = self.ggml["blck_size"](kept)
        if case.head_dim % block or case.value_dim % block:
            raise Unsupported(f"{name} takes rows of a multiple of {block}")
        self.release()
        self.context = self.ggml["init"](InitParams(OVERHEAD, None, True))
        q, k = self.tensor(F32, case.q.shape), self.tensor(kept, case.k.shape)
        v = self.first_columns(k, kept) if case.latent else self.tensor(kept, case.v.shape)
        mask = self.tensor(F16, (1, 1, case.q_len, case.kv_len)) if case.causal else None
        scale = case.head_dim**-0.5
        self.answer = self.ggml["flash_attn_ext"](self.context, q, k, v, mask, scale, 0.0, case.softcap or 0.0)
        if not self.ggml["backend_supports_op"](self.backend, self.answer):
            raise Unsupported(f"no {name}")
        graph = self.ggml["new_graph"](self.context)
        self.ggml["build_forward_expand"](graph, self.answer)
        self.buffer = self.ggml["backend_alloc_ctx_tensors"](self.context, self.backend)
        self.fill(q, F32, case.q)
        self.fill(k, kept, case.k)
        if not case.latent:
            self.fill(v, kept, case.v)
        if mask:
            self.fill(mask, F16, visible(case))
        self.ggml["backend_cpu_set_n_threads"](self.backend, case.threads)
        self.plan = self.ggml["backend_graph_plan_create"](self.backend, graph)
        notes = (", with a mask" if mask else "") + (", values a view of the keys" if case.latent else "")
        return f"ggml_flash_attn_ext, queries in f32, keys and values in {name}{notes}"

    def tensor(self, type_, shape):
        """A new one; ggml counts dimensions from the innermost."""
        return self.ggml["new_tensor_4d"](self.context, type_, *reversed(shape))

    def first_columns(self, k, type_):
        """The values in the keys, as llama.cpp takes them from its cache of latent attention."""
        case = self.case
        shape = case.value_dim, case.kv_len, case.kv_heads, case.batch
        row = self.ggml["row_size"](type_, case.head_dim)
        head = row * case.kv_len
        return self.ggml["view_4d"](self.context, k, *shape, row, head, head * case.kv_heads, 0)

    def fill(self, tensor, type_, data):
        """Converts f32 to the tensor's type, as llama.cpp does when it stores weights."""
        data = numpy.ascontiguousarray(data, numpy.float32)
        width, rows = data.shape[-1], data.size // data.shape[-1]
        elements = numpy.empty(rows * self.ggml["row_size"](type_, width), numpy.uint8)
        self.ggml["quantize_chunk"](type_, data.ctypes.data, elements.ctypes.data, 0, rows, width, None)
        self.ggml["backend_tensor_set"](tensor, elements.ctypes.data, 0, elements.size)

    def run(self):
        if self.ggml["backend_graph_plan_compute"](self.backend, self.plan) != 0:
            raise RuntimeError("ggml did not compute")

    def output(self):
        case = self.case
        out = numpy.empty((case.batch, case.q_len, case.heads, case.value_dim), numpy.float32)
        self.ggml["backend_tensor_get"](self.answer, out.ctypes.data, 0, out.nbytes)
        return out.transpose(0, 2, 1, 3)

    def release(self):
        """Gives back the last case's tensors."""
        if self.plan:
            self.ggml["backend_graph_plan_free"](self.backend, self.plan)
        if self.buffer:
            self.ggml["backend_buffer_free"](self.buffer)
        if self.context:
            self.ggml["free"](self.context)
        self.context = self.buffer = self.plan = None


def visible(case):
    """0 where a row sees a key, −∞ elsewhere."""
    rows, keys = numpy.arange(case.q_len)[:, None], numpy.arange(case.kv_len)
    seen = (keys <= rows) & (rows - keys < (case.window or case.kv_len))
    return numpy.where(seen, numpy.float32(0), numpy.float32(-numpy.inf))
