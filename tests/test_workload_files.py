"""Workload files: each format, and the sentence that each kind of damage gets."""

import json
import random

import pytest

from minibatcher.errors import WorkloadError
from minibatcher.workload import Workload, WorkloadRequest, load_workload, read_workload


def turn(who, text):
    return {"from": who, "value": text}


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.9799600,374,44\r\n"
    "2023-11-17 00:00:01.0000001,396,109\r\n"
    "\r\n"
    "2023-11-17 00:00:03,12,7"
)
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 48]}\n'
)
OWN = (
    '{"prompt_tokens": 7, "output_tokens": 3, "arrival_time": 0.5}\n'
    '{"prompt": "Once upon", "tenant": "a", "priority": -2}\n'
)
UNIT_RATE = {
    "seed": 1,
    "requests": [
        {"id": 0, "prompt_tokens": 512, "max_new_tokens": 34, "arrival_unit": 0.0},
        {"id": 1, "prompt_tokens": 61, "max_new_tokens": 107, "arrival_unit": 2.5},
    ],
}
SHAREGPT = [
    {
        "id": "x_0",
        "conversations": [
            {"from": "human", "value": "What is\u2028a batch?"},
            {"from": "gpt", "value": "Many at once"},
        ],
    },
    {"id": "x_1", "conversations": []},
    {"id": "x_2", "conversations": [{"from": "system", "value": "Be brief"}, {"from": "human", "value": "Hello you"}]},
]


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "trace.dat"  # a name that says nothing: formats are known by content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def count_words(text):
    return len(text.split())


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_azure_csv(write, bom):
    workload = read_workload(write(bom + AZURE.encode()))
    assert [(r.prompt_tokens, r.output_tokens) for r in workload] == [(374, 44), (396, 109), (12, 7)]
    assert [r.arrival_time for r in workload] == pytest.approx([0, 1.0200401, 3.02004], abs=1e-9)
    assert [r.request_id for r in workload] == ["r0", "r1", "r2"]
    assert "Azure" in workload.source


def test_azure_csv_takes_columns_by_name_and_time_zones(write):
    text = "GeneratedTokens,TIMESTAMP,ContextTokens\n5,2024-05-10 00:00:00.5+00:00,9\n6,2024-05-10T02:00:02+02:00,8\n"
    workload = read_workload(write(text))
    assert [(r.arrival_time, r.prompt_tokens, r.output_tokens) for r in workload] == [(0, 9, 5), (1.5, 8, 6)]


def test_mooncake_jsonl(write):
    workload = read_workload(write(MOONCAKE))
    assert [r.arrival_time for r in workload] == [27.482, 30.535]
    assert [(r.prompt_tokens, r.output_tokens) for r in workload] == [(6955, 52), (6472, 26)]
    assert [r.prefix_hashes for r in workload] == [(46, 47), (46, 48)]


def test_own_jsonl(write):
    workload = read_workload(write("\n" + OWN.replace("\n", "\r\n")))
    late, text = sorted(workload, key=lambda r: -r.arrival_time)
    assert late == WorkloadRequest("r0", 0.5, 7, 3)
    assert text == WorkloadRequest("r1", 0.0, None, None, "Once upon", "a", -2)
    assert workload.requests == (text, late)  # sorted by arrival
    assert read_workload(write(OWN), count_tokens=count_words).requests[0].prompt_tokens == 2


@pytest.mark.parametrize("indent", [None, 1])
def test_unit_rate_json(write, indent):
    workload = read_workload(write(json.dumps(UNIT_RATE, indent=indent)))
    assert workload.requests == (WorkloadRequest("0", 0.0, 512, 34), WorkloadRequest("1", 2.5, 61, 107))
    assert "Unit-rate trace" in workload.source
    assert [r.arrival_time for r in workload.at_rate(0.8)] == [0, 1.25]


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt(write, as_lines):
    text = (
        "\n".join(json.dumps(r, ensure_ascii=False) for r in SHAREGPT) if as_lines else json.dumps(SHAREGPT, indent=1)
    )
    workload = read_workload(write(text))
    assert [(r.request_id, r.prompt) for r in workload] == [("x_0", "What is\u2028a batch?"), ("x_2", "Hello you")]
    assert all(r.prompt_tokens is None and r.output_tokens is None and r.arrival_time == 0 for r in workload)
    assert workload.notes == ("1 conversations without a human turn left out",)
    counted = read_workload(write(text), count_tokens=count_words)
    assert [(r.prompt_tokens, r.output_tokens) for r in counted] == [(4, 3), (2, None)]


def test_sharegpt_with_repeated_ids_is_numbered(write):
    workload = read_workload(write(json.dumps([SHAREGPT[0], SHAREGPT[0]])))
    assert [r.request_id for r in workload] == ["r0", "r1"]


