"""Conversations: what decode has of a turn is loaded by prefill for the next one, as far as the tokens are the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.outputs import CompletionOutput  # noqa: F401  (vLLM's lazy modules, loaded before a request is made)
from vllm.v1.request import Request, RequestStatus

from pdstage.errors import UsageError
from pdstage.integrations.vllm.loads import kept_tokens, n_common
from pdstage.integrations.vllm.settings import Turns
from tests.engines.vllm.lives import TO_PREFILL, Pair, continuation, prompts, start
from tests.engines.vllm.models import CONSUMER, GEMMA, PRODUCER, QWEN
from tests.engines.vllm.test_caches import recurrent

BOTH = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 16}
FIRST = replace(PRODUCER, role="kv_both", options=BOTH)
SECOND = replace(CONSUMER, role="kv_both", n_blocks=48, options=BOTH)


def request(tokens, *, salt=None, images=None):
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=4))
        for at, name in (images or {}).items()
    ]
    return Request("r", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, mm_features=features)


def through_json(told, n):
    return json.loads(json.dumps(told | {"remote_num_tokens": n}))


def test_tokens_that_are_the_same_are_found():
    tokens = [at * 7 % 501 for at in range(1000)]
    told = through_json(kept_tokens(request(tokens), 900), 900)
    for asked, n in (
        (tokens, 900),  # up to the end of what is there
        ([*tokens[:900], 3, 4], 900),
        (tokens[:900], 900),
        (tokens[:899], 768),  # every 256 tokens before it
        ([*tokens[:600], 9, *tokens[601:]], 512),
        ([9, *tokens[1:]], 0),
    ):
        assert n_common(request(asked), told) == n
    assert n_common(request(tokens, salt="another tenant's"), told) == 0
    assert n_common(request(tokens), told | {"remote_num_tokens": 10**15}) == 768, "a number may be anybody's"


def test_other_images_are_other_tokens():
    tokens = [5] * 600
    told = through_json(kept_tokens(request(tokens, images={10: "a", 300: "b"}), 600), 600)
    for images, n in (({10: "a", 300: "b"}, 600), ({10: "a", 300: "c"}, 256), ({10: "c", 300: "b"}, 0), (None, 0)):
        assert n_common(request(tokens, images=images), told) == n


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"remote_token_digests": None, "remote_num_tokens": 10},
        {"remote_token_digests": "", "remote_num_tokens": 10},
        {"remote_token_digests": "00" * 8, "remote_num_tokens": "10"},
    ],
)
def test_who_does_not_say_what_there_is_is_not_believed(told):
    """vLLM's NixlConnector says how many tokens there are, and no more."""
    assert n_common(request(list(range(50))), told) == 0


def test_both_engines_must_be_both():
    assert Turns.of({}, "kv_producer") is None
    with pytest.raises(UsageError, match="bidirectional_kv_xfer with kv_role 'kv_producer'"):
        Turns.of({"bidirectional_kv_xfer": True}, "kv_producer")
    with pytest.raises(UsageError, match="decoder_kv_blocks_ttl"):
        Turns.of({"decoder_kv_blocks_ttl": 0}, "kv_both")


class Conversation(Pair):
    """vLLM's proxy for conversations: what decode answered of a turn goes to prefill with the next one."""

    def to_prefill(self, name, prompt, before=None):
        told = TO_PREFILL
        if before is not None:
            kept = self.d.params[before]
            assert kept["do_remote_decode"] and not kept["do_remote_prefill"]
            told = json.loads(json.dumps(kept)) | told
        self.p.add(name, prompt, 1, told)

    def turn(self, name, prompt, before=None, max_tokens=40):
        """The conversation so far, after this turn."""
        self.to_prefill(name, prompt, before)
        self.until(lambda: name in self.p.ended)
        self.decode(name, prompt, max_tokens)
        self.ends(name)
        assert self.d.ended[name] == "length"
        assert self.d.tokens[name] == continuation(prompt, max_tokens)
        return [*prompt, *self.d.tokens[name]]

    def computed(self, name, n_prompt):
        """Tokens of its prompt that prefill computed."""
        return n_prompt - int(self.p.call("ranks", "admissions")[0][name])

    def rests(self):
        """What is kept for next turns is given up."""
        self.d.call("reset")
        self.settle()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with start(tmp_path_factory.mktemp("shared"), FIRST, SECOND, kind=Conversation) as pair:
        yield pair


