"""`metainfer run`: a plan answers a prompt, or computes arrays from arrays."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metainfer.cli.options import (
    Json,
    Mismatch,
    Nproc,
    OtherCheckpoint,
    PlanPath,
    Threads,
    TimeLimit,
    TraceFile,
    WeightsPath,
    check_plan_path,
)
from metainfer.cli.output import print_json, progress, show_notes, show_rate, show_seconds
from metainfer.cli.ranks import as_rank, is_quiet, start_ranks, starts_ranks
from metainfer.ir.errors import MetainferError

if TYPE_CHECKING:
    from metainfer.cli.tracing import TracingRunner
    from metainfer.runtime.engine import Engine
    from metainfer.runtime.load import LoadedModel
    from metainfer.runtime.requests import Completion
    from metainfer.runtime.sampling import SamplingParams

_LONGEST = 256  # tokens of an answer, unless told otherwise


def run(
    ctx: typer.Context,
    plan: PlanPath,
    prompt: Annotated[
        str | None, typer.Argument(help="what to answer; '-' reads standard input")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="as a chat message, if the model has a template"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message of the chat")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest answer; 256 or what fits if not given")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.0,
    top_p: Annotated[float, typer.Option(help="likeliest tokens up to this probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="so many likeliest tokens, 0 for all")] = 0,
    min_p: Annotated[float, typer.Option(help="tokens so likely beside the likeliest")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of the random numbers")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="text that ends the answer; may be repeated")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=FILE.npy", help="for a module: its inputs"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="for a module: where results go")
    ] = None,
    trace: TraceFile = None,
    threads: Threads = 0,
    nproc: Nproc = None,
    time_limit: TimeLimit = 60.0,
    weights: WeightsPath = None,
    allow_machine_mismatch: Mismatch = False,
    allow_checkpoint_mismatch: OtherCheckpoint = False,
    as_json: Json = False,
) -> None:
    """Run a plan: stream the answer to a prompt, or map arrays to arrays.

    A plan for several ranks is run by as many processes: --nproc starts them, or torchrun does.

    Example: metainfer run plans/smollm2-cpu "What is the capital of France?"
    """
    check_plan_path(plan)
    if starts_ranks(plan, nproc):
        if prompt is None and not inputs:
            raise _no_prompt()
        start_ranks(ctx, plan)
        return
    from metainfer.runtime.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        max_tokens=max_new_tokens or _LONGEST, stop=tuple(stop or ()),
    )  # fmt: skip
    with as_rank():
        text = None if is_quiet() else _prompt_text(prompt)
        with progress(f"loading {plan}"):
            from metainfer.runtime.load import load

            model = load(
                plan, weights, allow_machine_mismatch=allow_machine_mismatch,
                allow_checkpoint_mismatch=allow_checkpoint_mismatch, num_threads=threads,
                time_limit_s=time_limit,
            )  # fmt: skip
        with model:
            show_notes(model.notes)
            if not model.is_leader:
                model.follow()
            elif model.is_language_model:
                asked = _Asked(text, chat, system, params, max_new_tokens is None, trace, as_json)
                _refuse_arrays(inputs, output)
                _answer_prompt(model, asked)
                show_notes(model.run_notes)
            else:
                _refuse_prompt(text, model)
                from metainfer.cli.run_module import run_module

                run_module(model, inputs or [], output, trace, as_json)


@dataclass(frozen=True)
class _Asked:
    """What is asked of a language model."""

    text: str | None
    chat: bool | None
    system: str | None
    params: "SamplingParams"
    is_as_long_as_fits: bool
    trace: Path | None
    as_json: bool


def _answer_prompt(model: "LoadedModel", asked: _Asked) -> None:
    if asked.text is None:
        raise _no_prompt()
    params = asked.params
    tracer = _tracer(model, asked.trace)
    engine = model.engine() if tracer is None else _engine(tracer, model)
    ids = encode_prompt(engine, asked.text, asked.chat, asked.system)
    if asked.is_as_long_as_fits:
        room = engine.capacity.context - len(ids) + 1
        params = replace(params, max_tokens=min(_LONGEST, max(room, 1)))
    completion = _answer(engine, ids, params, stream=not asked.as_json)
    if asked.as_json:
        print_json(_plain(completion))
    else:
        typer.echo(_figures(completion), err=True)
    if tracer is not None and asked.trace is not None:
        from metainfer.cli.tracing import save_trace

        save_trace(model, tracer.events, asked.trace)


def _no_prompt() -> MetainferError:
    return MetainferError(
        "no prompt is given", advice='metainfer run PLAN "..."; - reads standard input'
    )


def _refuse_arrays(inputs: list[str] | None, output: Path | None) -> None:
    if inputs or output:
        raise MetainferError(
            "--input and --output are for modules, the plan is of a language model",
            advice='give a prompt: metainfer run PLAN "..."',
        )


def _prompt_text(prompt: str | None) -> str | None:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise MetainferError(f"standard input is no text: {error}", advice="give UTF-8") from error


def _refuse_prompt(text: str | None, model: "LoadedModel") -> None:
    if text is not None:
        names = ", ".join(model.plan.meta["model"]["inputs"])
        raise MetainferError(
            f"the plan is of a module, which takes arrays and no prompt: {names}",
            advice="metainfer run PLAN --input NAME=FILE.npy --output FILE.npz",
        )


def _tracer(model: "LoadedModel", file: Path | None) -> "TracingRunner | None":
    if file is None:
        return None
    from metainfer.cli.tracing import TracingRunner

    return TracingRunner(model)


def _engine(tracer: "TracingRunner", model: "LoadedModel") -> "Engine":
    from metainfer.runtime.engine import Engine

    return Engine(tracer, model.engine().tokenizer)


def encode_prompt(engine: "Engine", text: str, chat: bool | None, system: str | None) -> list[int]:
    """Tokens of the prompt, as a chat message or as it stands."""
    if engine.tokenizer is None:
        raise MetainferError(
            "there is no tokenizer for the plan's model",
            advice="put tokenizer.json beside the checkpoint, or call the engine with token ids",
        )
    has_template = engine.tokenizer.chat_template is not None
    as_chat = has_template if chat is None else chat
    if system is not None and not as_chat:
        raise MetainferError("--system needs a chat, this is raw text", advice="give --chat")
    if not as_chat:
        return engine.tokenizer.encode(text)
    from metainfer.runtime.chat import encode_chat

    messages = [{"role": "system", "content": system}] if system is not None else []
    return encode_chat(engine.tokenizer, [*messages, {"role": "user", "content": text}])


def _answer(
    engine: "Engine", ids: list[int], params: "SamplingParams", *, stream: bool
) -> "Completion":
    """Answer, printing pieces as they come if wanted."""
    last = None
    for piece in engine.stream(ids, params):
        if stream and piece.text:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        last = piece.completion or last
    if stream:
        typer.echo()
    assert last is not None  # the last piece has the completion
    return last


def _rates(completion: "Completion") -> tuple[float, float | None]:
    """Tokens a second of prefill and decode; None for an answer of one token."""
    times = completion.timings
    per_token = times.per_token_us
    return completion.prompt_tokens / times.prefill_us * 1e6, 1e6 / per_token if per_token else None


def _figures(completion: "Completion") -> str:
    prefill, decode = _rates(completion)
    ttft = show_seconds(completion.timings.first_token_us / 1e6)
    rate = f", {show_rate(decode)} tok/s" if decode else ""
    return (
        f"[prompt {completion.prompt_tokens} tokens, {show_rate(prefill)} tok/s; first token after "
        f"{ttft}; answer {completion.generated_tokens} tokens{rate}; {completion.finish_reason}; "
        f"plan {completion.plan_hash}]"
    )


def _plain(completion: "Completion") -> dict[str, Any]:
    from dataclasses import asdict

    prefill, decode = _rates(completion)
    rates = {"prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode}
    return {**asdict(completion), **rates}
