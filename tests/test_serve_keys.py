"""Key files: each mistake gets a sentence that tells no secret, and limits come out as they were written."""

import hashlib

import pytest

from minibatcher.errors import InvalidParameter
from minibatcher.serve.keys import ApiKey, ApiKeys, secrets_of

SECRET = "sk-very-secret"


def write(tmp_path, text):
    path = tmp_path / "keys.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_key_is_found_by_its_secret_and_by_its_digest(tmp_path):
    digest = hashlib.sha256(b"other-secret").hexdigest()
    keys = ApiKeys.from_file(
        write(
            tmp_path,
            f'[keys.alice]\nkey = "{SECRET}"\ntokens_per_s = 100\n'
            f'[keys.bob]\nkey_sha256 = "{digest.upper()}"\npriority = 2\nmax_waiting_requests = 3\n',
        )
    )
    alice, bob = keys.find(SECRET), keys.find("other-secret")
    assert alice and alice.name == "alice" and alice.priority == 0 and alice.limit.tokens_per_s == 100
    assert bob and bob.name == "bob" and bob.priority == 2 and keys.has_priorities
    for wrong in (None, "", SECRET + " ", SECRET[:-1], SECRET.upper(), "\udcff", digest, "x" * 100_000):
        assert keys.find(wrong) is None
    assert keys.names == ["alice", "bob"] and len(keys) == 2
    assert secrets_of(tmp_path / "keys.toml") == {"alice": SECRET}
    assert SECRET not in repr(keys) + repr(vars(keys)) + repr(alice)


def test_each_key_may_have_its_share_of_the_queue_or_what_it_names(tmp_path):
    text = '[keys.a]\nkey="1"\n[keys.b]\nkey="2"\nmax_waiting_requests=9\n[keys.c]\nkey="3"\ntokens_per_s=5\n'
    keys = ApiKeys.from_file(write(tmp_path, text))
    limits = keys.limits(8, 1000)
    assert (limits.max_waiting_requests, limits.max_waiting_tokens) == (8, 1000)
    assert {name: limit.max_waiting_requests for name, limit in limits.tenants.items()} == {"a": 2, "b": 9, "c": 2}
    assert limits.tenants["c"].tokens_per_s == 5 and limits.tenants["c"].burst_tokens == 300
    assert keys.limits(2, None).tenants["a"].max_waiting_requests == 1, "nobody's share is nothing"
    assert keys.limits(None, None).tenants["a"].max_waiting_requests is None


def test_a_single_key_has_the_whole_queue():
    keys = ApiKeys.single(SECRET)
    assert keys.find(SECRET) == ApiKey("default")
    assert keys.limits(256, None).tenants["default"].max_waiting_requests == 256
    for bad in ("", " ", "two words", "schlüssel", "line\nbreak"):
        with pytest.raises(InvalidParameter, match="printable ASCII") as caught:
            ApiKeys.single(bad)
        assert not bad.strip() or bad not in str(caught.value)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "a table \\[keys.NAME\\]"),
        ("[keys]\n", "no API key"),
        ('other = 1\n[keys.a]\nkey="x"\n', "nothing else"),
        (f'[keys]\na = "{SECRET}"\n', "each key is a table"),
        (f'keys = "{SECRET}"\n', "a table \\[keys.NAME\\]"),
        ("[keys.a]\n", "one of key and key_sha256"),
        (f'[keys.a]\nkey="{SECRET}"\nkey_sha256="{"0" * 64}"\n', "one of key and key_sha256"),
        (f'[keys.a]\nkey="{SECRET}"\nquota=1\n', "field 'quota'; known: key, key_sha256, priority, tokens_per_s"),
        (f'[keys.a]\nkey="{SECRET}"\n[keys.b]\nkey="{SECRET}"\n', "'a' and 'b' have the same secret"),
        ('[keys.a]\nkey=""\n', "key of \\[keys.a\\] must be a text of printable ASCII"),
        (f'[keys.a]\nkey=["{SECRET}"]\n', "key of \\[keys.a\\] must be a text"),
        (f'[keys.a]\nkey="{SECRET} x"\n', "without spaces"),
        (f'[keys.a]\nkey_sha256="{SECRET}"\n', "64 hex digits"),
        (f'[keys.a]\nkey_sha256="{hashlib.sha256(b"").hexdigest()}"\n', "of an empty secret"),
        (f'[keys.a]\nkey="{SECRET}"\npriority=1.5\n', "priority of \\[keys.a\\] must be a whole number"),
        (f'[keys.a]\nkey="{SECRET}"\npriority=true\n', "priority of"),
        (f'[keys.a]\nkey="{SECRET}"\ntokens_per_s="many"\n', "\\[keys.a\\]: tokens_per_s must be a number"),
        (f'[keys.a]\nkey="{SECRET}"\ntokens_per_s=nan\n', "tokens_per_s"),
        (f'[keys.a]\nkey="{SECRET}"\ntokens_per_s=1{"0" * 400}\n', "tokens_per_s must be a number"),
        (f'[keys.a]\nkey="{SECRET}"\nburst_tokens=5\n', "says nothing without tokens_per_s"),
        (f'[keys.a]\nkey="{SECRET}"\nmax_waiting_requests=0\n', "\\[keys.a\\]: max_waiting_requests"),
        (f'[keys."*"]\nkey="{SECRET}"\n', "can't be the name of a key"),
        (f'[keys.""]\nkey="{SECRET}"\n', "can't be the name of a key"),
        (f'[keys.a]\nkey="{SECRET}\n', "is not TOML"),
        (f'[keys.a]\nkey="{SECRET}"\n[keys.a]\nkey="y"\n', "is not TOML"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_mistake_in_the_file_gets_a_sentence_without_the_secret(tmp_path, text, sentence):
    with pytest.raises(InvalidParameter, match=sentence) as caught:
        ApiKeys.from_file(write(tmp_path, text))
    assert "keys.toml" in str(caught.value) and SECRET not in str(caught.value)
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


def test_a_file_that_cant_be_read_gets_a_sentence(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InvalidParameter, match="can't read the key file"):
            ApiKeys.from_file(path)