def test_prefill_computes_what_is_new_of_a_turn(engines):
    with engines(FIRST, replace(SECOND, prefix_caching=True), kind=Conversation) as pair:
        said = []
        for number, new in enumerate(prompts(100, 20, 10, seed=61)):
            before = len(said)
            prompt = [*said, *new]
            said = pair.turn(f"turn-{number}", prompt, f"turn-{number - 1}" if number else None)
            known = before - 1 if number else 0  # of the last token of an answer nobody has KV
            assert pair.computed(f"turn-{number}", len(prompt)) == len(prompt) - known
        pair.rests()


def test_tokens_that_came_back_otherwise_are_computed(pair):
    """A chat template that drops a part of the answer: what is before it is loaded, the rest is not."""
    (new,) = prompts(300, seed=62)
    said = pair.turn("answered", new)
    prompt = [*said[:310], *said[320:], 7, 8]
    pair.turn("otherwise", prompt, "answered")
    assert pair.computed("otherwise", len(prompt)) == len(prompt) - 256
    pair.rests()


def test_states_that_are_decoded_speculatively_are_kept_for_no_turn(sides):
    """After an answer the state may be in the block of any draft token."""
    with pytest.raises(UsageError, match="bidirectional_kv_xfer for a model with recurrent states"):
        sides("kv_both", recurrent("MAMBA2", 2), extra=BOTH)


def test_an_abort_of_a_turn_gives_back_what_decode_keeps(pair):
    (new,) = prompts(200, seed=63)
    said = pair.turn("asked", new)
    pair.to_prefill("aborted", [*said, 1, 2], "asked")
    pair.p.call("abort", "aborted")
    pair.settle()


def test_a_reset_of_the_cache_gives_back_what_decode_keeps(pair):
    """New weights may have been loaded. What prefill holds for decode is no cache, and stays."""
    new, other = prompts(200, 100, seed=66)
    pair.turn("kept", new)
    pair.prefill("handed", other)
    pair.answered("handed")
    for side in (pair.p, pair.d):
        assert side.call("busy"), "blocks are held"
        side.call("reset")
    pair.decode("handed", other, 1)
    pair.ends("handed")
    assert pair.d.tokens["handed"] == continuation(other, 1)
    assert pair.loaded("handed") == len(other) - 1
    pair.rests()


def test_what_nobody_asks_for_is_given_back_in_its_time(engines):
    consumer = replace(SECOND, options=BOTH | {"decoder_kv_blocks_ttl": 2.0})
    with engines(FIRST, consumer, kind=Conversation) as pair:
        (new,) = prompts(200, seed=64)
        said = pair.turn("first", new)
        assert pair.d.call("busy"), "its blocks are kept"
        pair.settle()
        prompt = [*said, 3]
        pair.to_prefill("second", prompt, "first")
        pair.answered("second")
        assert pair.computed("second", len(prompt)) == len(prompt)


@pytest.mark.parametrize("model", [pytest.param(GEMMA, marks=pytest.mark.full), QWEN], ids=["windows", "states"])
def test_hybrids_go_on_from_the_end_of_a_turn_alone(engines, model):
    with engines(FIRST, SECOND, model, Conversation) as pair:
        first, more = prompts(150, 20, seed=65)
        said = pair.turn("first", first)
        prompt = [*said, *more]
        said = pair.turn("second", prompt, "first")
        assert pair.computed("second", len(prompt)) <= len(more) + 1
        other = [*said[:100], 9, *said[101:]]
        pair.turn("third", other, "second")
        assert pair.computed("third", len(other)) >= len(other) - 1, "a window, or a state, is of the end"
        pair.rests()


def test_other_embeddings_are_other_tokens():
    """A chat with a part that is given as embeddings: its tokens are zeros there."""
    first, second = (request([5] * 300) for _ in range(2))
    for one, value in ((first, 1.0), (second, 2.0)):
        one.prompt_embeds, one.prompt_is_token_ids = torch.full((300, 4), value), [True] * 100 + [False] * 200
    assert n_common(second, through_json(kept_tokens(first, 300), 300)) == 0


def test_a_state_that_the_step_in_flight_goes_on_with_is_named_with_its_token(sides):
    """vLLM schedules asynchronously: a step is under way as an answer ends by a stop token, which it computes."""
    side = sides("kv_both", recurrent("MAMBA2", 0), extra=BOTH)
    ended = request(list(range(40)))
    ended.kv_transfer_params, ended.status = {"do_remote_prefill": True}, RequestStatus.FINISHED_STOPPED
    ended.append_output_token_ids(7)
    ended.num_computed_tokens, ended.num_in_flight_tokens = 41, 1
    blocks = tuple([3, 5, 2] if not group.is_state else [9] for group in side.groups)
    _, params = side.scheduler.request_finished_all_groups(ended, blocks)
    assert params["remote_num_tokens"] == 41
    assert n_common(request([*range(40), 7, 8]), through_json(params, 41)) == 41
