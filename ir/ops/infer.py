"""Type rules shared by many ops."""

from collections.abc import Sequence
from typing import cast

from metainfer.ir.dims import Dim, dim
from metainfer.ir.dtypes import BOOL, Block, Scalar, parse_dtype
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Attr
from metainfer.ir.ops.record import Attrs, Infer
from metainfer.ir.types import StateType, TensorType, Type


def tensor_of(type_: Type) -> TensorType:
    """The type as a tensor's, packing and sharding forgotten.

    Raises: TypeMismatch for a state.
    """
    if isinstance(type_, TensorType):
        return TensorType(type_.shape, type_.dtype)
    raise TypeMismatch(f"a state where a tensor is needed: {type_}")


def state_of(type_: Type) -> StateType:
    """The type as a state's.

    Raises: TypeMismatch for a tensor.
    """
    if isinstance(type_, StateType):
        return type_
    raise TypeMismatch(f"a tensor where a state is needed: {type_}")


def same_as(index: int = 0) -> Infer:
    """The result has the type of one operand."""
    return lambda types, attrs: (tensor_of(types[index]),)


def broadcast_shapes(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Numpy broadcasting over symbolic sizes.

    Raises: TypeMismatch if sizes differ and neither is 1.
    """
    rank = max(len(s) for s in shapes)
    one = dim(1)
    result: list[Dim] = []
    for axis in range(rank):
        sizes = {s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0} - {one}
        if len(sizes) > 1:
            inner = ", ".join(sorted(map(str, sizes)))
            raise TypeMismatch(f"sizes of dim {axis} differ: {inner}")
        result.append(sizes.pop() if sizes else one)
    return tuple(result)


def elementwise(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    """Broadcast operands of one dtype."""
    tensors = [tensor_of(t) for t in types]
    names = {t.dtype.name for t in tensors}
    if len(names) > 1:
        raise TypeMismatch(
            f"element types differ: {', '.join(sorted(names))}", advice="insert a cast"
        )
    return (TensorType(broadcast_shapes([t.shape for t in tensors]), tensors[0].dtype),)


def comparison(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    """Broadcast operands of one dtype to a bool tensor."""
    (result,) = elementwise(types, attrs)
    return (tensor_of(result).with_dtype(BOOL),)


def floats_only(infer: Infer) -> Infer:
    """Refuse operands that are not floating point."""

    def checked(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        for type_ in types:
            if not tensor_of(type_).dtype.is_float:
                raise TypeMismatch(f"needs floating point, got {type_}", advice="insert a cast")
        return infer(types, attrs)

    return checked


def numbers_only(infer: Infer) -> Infer:
    """Refuse truth values."""

    def checked(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
        for type_ in types:
            if tensor_of(type_).dtype == BOOL:
                raise TypeMismatch(f"needs numbers, got {type_}", advice="insert a cast")
        return infer(types, attrs)

    return checked


def integers_of(type_: Type, what: str) -> TensorType:
    """The type as that of a tensor of integers.

    Raises: TypeMismatch if it is not.
    """
    found = tensor_of(type_)
    if found.dtype.kind not in ("int", "uint"):
        raise TypeMismatch(f"{what} are integers, got {found}", advice="insert a cast")
    return found


def floats_of(type_: Type, what: str) -> TensorType:
    """The type as that of a tensor of floating-point numbers.

    Raises: TypeMismatch if it is not.
    """
    found = tensor_of(type_)
    if not found.dtype.is_float:
        raise TypeMismatch(f"{what} needs floating point, got {found}", advice="insert a cast")
    return found


def axis_of(value: Attr, rank: int) -> int:
    """A dim number, negative ones counted from the end.

    Raises: TypeMismatch if out of range.
    """
    axis = size_of(value).static
    if not -rank <= axis < rank:
        raise TypeMismatch(f"dim {axis} of a tensor of rank {rank}")
    return axis % rank


def sizes_of(value: Attr) -> tuple[Dim, ...]:
    """A tuple attribute as sizes.

    Raises: TypeMismatch if it holds anything else.
    """
    if not isinstance(value, tuple):
        raise TypeMismatch(f"a tuple of sizes is needed, got {value!r}")
    return tuple(size_of(v) for v in value)


def size_of(value: Attr) -> Dim:
    """An attribute as a size.

    Raises: TypeMismatch if it is neither a number nor a symbolic size.
    """
    if isinstance(value, Dim):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeMismatch(f"a size is needed, got {value!r}")
    return dim(value)


def ints_of(value: Attr) -> tuple[int, ...]:
    """A tuple attribute as whole numbers.

    Raises: TypeMismatch if it holds anything else.
    """
    if not isinstance(value, tuple) or any(type(v) is not int for v in value):
        raise TypeMismatch(f"a tuple of whole numbers is needed, got {value!r}")
    return cast(tuple[int, ...], value)


def scalar_of(value: Attr) -> Scalar:
    """A dtype attribute as a scalar type.

    Raises: TypeMismatch for block formats.
    """
    found = parse_dtype(str(value))
    if isinstance(found, Scalar):
        return found
    raise TypeMismatch(f"a scalar type is needed, got {found}")


def product_dtype(name: str, x: TensorType, weight: TensorType, asked: Attr) -> Scalar:
    """Element type of a product: that of its activations, or what quantized ones are asked for.

    Raises: TypeMismatch naming the op if plain activations name a type, or if those of a block
        format name none, have blocks over several rows, or meet a plain weight.
    """
    if isinstance(x.dtype, Scalar):
        if asked:
            raise TypeMismatch(
                f"{name} of {x.dtype} to {asked}", advice="only products of block formats name one"
            )
        return x.dtype
    if len(x.dtype.block) != 1:
        raise TypeMismatch(
            f"{name} of {x}: its blocks span rows", advice="quantize rows, or parts of them"
        )
    if not isinstance(weight.dtype, Block):
        raise TypeMismatch(
            f"{name} of {x.dtype} by {weight.dtype}", advice="dequantize the activations"
        )
    if not asked:
        raise TypeMismatch(f"{name} of {x.dtype}", advice='name the result\'s type: dtype = "bf16"')
    made = scalar_of(asked)
    if not made.is_float:
        raise TypeMismatch(f"{name} to {made}: wanted floating point")
    return made


def reduce_dims(types: Sequence[Type], attrs: Attrs) -> tuple[Type, ...]:
    """Drop (or keep as 1) the dims in ``dims``."""
    x = tensor_of(types[0])
    axes = {axis_of(a, x.rank) for a in ints_of(attrs["dims"])}
    if len(axes) != len(ints_of(attrs["dims"])):
        raise TypeMismatch(f"dims {attrs['dims']} name a dim twice")
    if attrs.get("keep", False):
        return (x.with_shape(tuple(dim(1) if i in axes else n for i, n in enumerate(x.shape))),)
    return (x.with_shape(tuple(n for i, n in enumerate(x.shape) if i not in axes)),)
