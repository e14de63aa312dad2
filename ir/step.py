"""The step record: what a language model's step knows about its tokens and sequences.

Tokens of all sequences of a step are flattened. A graph reads a field as a value named
``step.<field>``; symbols: T tokens, B sequences, P pages of the longest sequence, R sampled rows.

| field | meaning |
|---|---|
| positions[T] | position of each token in its sequence, from 0 |
| slots[T] | page * page_size + offset where the token's state goes; padded rows: the null page |
| starts[B+1] | first row of each sequence, and the end of the last one |
| lengths[B] | tokens of each sequence in its state, after this step |
| pages[B,P] | page table, filled up with the null page 0 |
| sample_rows[R] | rows whose logits are wanted |
| num_valid[2] | how many rows and how many sequences are not padding |
"""

from metainfer.ir.dims import dim
from metainfer.ir.dtypes import I32
from metainfer.ir.errors import TypeMismatch
from metainfer.ir.graph import Value
from metainfer.ir.types import Symbol, TensorType, tensor

STEP_FIELDS: dict[str, TensorType] = {
    "positions": tensor(I32, "T"),
    "slots": tensor(I32, "T"),
    "starts": tensor(I32, dim("B") + 1),
    "lengths": tensor(I32, "B"),
    "pages": tensor(I32, "B", "P"),
    "sample_rows": tensor(I32, "R"),
    "num_valid": tensor(I32, 2),
}
STEP_SYMBOLS = ("T", "B", "P", "R")
NULL_PAGE = 0


def step_value(field: str) -> Value:
    """The value of a field of the step record.

    Raises: TypeMismatch if there is no such field.
    """
    if field not in STEP_FIELDS:
        known = ", ".join(STEP_FIELDS)
        raise TypeMismatch(f"the step record has no field {field!r}", advice=f"it has: {known}")
    return Value(f"step.{field}", STEP_FIELDS[field])


def is_step_field(value: Value) -> bool:
    """Whether a value is a field of the step record, which is written before the step begins."""
    return value.name.startswith("step.")


def step_symbols(max_tokens: int, max_sequences: int, max_pages: int) -> tuple[Symbol, ...]:
    """Symbols of a step with the given upper bounds (all from 1)."""
    return (
        Symbol("T", 1, max_tokens),
        Symbol("B", 1, max_sequences),
        Symbol("P", 1, max_pages),
        Symbol("R", 1, max_sequences),
    )
