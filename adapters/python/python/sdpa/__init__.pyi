from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypedDict, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

__all__ = ["alibi_slopes", "explain", "instruction_sets", "scaled_dot_product_attention"]
__version__: str

# float32, float16, bfloat16 of ml_dtypes, which numpy's types do not name, or uint16 with `uint16_as`.
_Floats: TypeAlias = NDArray[Any]
_Numbers: TypeAlias = Sequence[float] | NDArray[np.floating[Any]]

class _Options(TypedDict, total=False):
    softcap: float | None
    bias: _Floats | None
    alibi: _Numbers | None
    sinks: _Numbers | None
    window: tuple[int | None, int | None] | None
    alignment: Literal["top-left", "bottom-right"] | int | None
    kv_lens: Sequence[int] | NDArray[np.integer[Any]] | None
    dropout_seed: int | None
    precision: Literal["exact", "native", "accurate"] | None
    uint16_as: Literal["bfloat16"] | None
    out: _Floats | None
    threads: int | None
    isa: str | None

@overload
def scaled_dot_product_attention(
    query: _Floats,
    key: _Floats,
    value: _Floats,
    attn_mask: NDArray[np.bool_] | _Floats | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> _Floats: ...
@overload
def scaled_dot_product_attention(
    query: _Floats,
    key: _Floats,
    value: _Floats,
    attn_mask: NDArray[np.bool_] | _Floats | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[_Floats, NDArray[np.float32]]: ...
def explain(
    query: _Floats,
    key: _Floats,
    value: _Floats,
    attn_mask: NDArray[np.bool_] | _Floats | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[_Options],
) -> str: ...
def instruction_sets() -> list[str]: ...
def alibi_slopes(heads: int) -> list[float]: ...
