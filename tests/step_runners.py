"""Runners for tests of the engine: one whose logits are a hash of the whole sequence, and one that
interprets a captured model. Both check every step record that they are given."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from metainfer.backends.triton.sampling import Draw
from metainfer.compiler.capture import capture_language_model
from metainfer.ir.errors import MetainferError
from metainfer.ir.flatten import flatten
from metainfer.ir.interpret import interpret
from metainfer.ir.step import STEP_FIELDS
from metainfer.models.decoder import Decoder
from metainfer.models.decoder_config import DecoderConfig
from metainfer.runtime.noise import Noise
from metainfer.runtime.sampling import SamplingParams, sample
from metainfer.runtime.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END_ID = 3


@dataclass
class Seen:
    """What a step looked like."""

    phase: str
    tokens: int
    sequences: int


class CheckingRunner:
    """Checks the record of each step and keeps a log."""

    plan_hash = "f00d"

    def __init__(
        self,
        *,
        max_tokens: int = 16,
        max_sequences: int = 4,
        max_context: int = 64,
        page_size: int = 4,
        num_pages: int = 65,
        vocab_size: int = len(LETTERS),
    ) -> None:
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.page_size = page_size
        self.num_pages = num_pages
        self.vocab_size = vocab_size
        self.log: list[Seen] = []

    def run(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        self.check(phase, tokens, step)
        self.log.append(Seen(phase, len(tokens), len(step["lengths"])))
        return self.compute(tokens, step)

    def compute(self, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        raise NotImplementedError

    def check(self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> None:
        assert set(step) == set(STEP_FIELDS)
        assert all(a.dtype == np.int32 for a in (tokens, *step.values()))
        starts, lengths, pages = step["starts"], step["lengths"], step["pages"]
        num_tokens, num_sequences = len(tokens), len(lengths)
        assert 1 <= num_sequences <= self.max_sequences
        assert num_tokens <= (self.max_tokens if phase == "prefill" else self.max_sequences)
        assert phase in ("prefill", "decode")
        assert phase == "prefill" or num_tokens == num_sequences == len(step["sample_rows"])
        assert starts[0] == 0
        assert starts[-1] == num_tokens
        assert (np.diff(starts) >= 1).all()
        assert len(starts) == num_sequences + 1
        assert lengths.max() <= self.max_context
        assert step["num_valid"].tolist() == [num_tokens, num_sequences]
        assert 1 <= len(step["sample_rows"]) <= num_sequences
        assert set(step["sample_rows"].tolist()) <= {int(s) - 1 for s in starts[1:]}
        assert pages.shape == (num_sequences, max(-(-int(n) // self.page_size) for n in lengths))
        owned = [p for b, n in enumerate(lengths) for p in pages[b, : -(-n // self.page_size)]]
        assert len(set(owned)) == len(owned)
        assert all(0 < p < self.num_pages for p in owned)
        assert sum(map(int, pages.ravel() != 0)) == len(owned)
        for b in range(num_sequences):
            at = np.arange(lengths[b] - (starts[b + 1] - starts[b]), lengths[b])
            rows = slice(starts[b], starts[b + 1])
            assert step["positions"][rows].tolist() == at.tolist()
            slots = pages[b, at // self.page_size] * self.page_size + at % self.page_size
            assert step["slots"][rows].tolist() == slots.tolist()


def hash_logits(history: Sequence[int], vocab_size: int) -> np.ndarray:
    seed = zlib.crc32(np.asarray(history, np.int32).tobytes())
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32)


class HashRunner(CheckingRunner):
    """Logits are a hash of the sequence, read back from the pages: any misplaced token shows."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.memory = np.full(self.num_pages * self.page_size, -1, np.int32)
        self.num_writes = 0
        self.fail_at = -1

    def compute(self, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        if len(self.log) == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        self.memory[step["slots"]] = tokens
        self.num_writes += len(tokens)
        pages = self.memory.reshape(self.num_pages, self.page_size)
        rows = []
        for row in step["sample_rows"]:
            b = int(np.searchsorted(step["starts"], row, side="right")) - 1
            history = pages[step["pages"][b]].ravel()[: step["lengths"][b]]
            rows.append(hash_logits(history.tolist(), self.vocab_size))
        return np.stack(rows)


class Landing:
    """A step of an `AheadHashRunner`: computed when somebody waits for it."""

    def __init__(self, runner: "AheadHashRunner", compute: Callable[[], np.ndarray]) -> None:
        self.runner = runner
        self.compute = compute
        self.found: np.ndarray | None = None

    def wait(self) -> None:
        self.runner.catch_up(self)

    def ids(self) -> np.ndarray:
        self.wait()
        assert self.found is not None
        if (self.found < 0).any():
            raise MetainferError("the logits are not finite")
        return self.found


class AheadHashRunner(HashRunner):
    """A device that is always late: steps are computed in order, none before it is waited for."""

    samples_on_device = True

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.queue: list[Landing] = []
        self.last = np.empty(0, np.int64)
        self.num_ahead = 0

    def start_sampled(
        self, phase: str, tokens: np.ndarray, step: Mapping[str, np.ndarray],
        draws: Sequence[Draw], names: Sequence[str], sources: np.ndarray | None = None,
    ) -> Landing:  # fmt: skip
        assert len(self.queue) < 2
        self.check(phase, tokens, step)
        assert len(draws) == len(step["sample_rows"])
        self.num_ahead += sources is not None
        # What the engine hands over may be its own buffers.
        held = {name: data.copy() for name, data in step.items()}

        def compute() -> np.ndarray:
            given = tokens if sources is None else np.maximum(self.last[sources], 0)
            self.log.append(Seen(phase, len(tokens), len(held["lengths"])))
            return self.choose(self.compute(given.astype(np.int32), held), draws)

        self.queue.append(Landing(self, compute))
        return self.queue[-1]

    def choose(self, logits: np.ndarray, draws: Sequence[Draw]) -> np.ndarray:
        if not np.isfinite(logits).all():
            return np.full(len(logits), -1)
        params = [SamplingParams(d.temperature, d.top_p, d.top_k, d.min_p) for d in draws]
        noises = [Noise() for _ in draws]
        for noise, draw in zip(noises, draws, strict=True):
            noise.key, noise.position = draw.key, draw.position
        return sample(logits, params, noises, [""] * len(draws))

    def catch_up(self, wanted: Landing) -> None:
        while wanted in self.queue:
            landing = self.queue.pop(0)
            self.last = landing.found = landing.compute()


SMALL = DecoderConfig(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=50,
    max_positions=64, windows=(0, 9),
)  # fmt: skip


class InterpretedRunner(CheckingRunner):
    """Interprets a small captured decoder with random weights."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(vocab_size=SMALL.vocab, **sizes)
        torch.manual_seed(7)
        self.model = Decoder(SMALL).eval()
        captured = capture_language_model(
            "small", lambda: Decoder(SMALL), dtype=torch.float32, max_tokens=self.max_tokens,
            max_sequences=self.max_sequences, max_pages=self.num_pages, kv_dtype="f32",
        )  # fmt: skip
        self.module = captured.module
        self.weights = {k: v.numpy() for k, v in self.model.state_dict().items()}
        self.states: dict[str, Mapping[str, np.ndarray]] = {
            name[1:]: {
                field: np.zeros((self.num_pages, self.page_size, *type_.concrete({})), np.float32)
                for field, type_ in value.state.fields
            }
            for name, value in flatten(captured.module).states.items()
        }

    def compute(self, tokens: np.ndarray, step: Mapping[str, np.ndarray]) -> np.ndarray:
        result = interpret(
            self.module, [tokens], self.weights.__getitem__, step=step, states=self.states
        )
        self.states = dict(result.states)
        return result.outputs[0]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Tokens by PyTorch, which computes the whole sequence anew for each."""
        tokens = list(prompt)
        for _ in range(count):
            positions = torch.arange(len(tokens), dtype=torch.int32)
            with torch.no_grad():
                logits = self.model(torch.tensor(tokens), positions)
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]


def letter_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """One token for each letter; END_ID ends an answer."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, None, frozenset({END_ID}), chat_template)
