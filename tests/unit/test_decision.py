import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.router.decision import Decision, Policy, Reason, Route, Shape, decide, is_fallback

PD = Policy(disaggregated=True, threshold_tokens=100)


@pytest.mark.parametrize(
    ("shape", "policy", "alive", "expected"),
    [
        (Shape(99), PD, True, (Route.LOCAL, Reason.BELOW_THRESHOLD)),
        (Shape(100), PD, True, (Route.REMOTE, Reason.THRESHOLD)),
        (Shape(1), Policy(True, 0), True, (Route.REMOTE, Reason.ALWAYS)),
        (Shape(5000), Policy(False, 100), True, (Route.LOCAL, Reason.COLOCATED)),
        (Shape(100, sequences=2), PD, True, (Route.LOCAL, Reason.SEVERAL_SEQUENCES)),
        (Shape(100, prompt_logprobs=True), PD, True, (Route.LOCAL, Reason.PROMPT_LOGPROBS)),
        (Shape(100, beam_search=True), PD, True, (Route.LOCAL, Reason.BEAM_SEARCH)),
        (Shape(100, only_tokens=False), PD, True, (Route.LOCAL, Reason.NOT_TOKENS)),
        (Shape(100), PD, False, (Route.LOCAL, Reason.NO_PREFILL_REPLICA)),
        (Shape(99), PD, False, (Route.LOCAL, Reason.BELOW_THRESHOLD)),
    ],
)
def test_each_shape_takes_its_route_with_its_reason(shape, policy, alive, expected):
    assert decide(shape, policy, alive) == Decision(*expected)


shapes = st.builds(
    Shape,
    prompt_tokens=st.integers(1, 10_000),
    sequences=st.integers(1, 4),
    prompt_logprobs=st.booleans(),
    beam_search=st.booleans(),
    only_tokens=st.booleans(),
)


@given(shapes, st.integers(0, 10_000), st.booleans())
def test_a_remote_route_is_only_for_long_plain_prompts_with_a_live_prefill_replica(shape, threshold, alive):
    decision = decide(shape, Policy(True, threshold), alive)
    carried = shape.sequences == 1 and shape.only_tokens and not shape.prompt_logprobs and not shape.beam_search
    assert (decision.route is Route.REMOTE) == (shape.prompt_tokens >= threshold and carried and alive)


@given(shapes, st.integers(0, 10_000), st.booleans())
def test_a_short_prompt_never_uses_the_fallback_budget(shape, threshold, alive):
    decision = decide(shape, Policy(True, threshold), alive)
    assert not (is_fallback(decision.reason) and shape.prompt_tokens < threshold)
