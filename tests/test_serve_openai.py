"""The `openai` client, as it is, against a live server: what it offers works, and failures are its own exceptions."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter

import pytest
from serving import Metrics, check_nothing_in_use, needed, running_server, wait_until

from minibatcher import LLM, SamplingParams

openai = needed("openai")

PROMPT = "First Citizen:"
MESSAGES = [{"role": "user", "content": "Good morrow! What is the news at court, and who shall be our king?"}]
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}  # runs until somebody ends it
ONE_AT_A_TIME = ("--max-num-seqs", "1", "--max-waiting-requests", "1")


@pytest.fixture(scope="module")
def url():
    with running_server() as url:
        yield url


def client_of(url: str, api_key: str = "any", **options):
    return openai.OpenAI(base_url=url + "/v1", api_key=api_key, max_retries=0, timeout=60, **options)


def async_client_of(url: str):
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(url):
    with client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def llm():
    """The same model in this process."""
    return LLM("bard")


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(model="bard", prompt=prompt, **options)


def chat(client, messages=MESSAGES, **options):
    return client.chat.completions.create(model="bard", messages=messages, **options)


# Completions


def test_a_completion_is_what_the_engine_says_in_process(client, llm):
    (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=24))
    answer = complete(client, max_tokens=24, temperature=0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "bard"
    assert abs(answer.created - time.time()) < 3600
    (choice,) = answer.choices
    assert choice.index == 0 and choice.text == expected.text and choice.finish_reason == "length"
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_prompt_tokens, 24)
    assert usage.total_tokens == usage.prompt_tokens + 24


def test_without_max_tokens_a_completion_has_sixteen(client):
    assert complete(client, temperature=0, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


def test_several_prompts_and_token_ids(client, llm):
    prompts = [PROMPT, "ROMEO: But soft, what light", "JULIET: What's in a name?"]
    expected = [c.text for c in llm.generate(prompts, SamplingParams(max_tokens=12))]
    as_texts = complete(client, prompts, max_tokens=12, temperature=0)
    as_ids = complete(client, [llm.engine.encode(p) for p in prompts], max_tokens=12, temperature=0)
    for answer in (as_texts, as_ids):
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == expected
    alone = complete(client, llm.engine.encode(PROMPT), max_tokens=12, temperature=0)
    assert alone.choices[0].text == expected[0]


def test_a_stream_brings_the_same_text_token_by_token(client):
    whole = complete(client, max_tokens=24, temperature=0)
    chunks = list(complete(client, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    *parts, last = chunks
    assert len(parts) == 24 and all(len(part.choices) == 1 and part.usage is None for part in parts)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts] == [None] * 23 + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_usage_in_each_chunk_where_asked_and_nowhere_where_not(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, max_tokens=5, temperature=0, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 5]
    chunks = list(complete(client, max_tokens=5, temperature=0, stream=True))
    assert len(chunks) == 5 and not any(chunk.usage for chunk in chunks)


@pytest.mark.parametrize("stop", ["king", ["queen", " the king"], ["nowhere in it", ",\nAnd he"]])
def test_a_stop_string_ends_the_text_before_itself_in_a_stream_too(client, stop):
    whole = complete(client, max_tokens=24, temperature=0).choices[0].text
    ends = min(whole.index(s) for s in ([stop] if isinstance(stop, str) else stop) if s in whole)
    answer = complete(client, max_tokens=24, temperature=0, stop=stop)
    assert answer.choices[0].text == whole[:ends] and answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason in stop
    chunks = list(complete(client, max_tokens=24, temperature=0, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:ends]
    assert len(chunks) == answer.usage.completion_tokens  # one each, held back or not
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_n_choices_each_with_a_seed_of_its_own(client):
    many = complete(client, max_tokens=16, temperature=1.0, seed=7, n=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    alone = [complete(client, max_tokens=16, temperature=1.0, seed=7 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in many.choices] == alone and len(set(alone)) == 3
    greedy = complete(client, max_tokens=16, temperature=0, n=2)
    assert greedy.choices[0].text == greedy.choices[1].text


def test_choices_of_two_prompts_are_numbered_and_streamed_side_by_side(client):
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "n": 2}
    whole = complete(client, [PROMPT, "ROMEO:"], **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for chunk in complete(client, [PROMPT, "ROMEO:"], stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_without_a_seed_two_answers_differ_and_with_one_they_are_equal(client):
    draw = lambda **seed: complete(client, max_tokens=24, temperature=1.0, **seed).choices[0].text  # noqa: E731
    assert draw(seed=11) == draw(seed=11) != draw(seed=12)
    assert len({draw() for _ in range(3)}) > 1


# Log-probabilities


def test_log_probabilities_of_a_completion(client, llm):
    answer = complete(client, max_tokens=6, temperature=0, logprobs=3, extra_body={"return_token_ids": True})
    choice, kept = answer.choices[0], answer.choices[0].logprobs
    assert "".join(kept.tokens) == choice.text
    assert kept.text_offset == [len("".join(kept.tokens[:i])) for i in range(6)]
    assert len(kept.token_logprobs) == len(kept.top_logprobs) == 6
    for token, logprob, top in zip(kept.tokens, kept.token_logprobs, kept.top_logprobs):
        assert len(top) == 3 and max(top, key=top.get) == token and top[token] == logprob < 0  # greedy
        assert sum(map(math.exp, top.values())) <= 1 + 1e-6
    (expected,) = run_with_logprobs(llm, choice.token_ids, 3)
    assert kept.token_logprobs == pytest.approx([entry.logprob for entry in expected], abs=1e-4)


def run_with_logprobs(llm, token_ids, k):
    """Of the engine in this process, for the same prompt; its tokens must be these."""
    from minibatcher.request import Request

    request = Request("r", llm.engine.encode(PROMPT), SamplingParams(max_tokens=len(token_ids), logprobs=k))
    llm.engine.run([request])
    assert request.output_token_ids == token_ids
    return [request.logprobs]


def test_log_probabilities_of_a_chat(client):
    answer = chat(client, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    bare = chat(client, max_tokens=6, temperature=0, logprobs=True)
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * len(entries)
    assert [entry.logprob for entry in bare.choices[0].logprobs.content] == pytest.approx([e.logprob for e in entries])


def test_log_probabilities_in_streams_are_those_of_the_whole(client):
    options = {"max_tokens": 6, "temperature": 0}
    whole = complete(client, logprobs=2, **options).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=2, stream=True, **options)]
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert [offset for chunk in chunks for offset in chunk.text_offset] == whole.text_offset
    streamed = [logprob for chunk in chunks for logprob in chunk.token_logprobs]
    assert streamed == pytest.approx(whole.token_logprobs, abs=1e-4)

    whole = chat(client, logprobs=True, top_logprobs=1, **options).choices[0].logprobs.content
    chunks = chat(client, logprobs=True, top_logprobs=1, stream=True, **options)
    streamed = [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


# Chat


def test_a_chat_and_its_stream(client):
    answer = chat(client, max_tokens=24, temperature=0)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")

    chunks = list(chat(client, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}))
    first, *parts, last = chunks
    assert all(chunk.object == "chat.completion.chunk" and chunk.id == first.id for chunk in chunks)
    assert first.choices[0].delta.role == "assistant" and not first.choices[0].delta.content
    assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
    assert [p.choices[0].finish_reason for p in parts if p.choices[0].finish_reason] == [choice.finish_reason]
    assert last.choices == [] and last.usage == answer.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


def test_a_chat_ends_by_itself_and_without_max_tokens_may_fill_the_context(client):
    answer = chat(client, temperature=0)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 1
    story = [{"role": "user", "content": "so " * 1800}]
    long = chat(client, story, temperature=0, extra_body={"ignore_eos": True})
    assert long.choices[0].finish_reason == "length" and 100 < long.usage.completion_tokens < 300
    assert long.usage.total_tokens == client.models.retrieve("bard").max_model_len


def test_a_chat_of_several_turns_and_parts_and_the_newer_name_of_max_tokens(client):
    messages = [
        {"role": "system", "content": "You speak as in a play."},
        *MESSAGES,
        {"role": "assistant", "content": "The king is dead, my lord."},
        {"role": "user", "content": [{"type": "text", "text": "And who "}, {"type": "text", "text": "did it?"}]},
    ]
    answer = chat(client, messages, max_completion_tokens=4, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 4
    joined = [*messages[:-1], {"role": "user", "content": "And who did it?"}]
    assert chat(client, joined, max_tokens=4).usage.prompt_tokens == answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens > chat(client, max_tokens=4).usage.prompt_tokens  # all turns are read


def test_n_and_stop_of_a_chat(client):
    answer = chat(client, n=2, temperature=1.0, seed=5, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    text = chat(client, temperature=0, max_tokens=24).choices[0].message.content
    stop = text[3:7]
    stopped = chat(client, temperature=0, max_tokens=24, stop=stop).choices[0]
    assert stopped.message.content == text[: text.index(stop)] and stopped.finish_reason == "stop"


# Usage, models, health


def test_usage_tells_the_cached_tokens_of_a_repeated_prompt(client):
    prompt = "A prompt that nobody has asked before, and long enough to fill some blocks of the cache. " * 4
    cached = [complete(client, prompt, max_tokens=2).usage for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens > 0 for usage in cached] == [False, True]
    assert cached[1].prompt_tokens_details.cached_tokens < cached[1].prompt_tokens == cached[0].prompt_tokens


def test_models(client):
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("bard", "model", "minibatcher")
    assert model.max_model_len == 2048 and model.vocab_size == 2048
    assert client.models.retrieve("bard") == model


def test_raw_answers_carry_the_id_of_the_request(client):
    raw = client.completions.with_raw_response.create(
        model="bard", prompt=PROMPT, max_tokens=1, extra_headers={"X-Request-Id": "from-the-client-1"}
    )
    assert raw.headers["x-request-id"] == "from-the-client-1" and raw.parse().usage.completion_tokens == 1


# Errors


WRONG = {
    "max_tokens": {"max_tokens": -1},
    "temperature": {"temperature": -0.5},
    "top_p": {"top_p": 1.5},
    "n": {"n": 0},
    "logprobs": {"logprobs": 50},
    "stop": {"stop": [str(i) for i in range(40)]},
    "prompt": {"prompt": []},
    "logit_bias": {"logit_bias": {"50": 10}},
    "presence_penalty": {"presence_penalty": 1.0},
    "echo": {"echo": True},
    "suffix": {"suffix": " and so on"},
    "priority": {"extra_body": {"priority": 5}},
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_parameter_is_named(client, field):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **{"prompt": PROMPT} | WRONG[field])
    assert caught.value.status_code == 400 and caught.value.type == "invalid_request_error"
    assert caught.value.param == field, caught.value.body
    assert field in caught.value.body["message"]


def test_what_an_engine_without_tools_is_asked_for_is_refused_and_named(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
    for options, field in (
        ({"tools": tools}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": image}, "messages"),
        ({"messages": []}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, **options)
        assert field in caught.value.param, caught.value.body
    chat(client, tools=[], response_format={"type": "text"}, max_tokens=1)  # which asks for nothing


def test_defaults_and_nulls_of_fields_that_are_not_served_are_accepted(client):
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "echo": False,
        "best_of": 1,
    }
    assert complete(client, max_tokens=1, user="me", **neutral).choices
    nulls = dict.fromkeys(("stop", "seed", "logprobs", "suffix", "temperature", "top_p", "n", "max_tokens"))
    assert complete(client, **nulls).choices


def test_a_prompt_that_the_context_cannot_hold(client):
    for options in ({"prompt": "word " * 3000}, {"prompt": PROMPT, "max_tokens": 2048}):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, **options)
        assert caught.value.code == "context_length_exceeded" and "2048" in str(caught.value).replace(",", "")


def test_an_unknown_model_is_not_found(client):
    for ask in (
        lambda: client.completions.create(model="nobody", prompt=PROMPT),
        lambda: client.chat.completions.create(model="nobody", messages=MESSAGES),
        lambda: client.models.retrieve("nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found" and "nobody" in str(caught.value)


def test_an_unknown_path_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="bard", input="x")


def test_a_wrong_key_is_no_key():
    with running_server(env={"MINIBATCHER_API_KEY": "open-sesame"}) as url:
        for key in ("open-sesam", "x"):
            with pytest.raises(openai.AuthenticationError) as caught, client_of(url, "?") as client:
                client.models.list(extra_headers={"Authorization": f"Bearer {key}"})
            assert caught.value.code == "invalid_api_key" and "open-sesam" not in str(caught.value.body)
        with client_of(url, "open-sesame") as client:
            assert [model.id for model in client.models.list()] == ["bard"]
            assert complete(client, max_tokens=1).choices


def test_a_full_queue_says_when_to_come_back_and_the_client_does():
    with running_server(*ONE_AT_A_TIME) as url, client_of(url) as client:
        streams = [complete(client, stream=True, **LONG)]
        next(iter(streams[0]))  # it runs
        streams.append(complete(client, stream=True, **LONG))  # it waits
        wait_until(lambda: Metrics(url)("vllm:num_requests_waiting") == 1, "one waits")
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client)
        assert caught.value.type == "rate_limit_error" and int(caught.value.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        patient = client.with_options(max_retries=10)
        assert complete(patient, max_tokens=1).usage.completion_tokens == 1
        check_nothing_in_use(url, {"abort": 2, "length": 1})


KEYS = """
[keys.alice]
key = "sesame"
requests_per_s = 0.01
burst_requests = 2
[keys.bob]
key = "open"
priority = 1
"""


def test_each_key_has_a_quota_and_a_most_urgent_class(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS, encoding="utf-8")
    ordered = running_server("--api-keys", str(file), "--ordering", "priority")
    with ordered as url, client_of(url, "sesame") as alice, client_of(url, "open") as bob:
        for _ in range(2):
            complete(alice, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            complete(alice, max_tokens=1)
        assert 50 < int(caught.value.response.headers["retry-after"]) <= 100
        assert "alice" in str(caught.value) and "sesame" not in str(caught.value)
        complete(bob, max_tokens=1)  # whom that does not concern
        complete(bob, max_tokens=1, extra_body={"priority": 2})
        with pytest.raises(openai.BadRequestError) as caught:
            complete(bob, max_tokens=1, extra_body={"priority": 0})
        assert caught.value.param == "priority"


def test_the_more_urgent_is_served_first():
    ended = []

    async def ask(client, url, priority, max_tokens, others):
        await asyncio.to_thread(wait_until, lambda: sum(Metrics(url).in_use.values()) >= others, "the others are there")
        await complete(client, max_tokens=max_tokens, extra_body={"ignore_eos": True, "priority": priority})
        ended.append(priority)

    async def main(url):
        async with async_client_of(url) as client:
            # One runs, and may be interrupted; one waits, and is overtaken by one who comes after it.
            await asyncio.gather(*(ask(client, url, *who) for who in ((2, 600, 0), (3, 5, 1), (1, 5, 2))))

    with running_server("--max-num-seqs", "1", "--ordering", "priority") as url:
        asyncio.run(main(url))
    assert ended == [1, 2, 3]


# Leaving


def test_a_closed_stream_ends_its_request(url, client):
    before = Counter(check_nothing_in_use(url).ends)
    with complete(client, stream=True, **LONG) as stream:
        for _, chunk in zip(range(5), stream):
            assert chunk.choices[0].finish_reason is None
    chats = chat(client, stream=True, n=2, **LONG)
    next(iter(chats))
    chats.close()
    check_nothing_in_use(url, before + Counter(abort=3))


def test_the_async_client_completes_streams_and_cancels(url, client):
    before = Counter(check_nothing_in_use(url).ends)
    expected = complete(client, max_tokens=12, temperature=0).choices[0].text

    async def stream_text(client):
        chunks = await complete(client, max_tokens=12, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def main():
        async with async_client_of(url) as client:
            answers = [complete(client, max_tokens=12, temperature=0) for _ in range(4)]
            streams = [stream_text(client) for _ in range(4)]
            answers = await asyncio.gather(*answers, *streams)
            assert [a if isinstance(a, str) else a.choices[0].text for a in answers] == [expected] * 8

            left = asyncio.create_task(complete(client, **LONG))  # no stream: the answer would come at the end
            while Metrics(url)("vllm:num_requests_running") == 0:
                await asyncio.sleep(0.02)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            async for _ in (stream := await chat(client, stream=True, **LONG)):
                break
            await stream.close()
            with pytest.raises(openai.BadRequestError):
                await complete(client, max_tokens=-1)

    asyncio.run(main())
    check_nothing_in_use(url, before + Counter(abort=2, length=9))
