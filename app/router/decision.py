"""The decision: does a request's prompt go to the prefill group, or straight to a decode replica? Always with a reason.

A pure function of plain data: no Ray, no vLLM, no clock.
"""

from dataclasses import dataclass
from enum import StrEnum


class Route(StrEnum):
    REMOTE = "remote"
    LOCAL = "local"


class Reason(StrEnum):
    """Why a request took its route: the value of the header, the log field and the metric label."""

    THRESHOLD = "prompt_at_or_above_threshold"
    ALWAYS = "always_disaggregate"
    BELOW_THRESHOLD = "prompt_below_threshold"
    COLOCATED = "colocated"
    SEVERAL_SEQUENCES = "several_sequences"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    NOT_TOKENS = "prompt_is_not_tokens"
    NO_PREFILL_REPLICA = "no_prefill_replica"
    PREFILL_FAILED = "prefill_failed"
    KV_TRANSFER_FAILED = "kv_transfer_failed"


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a request matters to the decision."""

    prompt_tokens: int
    sequences: int = 1
    """The request's `n`."""
    prompt_logprobs: bool = False
    beam_search: bool = False
    only_tokens: bool = True
    """False with images, audio or embeddings in the prompt."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's wishes; see `app.config.Routing`."""

    disaggregated: bool
    threshold_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    route: Route
    reason: Reason


def decide(shape: Shape, policy: Policy, prefill_alive: bool) -> Decision:
    """Choose the route of one request.

    Shapes that a hand-off cannot carry are served locally whatever their length: sequences of one prompt would share
    one hand-off whose KV is freed when the first of them has read it; prompt logprobs make the decode engine compute
    the whole prompt anyway; each step of a beam search is a request with a new prompt.
    """
    if not policy.disaggregated:
        return Decision(Route.LOCAL, Reason.COLOCATED)
    if shape.prompt_tokens < policy.threshold_tokens:
        return Decision(Route.LOCAL, Reason.BELOW_THRESHOLD)
    for cannot, reason in (
        (not shape.only_tokens, Reason.NOT_TOKENS),
        (shape.prompt_logprobs, Reason.PROMPT_LOGPROBS),
        (shape.beam_search, Reason.BEAM_SEARCH),
        (shape.sequences > 1, Reason.SEVERAL_SEQUENCES),
        (not prefill_alive, Reason.NO_PREFILL_REPLICA),
    ):
        if cannot:
            return Decision(Route.LOCAL, reason)
    return Decision(Route.REMOTE, Reason.ALWAYS if policy.threshold_tokens == 0 else Reason.THRESHOLD)


def is_fallback(reason: Reason) -> bool:
    """Whether a local route with this reason puts a long prompt on a decode replica that was meant for prefill."""
    return reason in (Reason.NO_PREFILL_REPLICA, Reason.PREFILL_FAILED, Reason.KV_TRANSFER_FAILED)
