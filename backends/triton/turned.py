"""Launches of products of few rows whose results are queries, keys and values: turned, written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metainfer.backends.kernel import Constraint, Query
from metainfer.backends.torch.call import TorchCall
from metainfer.backends.triton.emit.source import body_of
from metainfer.backends.triton.emit.tiles import rotary
from metainfer.backends.triton.gated import KEPT, product_type
from metainfer.backends.triton.launch import Launch
from metainfer.backends.triton.linear import Storage, Tile, activations_of
from metainfer.backends.triton.scratch import carve
from metainfer.backends.triton.skinny import form_of, none_arrived, scratch_of, shape_of, split_of
from metainfer.ir.errors import Unsupported
from metainfer.ir.graph import Graph, Op
from metainfer.ir.step import is_step_field

PLAIN = "linear_rope_kv_write"
NORMED = "linear_qk_norm_rope_kv_write"


@dataclass(frozen=True)
class Heads:
    """What a group's body says of its heads.

    Attributes:
        queries: query heads.
        keys: key heads, and value heads.
        width: numbers of a head.
        eps: of the norms of queries and keys; None without norms.
        turn: the rope op of the queries.
    """

    queries: int
    keys: int
    width: int
    eps: float | None
    turn: Op


def heads_of(body: Graph) -> Heads:
    """Heads of a group of one of these kinds.

    Raises: Unsupported if queries, keys and values are not alike, or turn in part.
    """
    turns = [o for o in body.ops if o.name == "rope"]
    write = next(o for o in body.ops if o.name == "kv_write")
    norms = [o for o in body.ops if o.name == "rms_norm"]
    _, queries, width = (n.static if n.is_static else 0 for n in turns[0].result.tensor.shape)
    _, keys, other = (n.static if n.is_static else 0 for n in write.operands[2].tensor.shape)
    _, turned = rotary(turns[0])
    if other != width or turned != width or bool(turns[0].attr.get("interleaved", False)):
        raise Unsupported(
            f"heads of {width}, values of {other}, {turned} numbers turned: wanted the same, "
            "turned in halves"
        )
    eps = float(norms[0].attr["eps"]) if norms else None  # type: ignore[arg-type]
    return Heads(queries, keys, width, eps, turns[0])


def whole_heads(tile: Tile) -> Constraint:
    """Tiles lie within heads, and hold whole ones where they are normed."""

    def check(query: Query) -> str | None:
        try:
            heads = heads_of(body_of(query.op))
        except Unsupported as error:
            return str(error)
        fits = heads.width % tile.columns == 0
        if heads.eps is not None:
            fits = heads.width == tile.columns
        return None if fits else f"heads of {heads.width}"

    return Constraint(f"heads in tiles of {tile.columns} numbers, whole where normed", check)


def launches(storage: Storage, tile: Tile) -> Callable[[TorchCall], Sequence[Launch]]:
    """Launches of a group by one storage and tile."""

    def made(call: TorchCall) -> Sequence[Launch]:
        # Imported where it is launched: templates need Triton.
        import triton.language as tl

        from metainfer.backends.triton.templates.gemm_skinny_turned import gemm_skinny_turned

        x, q = call.inputs[0], call.outputs[0]
        *norms, positions, state, slots = call.inputs[2:]
        places = call.op.operands[-3:]
        heads = heads_of(body_of(call.op))
        rows, inner = x.shape
        columns = (heads.queries + 2 * heads.keys) * heads.width
        if rows == 0:
            return ()
        pointers, form = form_of(storage, tile, call.inputs[1])
        tiles = tile.programs(rows, columns)
        split = split_of(tile, tiles, inner)
        scratch = carve(call.workspace, scratch_of(tile, tiles, split), x.device)
        assert call.rope is not None
        cos, sin = call.rope(*rotary(heads.turn))
        q_norm, k_norm = norms or (q, q)
        return (
            Launch(
                gemm_skinny_turned,
                (tiles * split,),
                {
                    "x": x, "weight": pointers, "q": q, "k": state["k"], "v": state["v"],
                    "q_norm": q_norm, "k_norm": k_norm, "positions": positions, "slots": slots,
                    "cos": cos, "sin": sin, "partial": scratch[0] if scratch else q,
                    "arrived": none_arrived(tiles, x.device) if scratch else q,
                    "rows": rows, "columns": columns, "inner": inner,
                },
                {
                    **form, **shape_of(tile, split, inner),
                    "KEPT": getattr(tl, KEPT[product_type(call.op)]),
                    "H": heads.queries, "G": heads.keys, "D": heads.width,
                    "NORMED": heads.eps is not None, "EPS": heads.eps or 0.0,
                    "SETTLED": is_step_field(places[0]) and is_step_field(places[2]),
                },
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=activations_of(x).matrix,
            ),
        )  # fmt: skip

    return made
