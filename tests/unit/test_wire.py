import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from app.engines.wire import decode_chunk, encode_chunk
from tests.unit.fakes import call


@pytest.mark.parametrize(
    ("piece", "finished", "prompt_logprobs"),
    [
        (CompletionOutput(0, " a", [1, 2], None, None), False, None),
        (CompletionOutput(1, "", [], -1.5, [{7: Logprob(-0.5, 1, "x")}], finish_reason="stop", stop_reason="."), True, None),
        (CompletionOutput(0, "é", (3,), None, None, finish_reason="length", stop_reason=12), True, [None, {1: Logprob(-1.0)}]),
    ],
)  # fmt: skip
def test_a_chunk_comes_back_as_the_output_it_was(piece, finished, prompt_logprobs):
    sent = RequestOutput("req-1", None, None, prompt_logprobs, [piece], finished, num_cached_tokens=16)
    request = call()
    got = decode_chunk(encode_chunk(sent), request)
    (back,) = got.outputs
    piece.token_ids = list(piece.token_ids)
    assert back == piece
    assert (got.finished, got.num_cached_tokens, got.prompt_logprobs) == (finished, 16, prompt_logprobs)
    assert got.prompt_token_ids == request.prompt["prompt_token_ids"]
