"""What crosses the hop between the router and an engine replica: one call in, compact chunks out.

Chunks are msgpack bytes, so that no pydantic object and no vLLM class is pickled per token. They leave out the prompt:
the router has it. Invariant: `decode_chunk(encode_chunk(output))` gives vLLM's `RequestOutput` back, prompt apart.
"""

import pickle
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.inputs import EngineInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

ADMITTED = b""
"""The first item of a decode stream that continues a hand-off: the engine owns the request and its KV from here on."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request for one engine. `prompt` holds token ids: no engine ever tokenizes."""

    request_id: str
    prompt: EngineInput
    params: SamplingParams
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of `AsyncLLM.add_request`, e.g. `reasoning_ended`."""


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """What a prefill engine hands over: where its KV lies, and how much of it came from its prefix cache."""

    kv_transfer_params: dict[str, Any]
    cached_tokens: int


class Piece(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What was added to one of a request's `n` sequences."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: bytes | None = None
    """Pickled `SampleLogprobs`."""


class Chunk(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What was added to a request since its last chunk."""

    pieces: list[Piece]
    finished: bool
    cached_tokens: int | None = None
    rest: bytes | None = None
    """Pickled (prompt_logprobs, metrics), when there are any."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)


def encode_chunk(output: RequestOutput) -> bytes:
    """One `RequestOutput` as bytes."""
    pieces = [
        Piece(
            piece.index,
            piece.text,
            list(piece.token_ids),
            piece.finish_reason,
            piece.stop_reason,
            piece.cumulative_logprob,
            pickle.dumps(piece.logprobs) if piece.logprobs else None,
        )
        for piece in output.outputs
    ]
    rest = (output.prompt_logprobs, output.metrics)
    return _encoder.encode(
        Chunk(pieces, output.finished, output.num_cached_tokens, pickle.dumps(rest) if any(rest) else None)
    )


def decode_chunk(data: bytes, call: EngineCall) -> RequestOutput:
    """The `RequestOutput` that `data` holds, with the prompt of `call`."""
    chunk = _decoder.decode(data)
    prompt_logprobs, metrics = pickle.loads(chunk.rest) if chunk.rest else (None, None)
    return RequestOutput(
        request_id=call.request_id,
        prompt=call.prompt.get("prompt"),  # type: ignore[arg-type]
        prompt_token_ids=call.prompt.get("prompt_token_ids"),  # type: ignore[arg-type]
        prompt_logprobs=prompt_logprobs,
        outputs=[
            CompletionOutput(
                index=piece.index,
                text=piece.text,
                token_ids=piece.token_ids,
                cumulative_logprob=piece.cumulative_logprob,
                logprobs=pickle.loads(piece.logprobs) if piece.logprobs else None,
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )
            for piece in chunk.pieces
        ],
        finished=chunk.finished,
        metrics=metrics,
        num_cached_tokens=chunk.cached_tokens,
    )