def test_round_trip(tmp_path):
    rng = random.Random(5)
    requests = [
        WorkloadRequest(
            f"id-{i}", rng.random() * 9, rng.randint(1, 99), rng.choice([None, 3, 8]), tenant=rng.choice("ab")
        )
        for i in range(20)
    ]
    requests.append(WorkloadRequest("text", 0.0, None, 4, "näïve\u2028\n“text”", priority=3, prefix_hashes=(1, 2**40)))
    workload = Workload("mine", tuple(requests), "Made by a test.", ("a note",))
    workload.to_jsonl(tmp_path / "w.jsonl")
    assert load_workload(str(tmp_path / "w.jsonl")) == workload


BROKEN = {
    "empty": ("", r"is empty; expected an Azure LLM trace"),
    "blank": ("\n \r\n", r"is empty"),
    "empty list": ("[]", r"holds no requests"),
    "header only": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"holds no requests, only its header"),
    "odd header": ('{"workload": "w", "notes": 3}', r"line 1: notes must be a list of texts, not 3"),
    "own header only": ('{"workload": "w", "source": "s"}', r"has no requests"),
    "only silent conversations": ('[{"conversations": []}]', r"has no requests"),
    "other text": ("hello\nworld", r"line 1: format not recognised \('hello'\); expected"),
    "other csv": ("a,b,c\n1,2,3", r"line 1: format not recognised"),
    "other json": ('{"a": 1, "b": 2}', r"line 1: format not recognised \(keys: 'a', 'b'\)"),
    "list of numbers": ("[1, 2]", r"item 1: expected an object, not '1'"),
    "half a line": (OWN[:-20], r"line 2: not complete JSON .* expected one JSON object a line. The file may be half"),
    "half a list": (json.dumps(SHAREGPT, indent=1)[:-30], r"line \d\d: not complete JSON"),
    "half a row": (AZURE[: AZURE.index("396") + 3], r"line 3: 2 of 3 values"),
    "line that is no object": ('{"prompt_tokens": 1}\n7', r"line 2: expected one JSON object a line, not '7'"),
    "not UTF-8": (OWN.encode() + b'{"prompt": "caf\xe9"}', r"line 3: byte 0xe9 is not UTF-8"),
    "UTF-16": (OWN.encode("utf-16"), r"line 1: byte 0xff is not UTF-8"),
    "zero length": ('{"prompt_tokens": 0}', r"line 1: prompt_tokens must be a whole number \(int\), 1 to .* not 0"),
    "negative length": (MOONCAKE.replace("26,", "-26,"), r"line 2: output_tokens must be .* not -26"),
    "negative row": (AZURE.replace("109", "-109"), r"line 3: output_tokens must be .* not -109"),
    "half a token": ('{"prompt_tokens": 1.5}', r"line 1: prompt_tokens must be a whole number, not 1.5"),
    "NaN length": ('{"prompt_tokens": NaN}', r"line 1: prompt_tokens must be a whole number, not nan"),
    "infinite length": ('{"prompt_tokens": 1, "output_tokens": Infinity}', r"output_tokens must be a whole number"),
    "huge length": ('{"prompt_tokens": 1e30}', r"line 1: prompt_tokens must be"),
    "true length": ('{"prompt_tokens": true}', r"line 1: prompt_tokens must be a whole number, not True"),
    "word in a row": (AZURE.replace("396", "many"), r"line 3: ContextTokens must be a whole number, not 'many'"),
    "no time in a row": (
        AZURE.replace("2023-11-17 00:00:03", "noon"),
        r"line 5: TIMESTAMP must look like .* not 'noon'",
    ),
    "no such time": (AZURE.replace("00:00:03", "25:00:03"), r"line 5: TIMESTAMP must look like"),
    "rows out of order": (
        AZURE.replace("11-17 00:00:03", "11-15 00:00:03"),
        r"line 5: .* earlier than the first",
    ),
    "negative arrival": (
        '{"prompt_tokens": 1, "arrival_time": -1}',
        r"line 1: arrival_time must be a finite .* not -1",
    ),
    "NaN arrival": ('{"prompt_tokens": 1, "arrival_time": NaN}', r"line 1: arrival_time must be a finite number"),
    "infinite arrival": ('{"prompt_tokens": 1, "arrival_time": Infinity}', r"line 1: arrival_time must be a finite"),
    "overflowing arrival": (
        '{"prompt_tokens": 1, "arrival_time": 1' + "0" * 400 + "}",
        r"arrival_time must be a finite",
    ),
    "endless digits": ('{"prompt_tokens": ' + "1" * 5000 + "}", r"line 1"),
    "endless nesting": ("[" * 100_000, r"line 1"),
    "text as arrival": ('{"prompt_tokens": 1, "arrival_time": "now"}', r"arrival_time must be a number, not 'now'"),
    "no length, no text": (
        '{"prompt_tokens": 1}\n{"output_tokens": 1}',
        r"line 2: .* needs prompt_tokens .* or prompt",
    ),
    "empty text": ('{"prompt": ""}', r"line 1: prompt must be a non-empty text"),
    "misspelt key": ('{"prompt": "a", "arival_time": 1}', r"line 1: unknown key 'arival_time'; known: arrival_time"),
    "priority that is no number": (
        '{"prompt": "a", "priority": "high"}',
        "line 1: priority must be a whole number, not",
    ),
    "priority out of range": (
        '{"prompt": "a", "priority": 1e30}',
        r"line 1: priority must be .* to 1,000,000,000, not 1",
    ),
    "tenant that is no text": ('{"prompt": "a", "tenant": 3}', r"line 1: tenant must be a text, not 3"),
    "same id twice": ('{"prompt": "a", "request_id": 1}\n{"prompt": "b", "request_id": "1"}', r"'1' occurs twice"),
    "missing key": (MOONCAKE.replace('"input_length": 6472, ', ""), r"line 2: input_length \(tokens\) is missing"),
    "odd hashes": (MOONCAKE.replace("[46, 48]", '["a"]'), r"line 2: hash_ids must be a list of whole numbers"),
    "requests that are no list": ('{"requests": 3}', r"requests must be a list of objects, not 3"),
    "request that is no object": ('{"requests": [3]}', r"request 1: expected an object, not 3"),
    "no request in the list": ('{"requests": []}', r"holds no requests"),
    "unit-rate trace without times": (
        '{"requests": [{"prompt_tokens": 1, "max_new_tokens": 2}]}',
        r"request 1: arrival_unit \(seconds at one request a second\) is missing",
    ),
    "unit-rate trace with half a token": (
        json.dumps(UNIT_RATE).replace("107", "1.5"),
        r"request 2: max_new_tokens must be a whole number, not 1.5",
    ),
    "half a unit-rate trace": (json.dumps(UNIT_RATE, indent=1)[:-9], r"line 1: not complete JSON"),
    "turns that are no list": ('[{"conversations": 3}]', r"item 1: conversations must be a list"),
    "turn without text": ('[{"conversations": [{"from": "human"}]}]', r"item 1: each turn .* needs a value"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damage_is_named_with_its_line(write, case):
    content, message = BROKEN[case]
    path = write(content)
    with pytest.raises(WorkloadError, match=message) as caught:
        load_workload(path)
    assert str(path) in str(caught.value) or "trace" in str(caught.value)


EPOCH = (
    '{"prompt_tokens": 7, "arrival_time": 1700000003}\n{"prompt_tokens": 5, "arrival_time": 1700000000.5}',
    MOONCAKE.replace("27482", "1700000000500").replace("30535", "1700000003000"),
)


@pytest.mark.parametrize("content", EPOCH)
def test_times_since_1970_are_shifted_and_noted(write, content):
    workload = read_workload(write(content))
    assert [r.arrival_time for r in workload] == [0, 2.5]
    assert workload.notes == ("arrivals shifted by 1,700,000,000 s, so that the first is at 0",)
    day = read_workload(write('{"prompt_tokens": 4, "arrival_time": 86400}'))
    assert day.requests[0].arrival_time == 86400 and not day.notes


def test_halves_of_surrogate_pairs_are_replaced(write):
    text = r'{"workload": "w\ud800", "source": "\uDC00"}' + "\n"
    text += r'{"prompt": "a\ud800b \ud83d\ude00 c:\\ud800", "request_id": "\udfff", "tenant": "\uD8ff"}'
    workload = read_workload(write(text))
    (request,) = workload
    assert request.prompt == "a\ufffdb \U0001f600 c:\\ud800"
    assert (request.request_id, request.tenant, workload.name, workload.source) == (
        "\ufffd",
        "\ufffd",
        "w\ufffd",
        "\ufffd",
    )


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(WorkloadError, match="There is no workload file"):
        load_workload(tmp_path / "none.jsonl")
    with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
        load_workload(tmp_path)


def test_num_requests_and_rate_of_a_file(write):
    path = write(AZURE)
    two = load_workload(path, num_requests=2, request_rate=4)
    assert [r.arrival_time for r in two] == pytest.approx([0, 0.25])
    assert two.notes == ("first 2 of 3 requests", "arrivals rescaled from 0.9804/s to 4/s")
    with pytest.raises(WorkloadError, match="holds 3 requests; 4 were asked for"):
        load_workload(path, num_requests=4)
    with pytest.raises(WorkloadError, match="whole number, 1 or more, not 0"):
        load_workload(path, num_requests=0)


def test_real_traces(shared_dir):
    traces = shared_dir / "traces"
    conv = read_workload(traces / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv")
    assert len(conv) == 19366 and conv.summary()["prompt_tokens"]["p50"] == 1020
    assert conv.summary()["arrival_rate"] == pytest.approx(5.53, abs=0.01)
    code = read_workload(traces / "azure-llm-2023" / "AzureLLMInferenceTrace_code.csv")
    assert len(code) == 8819 and code.summary()["arrival_cv"] == pytest.approx(13.15, abs=0.01)
    mooncake = read_workload(traces / "mooncake-fast25" / "conversation_trace.jsonl")
    assert len(mooncake) == 12031 and mooncake.summary()["output_tokens"]["max"] == 2000
    assert all(len(r.prefix_hashes) == -(-r.prompt_tokens // 512) for r in mooncake)
